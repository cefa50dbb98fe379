"""How long does `trivet check` take for a million groups, how much memory, and what does it find?

Writes the history of a made-up run that kept every promise, in batches of 64 groups, with the few files that such a run leaves
besides its rollouts, and checks it in a process of its own: seconds and peak resident memory are that process's, imports included.
Then it damages copies of runs in one random place each, and counts what the checker finds, by kind: `RUN...` are directories of
finished runs, by default a few that tests/support makes by the product's own writers. Every mutation that was missed is printed.

Ceiling: reading the file twice and decoding each line once, `read_s`.

    uv run python scripts/bench/checker.py [--groups 1000000] [--mutations 1000] [--seed 1] [RUN...]
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.made_run import make_run, write_weights
from support.mutations import Outcome, judge_many, shares
from trivet.checkpoints.commit import ORCHESTRATOR, TRAINER, begin_part, commit, finish_part
from trivet.config.layout import RunLayout
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.checkpoint import OrchestratorPart, RunTotals
from trivet.orchestrator.sampler import SamplerState
from trivet.telemetry.events import decode_event, seal
from trivet.weights.publish import publish
from trivet.wire.codec import encode
from trivet.wire.events import (
    AnyEvent,
    BatchFormed,
    Commit,
    Dispatch,
    Finish,
    Load,
    Publish,
    Retire,
    ServerUp,
    Start,
    Stop,
    Train,
)
from trivet.wire.versions import GroupId, PolicyVersion, Step

GROUPS_PER_BATCH = 64
_SERVER = "http://127.0.0.1:8000"
_NUM_MADE_RUNS = 6


def events_of(num_steps: int, *, digests: dict[int, str], record: str) -> Iterator[tuple[str, AnyEvent]]:
    """Yield role and event, in order, of a run of one attempt on one server.

    Args:
        digests: of the policies that are there at the end.
        record: digest of the last step's checkpoint.
    """
    orchestrator, trainer = ORCHESTRATOR, TRAINER
    for role in (orchestrator, trainer):
        yield role, Start(run_id="run", from_step=Step(0))
    yield orchestrator, Load(version=PolicyVersion(0), digest="start", server=_SERVER)
    yield orchestrator, ServerUp(version=PolicyVersion(0), digest="start", server=_SERVER)
    for step in range(1, num_steps + 1):
        held = PolicyVersion(step - 1)
        ids = [GroupId(group_id) for group_id in range((step - 1) * GROUPS_PER_BATCH, step * GROUPS_PER_BATCH)]
        for group_id in ids:
            yield orchestrator, Dispatch(group_id=group_id, env="env", example_id=group_id % 9973, version=held, server=_SERVER)
        for group_id in ids:
            finish = Finish(group_id=group_id, reward_mean=0.5, completion_tokens=9.0, oldest_version=held, newest_version=held)
            yield orchestrator, finish
        yield orchestrator, BatchFormed(step=Step(step), group_ids=ids, oldest_version=held, newest_version=held)
        yield trainer, Train(step=Step(step), group_ids=ids)
        version, digest = PolicyVersion(step), digests.get(step, f"{step:064x}")
        yield trainer, Publish(version=version, digest=digest)
        yield orchestrator, Load(version=version, digest=digest, server=_SERVER)
        if step > 1:
            yield trainer, Retire(version=PolicyVersion(step - 1))
    yield trainer, Commit(step=Step(num_steps), digest=record)
    for role in (orchestrator, trainer):
        yield role, Stop(step=Step(num_steps), reason="done")


def write_run(layout: RunLayout, *, num_groups: int) -> int:
    """Write the files of a run; return the number of events."""
    num_steps = num_groups // GROUPS_PER_BATCH
    manifest = publish(
        layout, version=PolicyVersion(num_steps), run_id="run", write=lambda directory: write_weights(directory, b"weights")
    )
    part = OrchestratorPart(
        progress=RunTotals(step=Step(num_steps)),
        sampler=SamplerState(next_group_id=GroupId(num_steps * GROUPS_PER_BATCH)),
        buffer=BufferState(),
        rollouts_per_example=2,
    )
    for name, content in ((ORCHESTRATOR, encode(part)), (TRAINER, b"shards")):
        (begin_part(layout, Step(num_steps), name) / "state.msgpack").write_bytes(content)
        finish_part(layout, Step(num_steps), name)
    record = commit(layout, Step(num_steps), run_id="run")
    last = {ORCHESTRATOR: b"", TRAINER: b""}
    offset = count = 0
    with layout.events.open("wb") as file:
        for role, event in events_of(num_steps, digests={num_steps: manifest.digest}, record=record.digest):
            event.time, event.role, event.attempt = 1.8e9 + count / 1000, role, 1
            line, last[role] = seal(msgspec.json.encode(event), offset=offset, last=last[role])
            file.write(line)
            offset, count = offset + len(line), count + 1
    return count


def check(layout: RunLayout) -> tuple[float, float]:
    """Return seconds and peak resident MiB of `trivet check`."""
    program = "import sys; from trivet.cli.main import main; sys.exit(main())"
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program, "check", str(layout.root)], check=True)
    return time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def read_twice(path: Path) -> float:
    """Return the seconds that it takes to read a file twice: its lines alone, then decoded."""
    started = time.monotonic()
    for decode in (False, True):
        with path.open("rb") as file:
            for line in file:
                if decode:
                    decode_event(line)
    return time.monotonic() - started


def mutate(runs: Sequence[Path], *, count: int, seed: int, scratch: Path) -> list[Outcome]:
    """Change runs in many ways; return for each change whether the checker found it."""
    made = [RunLayout(scratch / f"made_{number}") for number in range(0 if runs else _NUM_MADE_RUNS)]
    for number, layout in enumerate(made):
        make_run(layout, seed=number)
    outcomes = judge_many([*runs, *(layout.root for layout in made)], count=count, seed=seed)
    for outcome in outcomes:
        if not outcome.is_found:
            print(f"missed: {outcome.where} {outcome.kind}: {outcome.what}")
    return outcomes


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directories of finished runs; they stay as they are")
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trivet-checker-") as directory:
        layout = RunLayout(Path(directory) / "run")
        num_events = write_run(layout, num_groups=arguments.groups)
        read_s = read_twice(layout.events)
        seconds, rss_mib = check(layout)
        num_bytes = layout.events.stat().st_size
        outcomes = mutate(arguments.runs, count=arguments.mutations, seed=arguments.seed, scratch=Path(directory))
    found = sum(outcome.is_found for outcome in outcomes)
    result = {
        "bench": "checker",
        "groups": arguments.groups // GROUPS_PER_BATCH * GROUPS_PER_BATCH,
        "events": num_events,
        "mib": round(num_bytes / 2**20, 1),
        "seconds": round(seconds, 2),
        "read_s": round(read_s, 2),
        "rss_mib": round(rss_mib, 1),
        "mutations": len(outcomes),
        "runs": [path.name for path in arguments.runs] or f"{_NUM_MADE_RUNS} made by tests/support/made_run.py",
        "seed": arguments.seed,
        "found": round(found / len(outcomes), 4) if outcomes else None,
        "found_share": shares(outcomes),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
