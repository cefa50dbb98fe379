"""A learning rate that no model survives makes the trainer's loss NaN. The whole run ends with exit code 3."""

import re
from collections.abc import Callable

import msgspec
import pytest

from support.processes import assert_all_gone, descendants_of, wait_until
from support.rl_run import Run
from trivet.config.layout import STABLE
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import verify
from trivet.wire.status import RunState, RunStatus

pytestmark = pytest.mark.vllm


def test_a_diverged_trainer_ends_the_run_with_3_and_names_the_step_the_culprits_and_the_last_good_weights(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(max_steps=6)
    process = run.start("--trainer.optim.lr", "1e30")
    published = run.layout.weights_step(1) / STABLE
    wait_until(lambda: published.exists() or process.poll() is not None, timeout_s=900, waiting_for="the first step")
    family = descendants_of(process.pid)
    assert process.wait(240) == 3, run.output[-4000:]

    assert_all_gone(family)
    said = " ".join((run.layout.logs / "trainer.stdout").read_text().split())
    diverged = re.search(r"the (?:loss|gradient norm) of step (\d+) is (?:nan|-?inf) \((.+?)\); the weights of step", said)
    assert diverged is not None, said[-3000:]
    last = int(diverged[1]) - 1
    assert "row 0 sample 0" in diverged[2] or "embed_tokens.weight" in diverged[2], "what is not finite is named"
    assert published_versions(run.layout) == [*range(1, last + 1)]
    assert f"the last good weights are {run.layout.weights_step(last)}" in said
    assert f"the last good weights are {run.layout.weights_step(last)}" in " ".join(run.output.split())
    verify(run.layout.weights_step(last))
    assert sorted(path.name for path in run.layout.weights.glob("step_*")) == [f"step_{n}" for n in range(1, last + 1)]
    status = msgspec.json.decode(run.layout.status.read_bytes(), type=RunStatus)
    assert (status.state, status.exit_code, len(status.restarts)) == (RunState.FAILED, 3, 0)
