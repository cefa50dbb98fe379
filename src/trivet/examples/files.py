"""Locates the example configurations and environments: in the checkout where there is one, else in the installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def example_configs() -> Path:
    """Return the directory of the example configurations."""
    return _packaged("example_configs", in_checkout="configs")


def example_environments() -> Path:
    """Return the directory that has one environment package in each subdirectory."""
    return _packaged("example_environments", in_checkout="environments")


def _packaged(name: str, *, in_checkout: str) -> Path:
    """A wheel has the directory inside the package (pyproject.toml, force-include). A checkout has it beside `src/`."""
    packaged = _PACKAGE / name
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / in_checkout
