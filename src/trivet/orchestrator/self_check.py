"""A handful of completions for the trainer to compare log-probabilities on, before anything is trained."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from verifiers.legacy.utils.message_utils import normalize_messages

from trivet.algorithms.packing import PackItem, pack
from trivet.config.orchestrator import SamplingConfig
from trivet.environments.model_client import ModelClient, request_arguments
from trivet.environments.runner import to_turn
from trivet.environments.trajectories import to_samples
from trivet.errors import InferenceError
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.versions import Step

_MAX_TOKENS = 32


async def make_self_check(
    examples: Sequence[Mapping[str, Any]],
    *,
    client: ModelClient,
    model_name: str,
    sampling: SamplingConfig,
    seq_len: int,
    step: Step,
) -> Batch:
    """Sample a short completion of each example's prompt, the way rollouts do.

    Args:
        step: the last step already trained, so the batch after it is the first to train.
    """
    short = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens or _MAX_TOKENS, _MAX_TOKENS)})

    async def ask(example: Mapping[str, Any]) -> PackItem:
        prompt = normalize_messages(example["prompt"], field_name="prompt")
        try:
            response = await client.get_response(
                prompt=prompt, model=model_name, sampling_args=request_arguments(short, seed=sampling.seed)
            )
        except vf.Error as exc:
            raise InferenceError(f"the self-check's request failed: {exc.__cause__ or exc}") from exc
        turn = to_turn(response)
        trajectory = to_samples([turn], temperature=sampling.temperature, strategy="branching")
        return PackItem(sample=trajectory.samples[0], advantage=0.0)

    items = await asyncio.gather(*(ask(example) for example in examples))
    return Batch(
        step=step,
        purpose=BatchPurpose.SELF_CHECK,
        micro_batches=pack(items, seq_len=seq_len),
        group_ids=[],
        num_rollouts=len(items),
    )
