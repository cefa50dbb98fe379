"""Sets up the standard library's logging for one process. Called once by every entry point; modules only `getLogger`."""

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

from trivet.process.closed_output import discard_output
from trivet.process.imports import quiet_noisy_loggers

SUCCESS = 25
"""Level of the line that a role writes when a step is done; above INFO, below WARNING."""


def setup_logging(role: str, *, level: str, file: Path | None = None, as_json: bool = False) -> None:
    """Log to stdout, and to `file` too when given; what an earlier call set up is replaced.

    A line reads `12:00:01 trainer INFO policy published version=3 digest=…`: an event, then `key=value`.

    Args:
        level: lowest severity written: debug, info, warning or error.
        as_json: write each line as one JSON object, `JsonFormatter`'s, instead.
    """
    logging.addLevelName(SUCCESS, "SUCCESS")
    text = logging.Formatter(f"%(asctime)s {role.replace('%', '%%')} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    formatter = JsonFormatter(role) if as_json else text
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
    quiet_noisy_loggers()
    logging.captureWarnings(True)
    # For every handler of the process: vLLM and uvicorn write to standard output through handlers of their own.
    logging.Handler.handleError = _discard_after_reader


class JsonFormatter(logging.Formatter):
    """Formats each record as one line with one JSON object, for programs that collect logs.

    `{"level": "INFO", "time": "2026-01-02T03:04:05.678+00:00", "role": "trainer", "logger": "trivet.x", "message": "…"}`, and
    `error` with the traceback, if there is one. The level comes first: the launcher finds lines for the terminal by it.
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
        time: unix seconds.
        fields: text by name; `role` and `message` at least.
    """
    stamp = datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"level": level, "time": stamp, **fields}, ensure_ascii=False)


def stdout_handler() -> logging.StreamHandler[TextIO]:
    """Return a handler that writes to standard output by a stream of its own.

    vLLM puts `(EngineCore pid=…)` before every line that its engine writes to `sys.stdout`, which would break the JSON.
    """
    return logging.StreamHandler(open(1, "w", buffering=1, encoding="utf-8", closefd=False))


def text_line(line: str) -> str:
    """Return a line of `JsonFormatter` in the form of a text line; any other line as it is."""
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
"""Role of the launcher's own lines, which name no level as text."""


_handle_error = logging.Handler.handleError


def _discard_after_reader(self: logging.Handler, record: logging.LogRecord) -> None:
    """Take the place of `Handler.handleError`: a closed pipe silences its stream, any other error is shown as before.

    The role goes on without a reader: its results are in files.
    """
    if isinstance(sys.exc_info()[1], BrokenPipeError) and isinstance(self, logging.StreamHandler):
        discard_output(cast("TextIO", self.stream))  # pyright: ignore[reportUnknownMemberType]
    else:
        _handle_error(self, record)
