"""Section for tests of a run's endurance."""

from pathlib import Path

from trivet.config.sections.base import Section


class FaultsConfig(Section):
    """Faults that are injected on purpose, for tests."""

    schedule: Path | None = None
    """For tests of endurance: JSON file of faults that happen to this run, each once; scripts/chaos.py writes such files."""
