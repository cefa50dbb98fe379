"""Measures a run's first prompts and makes the probe from them, before the first rollout. Called once by `orchestrator.start`.

A server refuses a prompt that leaves no room for a completion in its context, and the trainer sees only the first seq_len tokens of
a sample. A group whose prompt is too long for either has no tokens to train on.

The probe consists of tokens of the run's own prompts and completions, which every server scores under the start policy. The trainer
compares the scores with its own, and scores the same tokens again for every policy that it publishes (`algorithms.probe`).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trivet.algorithms.probe import cut_samples
from trivet.client.inference_client import InferenceClient
from trivet.config.schema.environment import SamplingConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import sampling_arguments
from trivet.errors import BatchError, InferenceError
from trivet.orchestrator.sampler import Draw
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.groups import OVERLONG_REFUSALS, Split
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

NUM_CHECKED = 64
"""Prompts whose length is measured at the start. It takes seconds, whatever the size of the data."""
MAX_NAMED = 5
"""Limit of examples that a message names."""
NUM_PROMPTS = 8
"""Prompts that are completed for the probe: one short prompt does not fill it, and some may be too long for the server."""
_QUESTION = "What can you do?"
"""Any text will do: the probe compares log-probabilities, not answers."""
_MAX_TOKENS = 32
"""Limit of tokens of each completion for the probe, so that they are sampled within seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """The limits from which the longest prompt of each environment follows."""

    seq_len: int
    max_tokens: Mapping[str, int]
    """Tokens that a request reserves for its completion, at least 1, by environment."""
    context: int | None = None
    """Tokens in the server's context; None when the server does not report it."""

    def explain(self, env: str) -> str:
        """Explain how long a prompt of `env` may be, and how the limit is computed."""
        served = "" if self.context is None else f"max_model_len {self.context} - sampling.max_tokens {self.max_tokens[env]}, "
        trained = f"orchestrator.seq_len {self.seq_len} - 1 that is trained on"
        return f"a prompt of {env} may have {self.max_prompt(env)} tokens at most (the least of {served}{trained})"

    def max_prompt(self, env: str) -> int:
        """Return the most tokens that a prompt of `env` may have."""
        return min(self.seq_len - 1, self.seq_len if self.context is None else self.context - self.max_tokens[env])


def limits_of(config: OrchestratorConfig) -> PromptLimits:
    """Return the limits that follow from the configuration, without the server's context."""
    max_tokens = {env.label: env.sampling.over(config.sampling).max_tokens or 1 for env in config.env}
    return PromptLimits(seq_len=config.seq_len, max_tokens=max_tokens)


async def check_prompts(
    draws: Sequence[Draw], *, limits: PromptLimits, pool: EnvironmentPool, client: InferenceClient, model: str
) -> PromptLimits:
    """Measure the prompts of `draws`, log those that do not fit, and return the limits with the server's context.

    Raises:
        BatchError: no prompt fits.
    """
    overlong: list[tuple[Draw, int]] = []
    draws = list({(draw.env, draw.example_id): draw for draw in draws}.values())
    for draw in draws:
        example = await pool.example(draw.env, split=Split.TRAIN, example_id=draw.example_id)
        if not example.prompt:  # its first message comes when it is played
            continue
        try:
            count, context = await client.count_tokens(example.prompt, model=model)
        except InferenceError as exc:  # servers other than vLLM may not count tokens; the first rollouts show what does not fit
            logger.info("lengths of prompts are not known: %s", exc)
            return limits
        limits = replace(limits, context=context)
        if count > limits.max_prompt(draw.env):
            overlong.append((draw, count))
    if overlong:
        named = [f"example {draw.example_id} of {draw.env}: {count} tokens" for draw, count in overlong[:MAX_NAMED]]
        named += ["..."] * (len(overlong) > MAX_NAMED)
        finding = f"{len(overlong)} of {len(draws)} prompts looked at do not fit ({', '.join(named)})"
        reasons = "; ".join(limits.explain(env) for env in sorted({draw.env for draw, _ in overlong}))
        advice = "raise max_model_len and seq_len, lower sampling.max_tokens, or leave such examples out"
        if len(overlong) == len(draws):
            raise BatchError(f"{finding}: {reasons}; {advice}")
        logger.warning("%s: %s; they are left out of training, %s", finding, reasons, advice)
    return limits


def with_question(prompt: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt that every chat template accepts: with a message of the user.

    The first message of some environments comes only when they are played, and their examples have no prompt.
    """
    has_question = any(message.get("role") in ("user", "text") for message in prompt)
    return [*prompt] if has_question else [*prompt, {"role": "user", "content": _QUESTION}]


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
    """Sample a short completion of each prompt on the first server. Then every server scores the first `num_tokens` of them.

    Args:
        clients: one for each server.
        num_tokens: size of the probe.
        step: the last step already trained, so the batch after it is the first to train.

    Returns:
        A probe with one row for each server: the same samples with that server's log-probabilities. It has no rows when no
        prompt could be completed.
    """
    max_tokens = min(sampling.max_tokens or _MAX_TOKENS, _MAX_TOKENS)
    short = sampling.model_copy(update={"max_tokens": max_tokens, "min_tokens": min(sampling.min_tokens, max_tokens)})
    arguments = sampling_arguments(short, temperature=temperature)
    fields = {**arguments.fields, "temperature": arguments.temperature, "seed": arguments.seed}
    requests = [clients[0].complete_chat(messages, model=model_name, fields=fields) for messages in prompts]
    conversations: list[list[int]] = []
    for answer in await asyncio.gather(*requests, return_exceptions=True):
        if isinstance(answer, InferenceError) and any(refusal in str(answer) for refusal in OVERLONG_REFUSALS):
            continue
        if isinstance(answer, BaseException):
            raise answer
        # Without the last token: a server that scores tokens needs space for one more token in its context.
        conversations.append([*answer.prompt_ids, *answer.token_ids][:-1])
    samples = cut_samples(conversations, num_tokens=num_tokens)
    if not samples:
        logger.warning("the start policy is not compared: none of %s prompts fits the server's context", len(prompts))
        return Batch(step=step, purpose=BatchPurpose.PROBE)
    lengths_S = np.array([len(ids) for ids in samples], dtype=np.int32)
    position_ids_T = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths_S])
    scores = await asyncio.gather(*(client.score(ids, model=model_name) for client in clients for ids in samples))
    rows = [
        MicroBatch(
            token_ids_T=np.concatenate(samples).astype(np.int32),
            position_ids_T=position_ids_T,
            loss_mask_T=position_ids_T > 0,
            logprobs_T=np.concatenate(scores[start : start + len(samples)]).astype(np.float32),
            advantages_T=np.zeros(len(position_ids_T), dtype=np.float32),
            temperatures_T=np.ones(len(position_ids_T), dtype=np.float32),
            sequence_lengths_S=lengths_S,
        )
        for start in range(0, len(scores), len(samples))
    ]
    dtype = (await clients[0].served_policy()).dtype
    return Batch(step=step, purpose=BatchPurpose.PROBE, micro_batches=rows, num_rollouts=len(samples), served_dtype=dtype)
