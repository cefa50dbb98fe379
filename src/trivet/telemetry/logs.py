"""Sets up the standard library's logging for one process. Every entry point calls it once; other modules only use `getLogger`."""

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

from trivet.process.closed_output import discard_output
from trivet.process.imports import quiet_noisy_loggers

SUCCESS = 25
"""Level of the line that a role logs when a step is done: above INFO, below WARNING."""


def setup_logging(role: str, *, level: str, file: Path | None = None, as_json: bool = False) -> None:
    """Log to stdout, and also to `file` if it is given. Handlers of an earlier call are replaced.

    A line reads `12:00:01 trainer INFO policy published version=3 digest=…`: an event, then `key=value`.

    Args:
        level: lowest severity written: debug, info, warning or error.
        as_json: write each line as a JSON object (`JsonFormatter`) instead.
    """
    logging.addLevelName(SUCCESS, "SUCCESS")
    text = logging.Formatter(f"%(asctime)s {role.replace('%', '%%')} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    formatter = JsonFormatter(role) if as_json else text
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file))
    root = logging.getLogger()
    for old_handler in list(root.handlers):
        root.removeHandler(old_handler)
        old_handler.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level.upper())
    quiet_noisy_loggers()
    logging.captureWarnings(True)
    # For every handler of the process, because vLLM and uvicorn log to standard output through their own handlers.
    logging.Handler.handleError = _discard_after_reader


class JsonFormatter(logging.Formatter):
    """Formats each record as one line with one JSON object, for programs that collect logs.

    `{"level": "INFO", "time": "2026-01-02T03:04:05.678+00:00", "role": "trainer", "logger": "trivet.x", "message": "…"}`, and
    `error` with the traceback, if there is one. The level must come first: by it the launcher finds the lines for the terminal.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        error = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        return json_line(
            level=record.levelname,
            time=record.created,
            role=self._role,
            logger=record.name,
            message=record.getMessage(),
            **({"error": error} if error else {}),
        )


def json_line(*, level: str, time: float, **fields: str) -> str:
    """Return one log line as a JSON object.

    Args:
        time: Unix seconds.
        fields: further texts by name, at least `role` and `message`.
    """
    stamp = datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"level": level, "time": stamp, **fields}, ensure_ascii=False)


def stdout_handler() -> logging.StreamHandler[TextIO]:
    """Return a handler that writes to standard output, and not through `sys.stdout`.

    vLLM writes `(EngineCore pid=…)` before every line that its engine writes to `sys.stdout`, which would break the JSON.
    """
    return logging.StreamHandler(open(1, "w", buffering=1, encoding="utf-8", closefd=False))


def text_line(line: str) -> str:
    """Return a line of `JsonFormatter` in the format of a text line, and any other line unchanged."""
    if not line.startswith('{"level": '):
        return line
    try:
        fields = json.loads(line)
        clock = datetime.fromisoformat(fields["time"]).astimezone().strftime("%H:%M:%S")
        level = "" if fields["role"] == LAUNCHER else f"{fields['level']} "
        return f"{clock} {fields['role']} {level}{fields['message']}"
    except (ValueError, KeyError, TypeError):
        return line


LAUNCHER = "rl"
"""Role in the launcher's own lines, which have no level in the text format."""


_original_handle_error = logging.Handler.handleError


def _discard_after_reader(self: logging.Handler, record: logging.LogRecord) -> None:
    """Replace `Handler.handleError`: when the pipe is closed, drop further output; show any other error as before.

    A role continues without a reader of its output, because its results are in files.
    """
    if isinstance(sys.exc_info()[1], BrokenPipeError) and isinstance(self, logging.StreamHandler):
        discard_output(cast("TextIO", self.stream))  # pyright: ignore[reportUnknownMemberType]
    else:
        _original_handle_error(self, record)
