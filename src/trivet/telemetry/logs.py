"""Sets up the standard library's logging for one process. Called once by every entry point; modules only `getLogger`."""

import logging
import sys
from pathlib import Path

SUCCESS = 25
"""Level of the line that a role writes when a step is done; above INFO, below WARNING."""

_NOISY = (
    "httpx",
    "httpx2",
    "httpcore",
    "openai",
    "urllib3",
    "filelock",
    "datasets",
    "huggingface_hub",
    "asyncio",
    "fsspec",
    "wandb",
)
"""Libraries that log every request or file at INFO."""


def setup_logging(role: str, *, level: str, file: Path | None = None) -> None:
    """Log to stdout, and to `file` too when given; what an earlier call set up is replaced.

    A line reads `12:00:01 trainer INFO policy published version=3 digest=…`: an event, then `key=value`.

    Args:
        level: lowest severity written: debug, info, warning or error.
    """
    logging.addLevelName(SUCCESS, "SUCCESS")
    formatter = logging.Formatter(f"%(asctime)s {role.replace('%', '%%')} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
