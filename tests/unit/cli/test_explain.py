"""`trivet explain` on runs that the real trainer took: the shares of all tokens are the step's loss, the weights its gradient."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from support.losses import LOSSES_OF_PEERS
from support.recorded_run import SEQ_LEN, STEPS, make_groups, record_run
from trivet.algorithms.packing import PackItem, pack
from trivet.cli import main
from trivet.cli.explain import compute
from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.schema.trainer import TrainerConfig
from trivet.telemetry.metrics import read_metrics
from trivet.trainer.losses.choice import CovLossConfig
from trivet.trainer.losses.custom import SampleInputs, SampleLoss
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.model.reference import load_published, open_reference
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import open_world
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import Learner, train_step
from trivet.transport.explained import SampleShares
from trivet.view.explanation import TokenReason


def reinforce(inputs: SampleInputs) -> SampleLoss:
    """A custom loss as a user would write it."""
    ratio = (inputs.trainer_logprobs_L - inputs.sampler_logprobs_L).detach().exp()
    return SampleLoss(-(ratio * inputs.advantages_L * inputs.trainer_logprobs_L).sum())


LOSSES = {
    "default, masks": {"token_mask_low": 0.5, "token_mask_high": 1.6},
    "default, sequence": {"ratio_type": "sequence", "kl_tau": 0.1},
    "default, with a teacher": {"teacher_tau": 0.5},
    "cispo": {"type": "cispo", "clip_low": 0.4, "clip_high": 0.5},
    "aipo": {"type": "aipo", "clip_ratio": 1.3},
    "grpo": {"type": "grpo"},
    "grpo, constant": {"type": "grpo", "normalization": "constant", "normalization_length": 7},
    "gspo": {"type": "gspo", "clip_low": 0.3, "clip_high": 0.4},
    "dppo": {"type": "dppo", "dppo_mask_low": 0.001, "dppo_mask_high": 0.001, "kl_tau": 0.01},
    "ipo": {"type": "ipo", "ipo_threshold": 0.001, "kl_tau": 0.01},
    **LOSSES_OF_PEERS,
    "importance": {"type": "importance", "preset": "icepop"},
    "custom, by sample": {"type": "custom", "import_path": f"{Path(__file__)}:reinforce", "unit": "sample"},
    "with a reference": {"type": "grpo", "beta": 0.2},
    "with an entropy bonus": {"type": "gspo", "entropy_coef": 0.05},
}
TOLERANCE = 2e-6
"""Relative to the sum of the absolute shares: the recorded loss is a sum of float32 numbers, those of a row first."""


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "run")


def explain(capsys, layout: RunLayout, *words: str) -> dict:
    assert main.main(["explain", str(layout.root), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", LOSSES)
def test_the_shares_of_all_tokens_add_up_to_the_recorded_loss_and_their_weights_give_its_gradient(
    layout: RunLayout, tiny_model: Path, name: str
) -> None:
    record_run(layout, tiny_model, loss=LOSSES[name])
    recorded = {row["step"]: row["loss/mean"] for row in read_metrics(layout.metrics / "trainer.jsonl").rows}
    config = load_config(TrainerConfig, ["@", str(layout.configs / "trainer.toml")], environ={}).config
    explained = compute(layout, STEPS)
    samples = [sample for line in explained.rollouts for sample in line]
    bound = TOLERANCE * sum(float(np.nansum(abs(own.losses_T))) for own in samples if own is not None)
    assert bound > 0
    assert explained.loss == pytest.approx(recorded[STEPS], abs=bound)
    if "entropy_coef" not in LOSSES[name]:  # the weights leave out the gradient of entropies
        assert gradient_error(layout, config, samples) < 1e-5


def gradient_error(layout: RunLayout, config: TrainerConfig, samples: list[SampleShares | None]) -> float:
    """Compare the sum of the gradients of log-probabilities, each times its weight, with the gradient of a step."""
    groups = make_groups(STEPS, has_teacher=config.loss.needs_teacher)
    items = [PackItem(sample=r.samples[0], advantage=r.advantage) for group in groups for r in group.rollouts]
    with open_world(device="cpu", timeout_s=30) as world:
        model = load_published(config.model, world, layout=layout, version=STEPS - 1)
        for item, own in zip(items, samples, strict=True):
            for row in pack([item], seq_len=SEQ_LEN):
                assert own is not None
                scores = model(to_tensors(row, device=world.device))
                (scores.logprobs_N * torch.from_numpy(own.weights_T[~np.isnan(own.weights_T)]).float()).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        learner = Learner(
            model=model,
            optimizer=make_optimizer(model.trained_parameters, config.optim.model_copy(update={"lr": 0.0})),
            learning_rate=LearningRate(peak=0.0, schedule=config.scheduler, max_steps=None),
            loss=make_policy_loss(config.loss),
            max_norm=None,
            world=world,
            choice=config.loss if isinstance(config.loss, CovLossConfig) else None,
            reference=open_reference(config.loss, model, config=config.model, layout=layout, from_step=1, world=world),
        )
        train_step(learner, pack(items, seq_len=SEQ_LEN), step=STEPS)
        scale = max(float(gradient.abs().max()) for gradient in expected)
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        differences = [own - gradient for own, gradient in zip(found, expected, strict=True)]
        return max(float(difference.abs().max()) for difference in differences) / scale


def test_every_token_has_its_reason(capsys, layout: RunLayout, tiny_model: Path) -> None:
    record_run(layout, tiny_model, loss=LOSSES["default, masks"])
    found = [explain(capsys, layout, "--step", "2", "--rollout", str(line)) for line in range(6)]
    counts = [Counter(found[line]["samples"][0]["reasons"]) for line in range(6)]
    assert counts[0][TokenReason.CUT] == 28 - SEQ_LEN
    assert all(count[TokenReason.PROMPT] == 6 for count in counts)
    assert counts[2][TokenReason.TOOL_RESULT] == 2
    assert set(counts[5]) == {TokenReason.PROMPT, TokenReason.FILTERED}
    masked = [
        (reason, weight, ratio)
        for report in found
        for sample in report["samples"]
        for reason, weight, ratio in zip(sample["reasons"], sample["weights"], sample["ratios"], strict=True)
        if ratio is not None
    ]
    assert {reason for reason, _, _ in masked} == {TokenReason.TRAINED, TokenReason.OFF_POLICY_MASK}
    for reason, weight, ratio in masked:
        assert (reason == TokenReason.OFF_POLICY_MASK) == (not 0.5 <= ratio <= 1.6)
        assert (weight == 0) == (reason == TokenReason.OFF_POLICY_MASK)


def test_a_run_that_did_not_record_enough_says_which_key_does(capsys, layout: RunLayout, tiny_model: Path) -> None:
    record_run(layout, tiny_model, loss={}, is_replayable=False)
    assert main.main(["explain", str(layout.root), "--step", "1"]) == 1
    assert "orchestrator.record_rollouts = true" in capsys.readouterr().err
    report = explain(capsys, layout, "--step", "1", "--rollout", "0")
    assert TokenReason.CUT in report["samples"][0]["reasons"]
    assert report["loss"] is None
    assert set(report["samples"][0]["ratios"]) == {None}
    assert "orchestrator.record_rollouts = true" in report["missing"]


def test_a_policy_that_is_gone_is_named_with_the_key_that_keeps_it(capsys, layout: RunLayout, tiny_model: Path) -> None:
    record_run(layout, tiny_model, loss={}, keeps_weights=False)
    (layout.weights_step(1) / "STABLE").unlink()
    assert main.main(["explain", str(layout.root), "--step", "2"]) == 2
    assert "ckpt.weights.interval = 1" in capsys.readouterr().err
