"""Chooses the probe of a new run: tokens of its own prompts and completions, which every server scores under the start policy.

Called once by `orchestrator.start`, before the first rollout. The trainer compares the scores with its own, and scores the same
tokens anew for every policy that it publishes (`algorithms.probe`).
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from trivet.algorithms.probe import cut_samples
from trivet.client.inference_client import InferenceClient
from trivet.config.schema.environment import SamplingConfig
from trivet.environments.settings import sampling_arguments
from trivet.errors import InferenceError
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.groups import OVERLONG_REFUSALS
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

NUM_PROMPTS = 8
"""Prompts that are completed: short ones fill a probe together, and some may be too long for the server."""
_MAX_TOKENS = 32
"""Tokens of a completion, sampled within seconds."""


async def make_probe(
    prompts: Sequence[list[dict[str, Any]]],
    *,
    clients: Sequence[InferenceClient],
    model_name: str,
    sampling: SamplingConfig,
    temperature: float,
    num_tokens: int,
    step: Step,
) -> Batch:
    """Sample a short completion of each prompt on the first server, and have every server score what fits into the probe.

    Args:
        num_tokens: size of the probe.
        step: the last step already trained, so the batch after it is the first to train.

    Returns:
        A row a server: the same samples with that server's log-probabilities. No rows when there was nothing to sample.

    Raises:
        InferenceError: a server failed, or could not score the samples.
    """
    max_tokens = min(sampling.max_tokens or _MAX_TOKENS, _MAX_TOKENS)
    short = sampling.model_copy(update={"max_tokens": max_tokens, "min_tokens": min(sampling.min_tokens, max_tokens)})
    arguments = sampling_arguments(short, temperature=temperature)
    fields = {**arguments.fields, "temperature": arguments.temperature, "seed": arguments.seed}
    asked = [clients[0].complete_chat(messages, model=model_name, fields=fields) for messages in prompts]
    conversations: list[list[int]] = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, InferenceError) and any(said in str(answer) for said in OVERLONG_REFUSALS):
            continue
        if isinstance(answer, BaseException):
            raise answer
        # Without the last token: a server that scores tokens must have room for one more.
        conversations.append([*answer.prompt_ids, *answer.token_ids][:-1])
    samples = cut_samples(conversations, num_tokens=num_tokens)
    if not samples:
        logger.warning("the start policy is not compared: none of %s prompts fits the server's context", len(prompts))
    rows = await asyncio.gather(*(_score(samples, client, model_name=model_name) for client in clients if samples))
    dtype = (await clients[0].served_policy()).dtype if rows else ""
    return Batch(step=step, purpose=BatchPurpose.PROBE, micro_batches=rows, num_rollouts=len(samples), served_dtype=dtype)


async def _score(samples: Sequence[Sequence[int]], client: InferenceClient, *, model_name: str) -> MicroBatch:
    scores = await asyncio.gather(*(client.score(ids, model=model_name) for ids in samples))
    lengths_S = np.array([len(ids) for ids in samples], dtype=np.int32)
    position_ids_T = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths_S])
    return MicroBatch(
        token_ids_T=np.concatenate(samples).astype(np.int32),
        position_ids_T=position_ids_T,
        loss_mask_T=position_ids_T > 0,
        logprobs_T=np.concatenate(scores).astype(np.float32),
        advantages_T=np.zeros(len(position_ids_T), dtype=np.float32),
        temperatures_T=np.ones(len(position_ids_T), dtype=np.float32),
        sequence_lengths_S=lengths_S,
    )
