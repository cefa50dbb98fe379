"""Scores the probe of a policy as a training step scores its tokens, and compares it with what servers computed.

Called by `trainer.session` for each policy that is published, and by the RL loop for the policy that a run starts from. The model
computes in training mode, because the probe shall find what a training step computes differently from a server that has the
published files. Only the dropout of an adapter is off, because servers never draw it.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from trivet.algorithms.probe import Probe, ProbeDtype, ProbeResult, ProbeSample, compare
from trivet.errors import TrivetError, WeightsError
from trivet.trainer.model.policy_model import PolicyModel, free_gathered
from trivet.trainer.ranks.world import World
from trivet.trainer.rows import plan_rows
from trivet.wire.batches import MicroBatch

logger = logging.getLogger(__name__)


def split_samples(row: MicroBatch) -> list[list[int]]:
    """Return the token ids of each sample of `row`."""
    return [part.tolist() for part in row.split(row.token_ids_T)]


def score(model: PolicyModel, samples: Sequence[Sequence[int]], world: World, *, dtype: ProbeDtype) -> Probe:
    """Return the probe of the model, which computes in `dtype`, as it is now. Every rank scores all `samples`. Collective."""
    scored: dict[int, list[float]] = {}
    lengths_S = np.array([len(ids) for ids in samples], dtype=np.int32)
    position_ids_T = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths_S])
    zeros_T = np.zeros(len(position_ids_T), dtype=np.float32)
    row = MicroBatch(
        token_ids_T=np.concatenate([np.array(ids, dtype=np.int32) for ids in samples]),
        position_ids_T=position_ids_T,
        loss_mask_T=position_ids_T > 0,
        logprobs_T=zeros_T,
        advantages_T=zeros_T,
        temperatures_T=np.ones_like(zeros_T),
        sequence_lengths_S=lengths_S,
    )
    plan = plan_rows([row], num_ranks=1, shares_prefixes=model.shares_prefixes, packs=model.packs)
    dropouts = [module for name, module in model.named_modules() if name.endswith(".lora_dropout")]
    for module in dropouts:
        module.eval()
    with torch.no_grad():
        for tensors in plan.take(0, device=world.device):
            parts = model(tensors).logprobs_N.float().cpu().split(tensors.num_loss_tokens_S)
            scored |= {number: part.tolist() for (_, number), part in zip(tensors.sample_indices, parts, strict=True)}
    for module in dropouts:
        module.train()
    free_gathered(model)
    return Probe(dtype=dtype, samples=[ProbeSample(list(ids), scored[number]) for number, ids in enumerate(samples)])


def require_agreement(probe: Probe, rows: Sequence[MicroBatch], *, dtype: ProbeDtype) -> ProbeResult:
    """Refuse a start policy that differs from what a server computed for the probe; return the result of the worst server.

    Args:
        rows: a row for each server: the probe's samples with the server's log-probabilities at temperature 1.
        dtype: the dtype that the servers compute in.
    """
    results = [
        compare(
            probe,
            [part[1:].tolist() for part in row.split(row.logprobs_T)],
            dtype=dtype,
            where=f"the start policy on server {number} of {len(rows)}",
        )
        for number, row in enumerate(rows, start=1)
    ]
    return max(results, key=lambda result: result.mismatch)


def require_restored(probe: Probe, published: Probe | None) -> None:
    """Refuse a model that was restored from a checkpoint and is not the policy that was published at that step.

    Args:
        probe: the probe of the restored model.
        published: the probe in the policy's manifest. If there is none, or it has other tokens, nothing is compared.
    """
    if published is None or published.token_ids != probe.token_ids:
        return
    try:
        compare(published, [sample.logprobs for sample in probe.samples], dtype=probe.dtype, where="the restored model")
    except WeightsError as exc:
        raise TrivetError(f"the checkpoint does not give back the policy that was published with it: {exc}") from exc
