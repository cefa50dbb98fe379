"""Samples a handful of completions for the trainer to compare log-probabilities on, before anything is trained."""

import asyncio
from collections.abc import Sequence
from typing import Any

from trivet.algorithms.packing import PackItem, pack
from trivet.client.inference_client import InferenceClient
from trivet.config.sections.sampling import SamplingConfig
from trivet.environments.apis.trajectories import Turn, to_samples
from trivet.environments.sampling import sampling_arguments
from trivet.errors import InferenceError
from trivet.key_names import key_name
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.versions import Step

_MAX_TOKENS = 32
"""Tokens of a completion: enough to compare, and sampled within seconds."""


async def make_self_check(
    prompts: Sequence[list[dict[str, Any]]],
    *,
    clients: Sequence[InferenceClient],
    model_name: str,
    sampling: SamplingConfig,
    temperature: float,
    seq_len: int,
    step: Step,
) -> Batch:
    """Sample a short completion of each prompt, the way rollouts do, on each server in turn.

    Raises:
        InferenceError: a request failed, or nothing that came back can be compared.

    Args:
        step: the last step already trained, so the batch after it is the first to train.
    """
    max_tokens = min(sampling.max_tokens or _MAX_TOKENS, _MAX_TOKENS)
    short = sampling.model_copy(update={"max_tokens": max_tokens, "min_tokens": min(sampling.min_tokens, max_tokens)})
    arguments = sampling_arguments(short, temperature=temperature)

    async def ask(messages: list[dict[str, Any]], client: InferenceClient) -> list[PackItem]:
        """Return the samples of one short completion."""
        fields = {**arguments.fields, "temperature": arguments.temperature, "seed": arguments.seed}
        try:
            answer = await client.complete_chat(messages, model=model_name, fields=fields)
        except InferenceError as exc:
            raise InferenceError(f"the self-check's request failed: {exc}") from exc
        turn = Turn(
            prompt_ids=answer.prompt_ids, completion_ids=answer.token_ids, logprobs=answer.logprobs, versions=answer.versions
        )
        trajectory = to_samples([turn], temperature=temperature, strategy="branching")
        return [PackItem(sample=sample, advantage=0.0) for sample in trajectory.samples]

    answers = await asyncio.gather(*(ask(prompt, clients[i % len(clients)]) for i, prompt in enumerate(prompts)))
    rows = pack([item for answer in answers for item in answer], seq_len=seq_len)
    if prompts and not rows:
        raise InferenceError(
            f"the self-check of {len(prompts)} prompts sampled nothing to compare: every prompt fills "
            f"{key_name('orchestrator.seq_len')} ({seq_len}), or every completion is empty; raise {key_name('seq_len')}, or set "
            "orchestrator.self_check_rollouts = 0"
        )
    return Batch(
        step=step,
        purpose=BatchPurpose.SELF_CHECK,
        micro_batches=rows,
        group_ids=[],
        num_rollouts=len(answers),
    )
