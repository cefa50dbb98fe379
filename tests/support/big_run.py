"""Writes output directories of made-up runs, of any size, for tests of `trivet view` and `trivet top`."""

import math
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.transport.recording import GROUPS_FILE, pack_groups
from trivet.wire.rollouts import Group, Rollout, Sample
from trivet.wire.status import ProcessReport, RoleState, RoleStatus, RunState, RunStatus
from trivet.wire.versions import GroupId, PolicyVersion, Step, VersionRun

START = 1_780_000_000.0
STEP_S = 12.0
_DISTRIBUTIONS = ("loss", "entropy", "mismatch_kl", "unmasked_mismatch_kl", "is_masked", "is_masked_low", "is_masked_high")
_ROLLOUT_METRICS = ("reward", "seq_len", "completion_len", "is_truncated", "num_turns", "generation_ms", "scoring_ms")
_FURTHER = 40
"""Number of metrics on a line besides those that are shown, as many as in a real run."""
_encode = msgspec.json.Encoder().encode


def write_run(
    directory: Path,
    *,
    num_steps: int,
    rollouts_per_step: int = 8,
    groups_per_step: int | None = None,
    is_running: bool = False,
    seed: int = 0,
    shift: float = 0.0,
) -> RunLayout:
    """Write a run of `num_steps` finished steps.

    Args:
        groups_per_step: number of groups that the history records for each step; None: one for each eight rollouts.
        shift: added to the rewards, so that two runs differ.
    """
    layout = RunLayout(directory)
    layout.metrics.mkdir(parents=True)
    random = np.random.default_rng(seed)
    write_metrics(layout, num_steps=num_steps, random=random, shift=shift)
    write_events(layout, num_steps=num_steps, groups_per_step=groups_per_step or max(1, rollouts_per_step // 8))
    for step in range(1, num_steps + 1):
        write_rollouts(layout, step, rollouts_per_step, random=random)
    write_status(layout, num_steps=num_steps, is_running=is_running)
    write_configs(layout, num_steps=num_steps, seed=seed)
    return layout


def write_metrics(layout: RunLayout, *, num_steps: int, random: np.random.Generator, shift: float = 0.0) -> None:
    with (
        layout.metrics.joinpath("trainer.jsonl").open("wb") as trainer,
        layout.metrics.joinpath("orchestrator.jsonl").open("wb") as other,
    ):
        for step in range(1, num_steps + 1):
            trainer.write(trainer_line(step, random, num_steps=num_steps))
            other.write(orchestrator_line(step, random, num_steps=num_steps, shift=shift))


def trainer_line(step: int, random: np.random.Generator, *, num_steps: int) -> bytes:
    noise = random.standard_normal(16).tolist()
    progress = step / num_steps
    values = {
        f"{name}/{kind}": noise[index] for index, name in enumerate(_DISTRIBUTIONS) for kind in ("median", "std", "min", "max")
    }
    values |= {f"further/metric_{index}": noise[index % 16] for index in range(_FURTHER)}
    values |= {
        "loss/mean": 0.02 * noise[0] + 0.1 * (1 - progress),
        "entropy/mean": 2.0 * math.exp(-2 * progress) + 0.05 * noise[1],
        "mismatch_kl/mean": 0.001 * (1 + abs(noise[2])),
        "optim/lr": 1e-6,
        "optim/grad_norm": 0.3 + 0.1 * abs(noise[3]),
        "perf/throughput": 9000 + 500 * noise[4],
        "time/step": STEP_S,
        "time/wait_for_batch": 3.0,
        "time/forward_backward": 6.0,
        "time/optimizer": 0.4,
        "time/probe": 0.3,
        "time/broadcast_weights": 1.2,
        "time/save_ckpt": 0.6 if step % 10 == 0 else 0.0,
    }
    return _encode({"step": step, "time": START + step * STEP_S, **values}) + b"\n"


def orchestrator_line(step: int, random: np.random.Generator, *, num_steps: int, shift: float = 0.0) -> bytes:
    noise = random.standard_normal(16).tolist()
    values = {
        f"{name}/{kind}": abs(noise[index]) for index, name in enumerate(_ROLLOUT_METRICS) for kind in ("mean", "min", "max")
    }
    values |= {f"worker/env-{index}/pending": 1.0 for index in range(_FURTHER)}
    values |= {
        "reward/mean": 0.9 / (1 + math.exp(4 - 8 * step / num_steps)) + 0.03 * noise[0] + shift,
        "completion_len/mean": 400 + 20 * noise[1],
        "is_truncated/mean": 0.05,
        "error/mean": 0.0,
        "batch/off_policy_level/mean": 1.0,
        "time/step": STEP_S,
        "time/generate_completions": 9.0,
        "time/update_weights": 0.8,
        "perf/throughput": 12000 + 100 * noise[2],
    }
    return _encode({"step": step, "time": START + step * STEP_S - 4.0, **values}) + b"\n"


def write_events(layout: RunLayout, *, num_steps: int, groups_per_step: int) -> None:
    with layout.events.open("wb") as file:
        for step in range(1, num_steps + 1):
            at = START + (step - 1) * STEP_S
            groups = range((step - 1) * groups_per_step, step * groups_per_step)
            for group in groups:
                dispatched = {
                    "event": "dispatch",
                    "group_id": group,
                    "env": "tools",
                    "example_id": group,
                    "version": step - 1,
                    "server": "http://127.0.0.1:8000",
                }
                file.write(event(dispatched, at, "orchestrator"))
                finished = {
                    "event": "finish",
                    "group_id": group,
                    "reward_mean": 0.5,
                    "oldest_version": step - 1,
                    "newest_version": step - 1,
                }
                file.write(event(finished, at + 5, "orchestrator"))
            versions = {"oldest_version": step - 1, "newest_version": step - 1}
            file.write(event({"event": "batch", "step": step, "group_ids": list(groups), **versions}, at + 7, "orchestrator"))
            file.write(event({"event": "train", "step": step, "group_ids": list(groups)}, at + 10, "trainer"))
            file.write(
                event(
                    {"event": "load", "version": step, "digest": "0" * 64, "server": "http://127.0.0.1:8000"},
                    at + 12,
                    "orchestrator",
                )
            )
            if step % 10 == 0:
                file.write(event({"event": "commit", "step": step}, at + 12, "trainer"))


def event(fields: dict[str, Any], at: float, role: str) -> bytes:
    return _encode({**fields, "time": at, "role": role, "attempt": 1}) + b"\n"


def write_rollouts(layout: RunLayout, step: int, count: int, *, random: np.random.Generator) -> None:
    directory = layout.rollouts_step(step)
    directory.mkdir(parents=True)
    records = [rollout_record(step, index) for index in range(count)]
    rollouts = [Rollout(index=index % 8, reward=0.0, samples=[sample(step, random)]) for index in range(count)]
    group = Group(group_id=GroupId(0), env="toy", example_id=0, rollouts=rollouts)
    content = pack_groups([group], run_id="big", step=Step(step), is_replayable=False)
    directory.joinpath(GROUPS_FILE).write_bytes(content)
    directory.joinpath("rollouts.jsonl").write_bytes(b"".join(_encode(record) + b"\n" for record in records))


def rollout_record(step: int, index: int, **changes: Any) -> dict[str, Any]:
    """Return a conversation with a tool, as `rollouts.jsonl` has it."""
    reward = ((step * 7 + index * 3) % 11) / 10
    call = {"id": "call_1", "type": "function", "function": {"name": "python", "arguments": '{"code": "print(17 * 23)"}'}}
    record = {
        "group_id": step * 100 + index // 8,
        "env": "tools" if index % 3 else "words",
        "example_id": step + index,
        "index": index % 8,
        "reward": reward,
        "advantage": reward - 0.5,
        "scores": {"correct": reward, "format": 1.0},
        "num_turns": 2,
        "is_truncated": index % 7 == 6,
        "ran_out_of_context": False,
        "versions": [[max(0, step - 2), 10], [step - 1, 38]],
        "prompt": [
            {"role": "system", "content": "Use the tool."},
            {"role": "user", "content": f"What is 17 times 23? ({step}.{index})"},
        ],
        "completion": [
            {"role": "assistant", "content": "I compute it.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "391"},
            {"role": "assistant", "content": f"The answer is {391 if reward > 0.4 else 371}."},
        ],
    }
    return record | changes


def sample(step: int, random: np.random.Generator) -> Sample:
    mask_T = np.arange(64) >= 16
    return Sample(
        token_ids_T=random.integers(3, 900, 64).astype(np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, -random.exponential(0.6, 64), 0.0).astype(np.float32),
        versions=[VersionRun(PolicyVersion(max(0, step - 2)), 10), VersionRun(PolicyVersion(step - 1), 38)],
        temperature=1.0,
    )


def write_status(layout: RunLayout, *, num_steps: int, is_running: bool) -> None:
    """Write the status of a running run: the trainer waits for the orchestrator."""
    now = time.time()
    reports = {
        "inference": ProcessReport(role="inference", pid=2, time=now, since=now - 60, activity="serving"),
        "orchestrator": ProcessReport(
            role="orchestrator",
            pid=3,
            time=now,
            since=now - 2,
            activity=f"filling batch {num_steps + 1}",
            step=Step(num_steps),
            policy_version=PolicyVersion(num_steps),
            num_ready=2,
            num_in_flight=6,
        ),
        "trainer": ProcessReport(
            role="trainer",
            pid=4,
            time=now,
            since=now - 3,
            activity=f"batch {num_steps + 1}",
            waits_for="orchestrator",
            step=Step(num_steps),
        ),
    }
    state = RoleState.RUNNING if is_running else RoleState.ENDED
    status = RunStatus(
        run_id="20260101-000000-abcdef",
        attempt=1,
        pid=1,
        state=RunState.RUNNING if is_running else RunState.DONE,
        started=now - 3600,
        time=now,
        max_steps=num_steps * 2 if is_running else num_steps,
        last_commit=Step(num_steps - num_steps % 10),
        roles=[RoleStatus(name=name, state=state, pid=report.pid, reports=[report]) for name, report in reports.items()],
        exit_code=None if is_running else 0,
        reason="" if is_running else "every step is done",
    )
    layout.status.write_bytes(_encode(status))


def write_configs(layout: RunLayout, *, num_steps: int, seed: int) -> None:
    layout.configs.mkdir()
    layout.configs.joinpath("trainer.toml").write_text(
        f'max_steps = {num_steps}\nseed = {seed}\noutput_dir = "outputs"\n[optim]\nlr = 1e-6\n', encoding="utf-8"
    )
    layout.configs.joinpath("orchestrator.toml").write_text(
        'batch_size = 64\n[client]\napi_key = "sk-not-to-be-shown"\n[[env]]\nid = "tools"\nargs = { depth = 3 }\n',
        encoding="utf-8",
    )
