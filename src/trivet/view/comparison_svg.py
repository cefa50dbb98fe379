"""Draws the curves of two sides as an SVG file: a panel for each budget, without any library. For `trivet compare --svg`."""

from collections.abc import Iterator, Sequence
from html import escape

from trivet.view.comparison import BUDGETS, CurvePoint, EnvironmentComparison

_WIDTH, _HEIGHT = 300, 220
"""Size of a panel's axes, pixels."""
_LEFT, _TOP, _GAP = 60, 50, 50
_COLOURS = {"A": "#1f77b4", "B": "#d62728"}


def draw_comparison(found: EnvironmentComparison, *, names: tuple[str, str]) -> str:
    """Return the text of the file.

    Args:
        names: what the two sides are called in the legend.
    """
    sides = {"A": found.curves_a, "B": found.curves_b}
    means = [point.mean for curves in sides.values() for curve in curves for point in curve]
    low, high = min(means), max(means)
    margin = 0.05 * (high - low) or 0.05
    budgets = [difference.budget for difference in found.differences]
    width = _LEFT + max(1, len(budgets)) * (_WIDTH + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _HEIGHT + 50}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{_TOP + _HEIGHT + 50}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">{escape(found.env)}: mean reward on {found.num_examples:,} examples</text>',
    ]
    for number, (side, name) in enumerate(zip(_COLOURS, names, strict=True)):
        lines.append(f'<text x="{_LEFT + 330 * number}" y="36" fill="{_COLOURS[side]}">{side}: {escape(name)}</text>')
    for number, budget in enumerate(name for name in BUDGETS if name in budgets):
        lines += _draw_panel(sides, budget, x=_LEFT + number * (_WIDTH + _GAP), low=low - margin, high=high + margin)
    return "\n".join([*lines, "</svg>", ""])


def _draw_panel(sides: dict[str, list[list[CurvePoint]]], budget: str, *, x: int, low: float, high: float) -> Iterator[str]:
    """Yield the elements of one panel whose left end is at `x`."""
    largest = max(point.costs[budget] for curves in sides.values() for curve in curves for point in curve) or 1.0

    def place(point: CurvePoint) -> str:
        across = x + _WIDTH * point.costs[budget] / largest
        return f"{across:.1f},{_TOP + _HEIGHT * (high - point.mean) / (high - low):.1f}"

    yield f'<rect x="{x}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>'
    yield f'<text x="{x + _WIDTH / 2}" y="{_TOP + _HEIGHT + 34}" text-anchor="middle">{budget}</text>'
    yield f'<text x="{x + _WIDTH}" y="{_TOP + _HEIGHT + 16}" text-anchor="end">{largest:,.0f}</text>'
    yield f'<text x="{x}" y="{_TOP + _HEIGHT + 16}">0</text>'
    for value, y in ((high, _TOP + 10), (low, _TOP + _HEIGHT)):
        yield f'<text x="{x - 6}" y="{y}" text-anchor="end">{value:.3f}</text>'
    for side, curves in sides.items():
        for curve in curves:
            yield from _draw_curve([place(point) for point in curve], colour=_COLOURS[side])


def _draw_curve(places: Sequence[str], *, colour: str) -> Iterator[str]:
    yield f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for across, _, down in (place.partition(",") for place in places):
        yield f'<circle cx="{across}" cy="{down}" r="3" fill="{colour}"/>'
