"""Draws curves side by side as an SVG file, without any library. For `trivet compare --svg` and `trivet bisect --svg`."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from trivet.errors import ConfigError
from trivet.storage.durable import write_atomically

_WIDTH, _HEIGHT = 300, 220
"""Size of a panel's axes, pixels."""
_LEFT, _TOP, _GAP, _BELOW = 60, 50, 70, 50
_COLOURS = ("#1f77b4", "#d62728")

Curve = Sequence[tuple[float, float]]
"""Points, across and up."""


class Panel(NamedTuple):
    """Curves over one axis."""

    across: str
    """Name of the horizontal axis, which begins at 0."""
    curves: Mapping[str, Sequence[Curve]]
    """By the name in the legend, of which there are at most two."""
    level: float | None = None
    """Height of a dashed line."""


def write_picture(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write the panels, of which all have the same legend, as a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    width, height = _LEFT + max(1, len(panels)) * (_WIDTH + _GAP), _TOP + _HEIGHT + _BELOW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{_LEFT}" y="18">{escape(title)}</text>',
    ]
    for index, name in enumerate(panels[0].curves if panels else ()):
        x = _LEFT + index * (width - _LEFT) // 2
        lines.append(f'<text x="{x}" y="36" fill="{_COLOURS[index]}">{escape(name)}</text>')
    for index, panel in enumerate(panels):
        lines += _draw_panel(panel, x=_LEFT + index * (_WIDTH + _GAP))
    try:
        write_atomically(path, "\n".join([*lines, "</svg>", ""]).encode())
    except OSError as exc:
        raise ConfigError(f"--svg {path} cannot be written: {exc.strerror}; choose another file") from exc


def _draw_panel(panel: Panel, *, x: int) -> Iterator[str]:
    """Yield the elements of one panel whose left end is at `x`."""
    points = [point for curves in panel.curves.values() for curve in curves for point in curve]
    heights = [height for _, height in points] + ([panel.level] if panel.level is not None else [])
    low, high, largest = min(heights), max(heights), max(across for across, _ in points) or 1.0
    margin = 0.05 * (high - low) or 0.05
    low, high, bottom = low - margin, high + margin, _TOP + _HEIGHT

    def place(across: float, height: float) -> tuple[str, str]:
        return f"{x + _WIDTH * across / largest:.1f}", f"{_TOP + _HEIGHT * (high - height) / (high - low):.1f}"

    yield f'<rect x="{x}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>'
    yield f'<text x="{x + _WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">{escape(panel.across)}</text>'
    yield f'<text x="{x + _WIDTH}" y="{bottom + 16}" text-anchor="end">{largest:,.0f}</text>'
    for height, y in ((high, _TOP + 10), (low, bottom)):
        yield f'<text x="{x - 6}" y="{y}" text-anchor="end">{height:.3g}</text>'
    if panel.level is not None:
        y = place(0.0, panel.level)[1]
        yield f'<line x1="{x}" y1="{y}" x2="{x + _WIDTH}" y2="{y}" stroke="#888" stroke-dasharray="4"/>'
    for curves, colour in zip(panel.curves.values(), _COLOURS, strict=False):
        for curve in curves:
            places = [place(*point) for point in curve]
            yield f'<polyline points="{" ".join(map(",".join, places))}" fill="none" stroke="{colour}" stroke-width="2"/>'
            yield from (f'<circle cx="{across}" cy="{down}" r="3" fill="{colour}"/>' for across, down in places)
