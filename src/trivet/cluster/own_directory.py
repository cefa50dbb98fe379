"""The directories that nodes have instead of the run's output directory, when weights travel over HTTP.

Such a directory has the same layout, and goes with the node's temporary files. The driver sends the secret and the configurations
that the node's processes read from it. Their logs are copied to the first node: the node sends the next part of each log with every
state that it observes, until the driver answers that it is written. So a message that is lost or arrives twice does no harm, and
both sides hold one part of a log at most, however large the log is.
"""

import hashlib
import os
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from trivet.cluster.messages import LogMark, LogPart
from trivet.cluster.table import NodeTable
from trivet.config.layout import RunLayout
from trivet.launcher.plan import ProcessSpec
from trivet.machine import make_private_directory
from trivet.storage.durable import list_files, open_regular, write_atomically

_MAX_BYTES = 64 << 10
"""Bytes of all logs in one message. Above 100 KiB, Ray would pass the message through its object store."""
_COPY_INTERVAL_S = 0.05
_CLOSE_TIMEOUT_S = 5.0
_OTHER_FILE = "(node {} writes another file from here on; the end of the one before may be missing)\n"


class OwnDirectory:
    """The directory `root` of a node, in place of `output_dir` of the driver.

    >>> own.write(desired.files)
    >>> host.start(own.redirect(spec))
    """

    def __init__(self, root: Path, *, output_dir: Path) -> None:
        root.mkdir(mode=0o700)
        self.layout = RunLayout(root)
        self._output_dir = output_dir
        self._written: dict[str, str] = {}
        self._marks: dict[str, LogMark] = {}

    def write(self, files: Mapping[str, str]) -> None:
        """Write the files that are new, by their paths on the driver. Only their owner may read them."""
        for name in [name for name in files if files[name] != self._written.get(name)]:
            write_atomically(self._moved(Path(name)), files[name].encode(), is_private=True)
            self._written[name] = files[name]

    def redirect(self, spec: ProcessSpec) -> ProcessSpec:
        """Return `spec` with the files of this directory."""
        argv = [str(self._moved(Path(word))) if word in self._written else word for word in spec.argv]
        return replace(
            spec,
            argv=(*argv, "--output-dir", str(self.layout.root)),
            log=self._moved(spec.log),
            reports=tuple(replace(report, path=self._moved(report.path)) for report in spec.reports),
        )

    def _moved(self, path: Path) -> Path:
        return self.layout.root / path.relative_to(self._output_dir)

    def acknowledge(self, copied: Mapping[str, LogMark]) -> None:
        """Note how much of each log the driver has written. A position in an earlier file of the same name does not count."""
        self._marks |= {name: mark for name, mark in copied.items() if mark.source == self._mark(name).source}

    def _mark(self, name: str) -> LogMark:
        return self._marks.get(name, LogMark(source=str(self.layout.root), offset=0))

    def read_logs(self) -> dict[str, LogPart]:
        """Return the next part of each log that is not all written, by its path below `logs/`: at most `_MAX_BYTES` together.

        A log that has become shorter counts as another file.
        """
        waiting: list[str] = []
        for name in {*self._marks, *list_files(self.layout.logs)}:
            mark, size = self._mark(name), 0
            with suppress(OSError):
                size = self.layout.log_file(name).stat().st_size
            if size < mark.offset:
                mark = LogMark(source=f"{mark.source}+", offset=0)
            self._marks[name] = mark
            waiting += [name] if size > mark.offset else []
        parts: dict[str, LogPart] = {}
        for name in waiting:
            mark = self._mark(name)
            with suppress(OSError), open_regular(self.layout.log_file(name)) as file:
                file.seek(mark.offset)
                data = file.read(max(1, _MAX_BYTES // len(waiting)))
                parts[name] = LogPart(source=mark.source, offset=mark.offset, data=data)
        return parts


def scratch_note_of(output_dir: Path, *, node: int) -> Path:
    """Return the file that names the temporary directory of a node which does not see the output directory."""
    run = hashlib.sha256(os.fsencode(output_dir.absolute())).hexdigest()[:16]
    return make_private_directory(Path(tempfile.gettempdir(), f"trivet_nodes_{os.getuid()}")) / f"{run}.{node}"


@contextmanager
def copying_logs(table: NodeTable, directory: Path) -> Generator[None, None, None]:
    """Append the logs of nodes to those below `directory` during the block. A thread writes, because the directory may hang."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(_COPY_INTERVAL_S):
            copy_logs(table, directory)
        copy_logs(table, directory)

    thread = threading.Thread(target=run, name="copying-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_CLOSE_TIMEOUT_S)


def copy_logs(table: NodeTable, directory: Path) -> None:
    """Append what nodes have sent of their logs and is not written yet. A line that an earlier file has left open ends before."""
    for node, name, part, mark in table.new_logs():
        with suppress(OSError):  # such as a full disk: the node sends the part again
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b", buffering=0) as file:
                if part.offset == 0:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                    opening = "\n" if file.read(1) not in (b"", b"\n") else ""
                    file.write((opening + (_OTHER_FILE.format(node) if mark is not None else "")).encode())
                num_written = file.write(part.data)
            table.note_copied(node, name, LogMark(source=part.source, offset=part.offset + num_written))
