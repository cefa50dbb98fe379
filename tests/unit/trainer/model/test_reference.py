from pathlib import Path

import pytest
import torch

from trivet.config.layout import RunLayout
from trivet.config.schema.losses import GrpoLossConfig
from trivet.config.schema.model import TrainerModelConfig
from trivet.errors import CheckpointError
from trivet.trainer.model import reference as reference_module
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.model.reference import Reference, open_reference
from trivet.trainer.ranks.world import gather_tensor, open_world
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import train_step
from trivet.weights.retention import reference_version_after

CPU = torch.device("cpu")


class ShardOfGpu(torch.Tensor):
    """A shard in main memory that says it is a GPU's."""

    is_cuda = True


BETA = GrpoLossConfig(beta=0.5, reference_update_interval=2)


def weights_of(model):
    return [gather_tensor(parameter).clone() for parameter in model.parameters()]


def row_of(oracle, seed=0):
    return oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=seed))


def logprobs_of(model, row):
    with torch.no_grad():
        return model(to_tensors(row, device=CPU)).logprobs_N.clone()


@pytest.mark.parametrize(("step", "interval", "expected"), [(0, 5, 0), (4, 5, 0), (5, 5, 5), (11, 5, 10), (11, None, 0)])
def test_the_reference_is_the_policy_of_the_last_multiple(step, interval, expected):
    assert reference_version_after(step, interval=interval) == expected


def test_the_reference_scores_as_the_model_did_when_it_was_taken_and_leaves_it_alone(tiny_model: Path, make_learner, oracle):
    learner, row = make_learner(tiny_model, lr=1e-2), row_of(oracle)
    before = logprobs_of(learner.model, row)
    reference = Reference(learner.model)
    train_step(learner, [row], step=1)
    trained = weights_of(learner.model)
    (scored,) = reference.score(learner.model, [to_tensors(row, device=CPU)])
    torch.testing.assert_close(scored.reference_logprobs_N, before, rtol=0, atol=0)
    assert all(map(torch.equal, weights_of(learner.model), trained))
    now = logprobs_of(learner.model, row)
    assert not torch.equal(now, before)
    reference.follow(learner.model)
    (scored,) = reference.score(learner.model, [to_tensors(row, device=CPU)])
    torch.testing.assert_close(scored.reference_logprobs_N, now, rtol=0, atol=0)


def test_the_pull_is_zero_at_the_reference_and_grows_away_from_it(tiny_model: Path, make_learner, oracle):
    learner, row = make_learner(tiny_model, loss=BETA, lr=1e-2), row_of(oracle)
    learner.reference = Reference(learner.model)
    first = train_step(learner, [row], step=1)
    second = train_step(learner, [row], step=2)
    assert abs(first.values["ref_kl"]).max() == 0.0
    assert second.values["ref_kl"].mean() > 0.0
    assert second.values["ref_kl"].min() >= 0.0


def test_copies_of_a_gpus_shards_are_asked_for_in_page_locked_memory(
    tiny_model: Path, make_learner, monkeypatch: pytest.MonkeyPatch
):
    asked: list[bool] = []
    empty_like = torch.empty_like

    def keep_request(like, *, device, pin_memory):
        asked.append(pin_memory)
        return empty_like(like, device=device)

    model = make_learner(tiny_model).model
    monkeypatch.setattr(torch, "empty_like", keep_request)
    Reference(model)
    assert asked == [False] * len(model.trained_parameters)
    asked.clear()
    monkeypatch.setattr(reference_module, "local_part", lambda parameter: parameter.detach().as_subclass(ShardOfGpu))
    Reference(model)
    assert asked == [True] * len(model.trained_parameters)


def test_a_run_without_beta_has_no_reference(tiny_model: Path, make_learner, tmp_path: Path):
    learner = make_learner(tiny_model)
    arguments = {"config": None, "layout": RunLayout(tmp_path), "from_step": 0, "world": learner.world}
    assert open_reference(GrpoLossConfig(), learner.model, **arguments) is None


def test_a_reference_that_was_removed_is_named(tiny_model: Path, make_learner, tmp_path: Path):
    learner = make_learner(tiny_model)
    arguments = {"config": None, "layout": RunLayout(tmp_path), "from_step": 5, "world": learner.world}
    with pytest.raises(CheckpointError, match="step 5 is compared with policy 4"):
        open_reference(BETA, learner.model, **arguments)


@pytest.mark.gpu
def test_shards_of_a_gpu_change_places_through_pinned_memory(tiny_model: Path, oracle):
    with open_world(device="cuda", timeout_s=30) as world:
        model = load_policy(TrainerModelConfig(name=str(tiny_model), compute_dtype="float32"), world)
        before = weights_of(model)
        reference, row = Reference(model), to_tensors(row_of(oracle), device=world.device)
        expected = model(row).logprobs_N.detach()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        (scored,) = reference.score(model, [row])
        torch.testing.assert_close(scored.reference_logprobs_N, expected)
        assert all(torch.equal(now, 1.5 * then) for now, then in zip(weights_of(model), before, strict=True))
        assert all(tensor.is_pinned() for tensor in reference._shards)
