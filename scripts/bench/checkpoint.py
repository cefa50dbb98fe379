"""What does a checkpoint after every step add to the time of a step, and where does it go?

The state is written from the learner's own memory while the next step computes, so the least it can cost is the processor time
of the writing thread, where training uses every core; the ceiling is the disk, which has one step's time for 12 bytes a
parameter.

    uv run python scripts/bench/checkpoint.py [--model tiny|DIRECTORY] [--tokens 2048 8192] [--steps 23] [--rounds 2]
        [--pairs 5]

Trains recorded batches with `uv run trainer` and `data.replay`, the real loop, which publishes its weights after every step, with
`ckpt.interval = 2`: one step has the write of a checkpoint beside it, the next has none, so that whatever else the machine does
falls on both. The write has to be over before that step is (`write_s` below `step_s`), or the two would not be apart. `step_s` is
a step with a write beside it and its beginning (`save_s`, which is paid at the end of the step before); `plain_step_s` one with
neither. Medians over all steps but the first three. `stream` is writing as many bytes from memory, directly and through the page
cache in turns (`--pairs`), while matrices are multiplied on all cores: what the direct writes of `trivet.checkpoints.stream` gain.
`--tokens` without a number measures nothing else. The last line is one JSON object; its `overhead` is the larger of the sizes'.
"""

import argparse
import json
import math
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import safe_open

from trivet.checkpoints.stream import FileStream
from trivet.config.layout import RunLayout
from trivet.storage.durable import FileRecord
from trivet.transport.recording import record_batch
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import Step

_ROW_TOKENS = 2048
_SAMPLE_TOKENS = 128
_WARM_UP = 3
"""Steps that are left out; after an odd number of them the first step is one that ends with a checkpoint."""
_PIECE_BYTES = 1 << 20
"""Bytes that the buffered writer digests and writes at one time: they stay in the cache of a core in between."""
_MATRIX_SIZE = 1024
_COMPUTE_S = 4.0
"""Seconds of products that a write has beside it: longer than the write of SmolLM2's checkpoint to an ordinary disk."""
_VOCABULARY = 64
"""Tokens that any model knows."""


def make_row(step: int, index: int) -> MicroBatch:
    """Make a full packed row of random tokens."""
    rng = np.random.default_rng([step, index])
    num_samples = _ROW_TOKENS // _SAMPLE_TOKENS
    lengths_S = np.full(num_samples, _SAMPLE_TOKENS, dtype=np.int32)
    position_ids_T = np.tile(np.arange(_SAMPLE_TOKENS, dtype=np.int32), num_samples)
    return MicroBatch(
        token_ids_T=rng.integers(0, _VOCABULARY, _ROW_TOKENS, dtype=np.int32),
        position_ids_T=position_ids_T,
        loss_mask_T=position_ids_T >= _SAMPLE_TOKENS // 2,
        logprobs_T=np.full(_ROW_TOKENS, -np.log(_VOCABULARY), dtype=np.float32),
        advantages_T=np.repeat(rng.normal(size=num_samples), _SAMPLE_TOKENS).astype(np.float32),
        temperatures_T=np.ones(_ROW_TOKENS, dtype=np.float32),
        sequence_lengths_S=lengths_S,
    )


def record_batches(root: Path, *, steps: int, tokens: int) -> None:
    """Record batches for a trainer that replays them."""
    for step in range(1, steps + 1):
        rows = [make_row(step, index) for index in range(max(1, round(tokens / _ROW_TOKENS)))]
        batch = Batch(
            step=Step(step),
            purpose=BatchPurpose.TRAIN,
            micro_batches=rows,
            group_ids=[GroupId(step)],
            num_rollouts=len(rows) * _ROW_TOKENS // _SAMPLE_TOKENS,
        )
        record_batch(RunLayout(root), batch)


def train(model: Path, replay: Path, output_dir: Path, *flags: str) -> list[dict[str, float]]:
    """Run the trainer; return the metrics of each step."""
    words = ["--model.name", str(model), "--data.replay", str(replay), "--output-dir", str(output_dir), *flags]
    with (output_dir.parent / f"{output_dir.name}.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "trivet.launcher.commands.trainer", *words], stdout=log, stderr=subprocess.STDOUT, check=True
        )
    return [json.loads(line) for line in (RunLayout(output_dir).metrics / "trainer.jsonl").read_text().splitlines()]


def measure(model: Path, scratch: Path, *, steps: int, tokens: int, rounds: int) -> dict[str, object]:
    """Measure one size of a step."""
    record_batches(scratch / "recorded", steps=steps, tokens=tokens)
    beside: list[float] = []
    plain: list[float] = []
    overheads: list[float] = []
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        output_dir = scratch / "run"
        found = train(model, scratch / "recorded", output_dir, "--ckpt.interval", "2", "--ckpt.keep-last", "1")[_WARM_UP:]
        shutil.rmtree(output_dir)
        # Step 4 ends with the beginning of a write, step 5 has it beside it.
        pairs = list(zip(found[0::2], found[1::2], strict=False))
        ours = [after["time/step"] + before["time/save_ckpt"] for before, after in pairs]
        theirs = [before["time/step"] - before["time/save_ckpt"] for before, _ in pairs]
        overheads.append(statistics.median(ours) / statistics.median(theirs) - 1)
        beside, plain, rows = beside + ours, plain + theirs, rows + found

    def median_of(name: str) -> float:
        return round(statistics.median(row[name] for row in rows if name in row), 3)

    return {
        "tokens": max(1, round(tokens / _ROW_TOKENS)) * _ROW_TOKENS,
        "overhead": round(statistics.median(beside) / statistics.median(plain) - 1, 4),
        "overhead_of_rounds": [round(overhead, 4) for overhead in overheads],
        "step_s": round(statistics.median(beside), 3),
        "plain_step_s": round(statistics.median(plain), 3),
        "pairs": len(plain),
        "save_s": median_of("time/save_ckpt"),
        "wait_s": median_of("time/wait_for_ckpt"),
        "write_s": median_of("time/write_ckpt"),
        "write_cpu_s": median_of("time/write_ckpt_cpu"),
    }


def write_direct(path: Path, data: memoryview) -> FileRecord:
    """Write `data` as a checkpoint does; return its record."""
    with FileStream(path) as stream:
        stream.write(data)
        return stream.finish()


def write_buffered(path: Path, data: memoryview) -> FileRecord:
    """Write `data` through the page cache, with its digest: what takes the place of `FileStream` without direct writes."""
    digest = xxhash.xxh3_128()
    with path.open("xb", buffering=0) as file:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            digest.update(piece)
            assert file.write(piece) == len(piece)
        os.fsync(file.fileno())
    return FileRecord(num_bytes=len(data), xxh3_128=digest.hexdigest())


def compute(products: int) -> float:
    """Return the seconds that so many products of large matrices take, on all cores: they stand for a step."""
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE)
    started = time.monotonic()
    for _ in range(products):
        torch.mm(matrix, matrix)
    return time.monotonic() - started


def measure_stream(directory: Path, *, num_bytes: int, pairs: int) -> dict[str, object]:
    """Measure a direct and a buffered write of `num_bytes` in turns, alone and with products computed meanwhile."""
    data = memoryview(mmap.mmap(-1, num_bytes))  # begins with a page, so the direct writer needs no zeros for alignment
    data[:] = np.random.default_rng(0).bytes(num_bytes)
    products = math.ceil(_COMPUTE_S / (compute(20) / 20))
    writers: dict[str, Callable[[Path, memoryview], FileRecord]] = {"direct": write_direct, "buffered": write_buffered}
    found: dict[str, dict[str, list[float]]] = {
        name: {"write_s": [], "write_cpu_s": [], "compute_s": [], "compute_alone_s": []} for name in writers
    }
    records: set[FileRecord] = set()

    def write_once(name: str) -> None:
        """Write and remove one file."""
        path = directory / name
        started, started_cpu = time.monotonic(), time.thread_time()
        records.add(writers[name](path, data))
        found[name]["write_s"].append(time.monotonic() - started)
        found[name]["write_cpu_s"].append(time.thread_time() - started_cpu)
        path.unlink()
        os.sync()

    for _ in range(pairs):
        for name in writers:
            found[name]["compute_alone_s"].append(compute(products))
            with ThreadPoolExecutor(1) as thread:
                writing = thread.submit(write_once, name)
                found[name]["compute_s"].append(compute(products))
                writing.result()
    assert len(records) == 1, "both write the same bytes"
    medians = {name: {key: round(statistics.median(values), 3) for key, values in each.items()} for name, each in found.items()}
    slowdown = {
        name: [with_ / alone for with_, alone in zip(each["compute_s"], each["compute_alone_s"], strict=True)]
        for name, each in found.items()
    }
    ratio = statistics.median(b / d for b, d in zip(found["buffered"]["compute_s"], found["direct"]["compute_s"], strict=True))
    cpu = statistics.median(
        b / d for b, d in zip(found["buffered"]["write_cpu_s"], found["direct"]["write_cpu_s"], strict=True)
    )
    return {
        **medians,
        "slowdown": {name: round(statistics.median(values), 4) for name, values in slowdown.items()},
        "ratio_of_compute_s": round(ratio, 4),
        "ratio_of_write_cpu_s": round(cpu, 4),
        "bytes": len(data),
        "pairs": pairs,
        "can_write_directly": can_write_directly(directory),
    }


def can_write_directly(directory: Path) -> bool:
    """Tell whether the file system of `directory` has direct writes; without them both writers are the same."""
    path = directory / "probe"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def num_checkpoint_bytes(model: Path) -> int:
    """Return the bytes of float32 weights and two moments of every parameter; tied ones count once, as safetensors stores them."""
    count = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  # no iterator
    return 12 * count


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as name:
        scratch = Path(name)
        model = scratch / "tiny" if args.model == "tiny" else Path(args.model)
        if args.model == "tiny":
            subprocess.run([sys.executable, "-m", "trivet.examples.tiny_model", model], check=True)
        num_bytes = num_checkpoint_bytes(model)
        stream = measure_stream(scratch, num_bytes=num_bytes, pairs=args.pairs)
        print(json.dumps(stream), file=sys.stderr, flush=True)
        sizes = []
        for tokens in args.tokens:
            (scratch / str(tokens)).mkdir()
            sizes.append(measure(model, scratch / str(tokens), steps=args.steps, tokens=tokens, rounds=args.rounds))
            print(json.dumps(sizes[-1]), file=sys.stderr, flush=True)
    result = {
        "bench": "checkpoint",
        "overhead": max((size["overhead"] for size in sizes), default=None),
        "sizes": sizes,
        "stream": stream,
        "bytes": num_bytes,
        "model": model.name,
        "steps": args.steps,
        "rounds": args.rounds,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
