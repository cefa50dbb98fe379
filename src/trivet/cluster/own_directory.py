"""The directories that nodes have instead of the run's output directory, when weights travel over HTTP.

Such a directory has the same layout, and goes with the node's temporary files. With each process the driver sends the secret and
the configurations that it reads. The logs are copied to the first node: the driver says how many bytes of each it has received, and
the node sends the next ones with every state that it observes. So a message that is lost or arrives twice does no harm.
"""

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from trivet.cluster.messages import LogPart
from trivet.config.layout import RunLayout
from trivet.launcher.plan import ProcessSpec
from trivet.machine import make_private_directory
from trivet.secret import find_secret
from trivet.storage.durable import list_files, open_regular, write_atomically

_MAX_BYTES = 64 << 10
"""Bytes of all logs in one message. Above 100 KiB, Ray would pass the message through its object store."""
_OTHER_FILE = b"\n(another file of the node begins here; the end of the one before may be missing)\n"


class OwnDirectory:
    """The directory `root` of a node, in place of `output_dir` of the driver.

    >>> host.start(own.prepare(process.spec, process.files))
    >>> parts = own.read_logs(desired.received)
    """

    def __init__(self, root: Path, *, output_dir: Path) -> None:
        root.mkdir(mode=0o700)
        self.layout = RunLayout(root)
        self._output_dir = output_dir

    def prepare(self, spec: ProcessSpec, files: Mapping[str, str]) -> ProcessSpec:
        """Write what a process reads, by the paths on the driver, for its owner alone; return `spec` with the paths here."""
        for name, text in files.items():
            write_atomically(self._moved(Path(name)), text.encode(), is_private=True)
        argv = [str(self._moved(Path(word))) if word in files else word for word in spec.argv]
        return replace(
            spec,
            argv=(*argv, "--output-dir", str(self.layout.root)),
            log=self._moved(spec.log),
            reports=tuple(replace(report, path=self._moved(report.path)) for report in spec.reports),
        )

    def _moved(self, path: Path) -> Path:
        return self.layout.root / path.relative_to(self._output_dir)

    def read_logs(self, received: Mapping[str, int]) -> tuple[LogPart, ...]:
        """Return the next part of each log of which the driver has not `received` every byte: at most `_MAX_BYTES` together."""
        logs, parts = self.layout.logs, list[LogPart]()
        with suppress(OSError):  # one was removed just now: the others follow with the next state
            waiting = [name for name in list_files(logs) if (logs / name).stat().st_size > received.get(name, 0)]
            for name in waiting:
                with open_regular(logs / name) as file:
                    offset = file.seek(received.get(name, 0))
                    data = file.read(max(1, _MAX_BYTES // len(waiting)))
                    parts.append(LogPart(name=name, offset=offset, data=data, is_cut=bool(file.read(1))))
        return tuple(parts)


def scratch_note_of(output_dir: Path, *, node: int) -> Path:
    """Return the file that names the temporary directory of a node which does not see the output directory."""
    run = hashlib.sha256(os.fsencode(output_dir.absolute())).hexdigest()[:16]
    return make_private_directory(Path(tempfile.gettempdir(), f"trivet_nodes_{os.getuid()}")) / f"{run}.{node}"


def read_files(spec: ProcessSpec, *, layout: RunLayout, nodes: Collection[int]) -> dict[str, str]:
    """Return the configurations of a process on one of `nodes` and the run's secret, by their paths in the output directory."""
    if spec.node not in nodes:
        return {}
    configs = {word: Path(word).read_text() for word in spec.argv if Path(word).parent == layout.configs}
    return {**configs, str(layout.secret): find_secret(layout, environ=os.environ).token}


def append_logs(parts: deque[LogPart], directory: Path) -> None:
    """Append parts to the logs below `directory`, and take away what is written."""
    with suppress(OSError):  # such as a full disk: the rest is written later
        while parts:
            path = directory / parts[0].name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                opening = _OTHER_FILE if parts[0].offset == 0 and file.tell() else b""
                data = opening + parts[0].data
                num_written = file.write(data)
            part = parts.popleft()
            if num_written < len(data):
                parts.appendleft(msgspec.structs.replace(part, offset=part.offset + num_written, data=data[num_written:]))
