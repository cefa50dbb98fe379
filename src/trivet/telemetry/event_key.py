"""Derives the key that signs a run's events from the run's secret. Called by every process that writes events."""

import os

from trivet.config.layout import RunLayout
from trivet.config.sections.shared import EventsConfig
from trivet.secret import find_secret

PURPOSE = "events"


def event_key(config: EventsConfig, layout: RunLayout) -> bytes | None:
    """Return the key that signs events, None when they are not signed.

    Raises:
        ConfigError: the run's secret cannot be read.
    """
    return find_secret(layout, environ=os.environ).derive(PURPOSE) if config.sign else None
