from pathlib import Path

import numpy as np
import pytest
import torch

from support.oracle import Oracle
from trivet.algorithms.probe import Probe, ProbeSample
from trivet.config.schema.model import LoRAConfig
from trivet.errors import TrivetError, WeightsError
from trivet.trainer.probe import require_agreement, require_restored, score, split_samples

SAMPLES = [[5, 6, 7, 8, 9], [5, 6, 7, 40, 41, 42], [99, 3]]


def expected_probe(directory: Path) -> Probe:
    oracle = Oracle(directory)
    return Probe(
        dtype="float32",
        samples=[ProbeSample(ids, oracle.logprobs(ids[:1], ids[1:], temperature=1.0)) for ids in SAMPLES],
    )


def scored(model, world) -> Probe:
    return score(model, SAMPLES, world, dtype="float32")


def test_a_packed_probe_is_what_transformers_computes_for_each_sample_alone(tiny_model: Path, make_learner, world) -> None:
    probe, expected = scored(make_learner(tiny_model).model, world), expected_probe(tiny_model)
    assert probe.token_ids == SAMPLES
    for sample, other in zip(probe.samples, expected.samples, strict=True):
        assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_noise_of_training_mode_shows_in_the_probe(tiny_model: Path, make_learner, world) -> None:
    model = make_learner(tiny_model).model
    norm = model.causal_lm.base_model.norm
    model.causal_lm.base_model.norm = torch.nn.Sequential(norm, torch.nn.Dropout(0.1)).train()
    with pytest.raises(TrivetError, match="does not give back the policy"):
        require_restored(scored(model, world), expected_probe(tiny_model))


def test_the_dropout_of_an_adapter_is_off_in_the_probe_and_on_afterwards(tiny_model: Path, make_learner, world) -> None:
    model = make_learner(tiny_model, lora=LoRAConfig(rank=4, dropout=0.5)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert scored(model, world) == scored(model, world)
    dropouts = [module for name, module in model.named_modules() if name.endswith("lora_dropout.default")]
    assert dropouts
    assert all(module.training for module in dropouts)


def test_servers_that_compute_the_start_policy_agree(tiny_model: Path, make_learner, oracle, world) -> None:
    row = oracle.make_row(oracle.make_examples(count=2, vocab_size=100))
    probe = score(make_learner(tiny_model).model, split_samples(row), world, dtype="float32")
    row.logprobs_T[:] = np.concatenate([[0.0, *sample.logprobs] for sample in probe.samples])
    assert require_agreement(probe, [row, row], dtype="float32").mismatch == pytest.approx(0, abs=1e-6)
    row.logprobs_T[3] -= 0.5
    with pytest.raises(WeightsError, match="the start policy on server 1 of 1 is not the policy"):
        require_agreement(probe, [row], dtype="float32")


def test_a_restored_model_is_compared_with_what_was_published(tiny_model: Path, make_learner, world) -> None:
    model = make_learner(tiny_model).model
    published = scored(model, world)
    require_restored(scored(model, world), published)
    require_restored(published, None)
    with torch.no_grad():
        model.embedding.weight[7] += 1.0
    with pytest.raises(TrivetError, match="does not give back the policy that was published"):
        require_restored(scored(model, world), published)
