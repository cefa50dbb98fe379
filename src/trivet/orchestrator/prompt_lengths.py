"""Knows how long a prompt may be, and names those that are longer before the first batch.

A server refuses a prompt that leaves too little of its context, and the trainer sees the first seq_len tokens of a sample alone. A
group of such a prompt has nothing to train on.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trivet.client.inference_client import InferenceClient
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.errors import BatchError, InferenceError
from trivet.orchestrator.sampler import Draw
from trivet.wire.groups import Split

logger = logging.getLogger(__name__)

NUM_CHECKED = 64
"""Prompts whose length is measured at the start: seconds, whatever the size of the data."""
MAX_NAMED = 5
"""Examples that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """The room for prompts, by environment."""

    seq_len: int
    max_tokens: Mapping[str, int]
    """Tokens that a request reserves for its completion, at least 1."""
    context: int | None = None
    """The server's context; None: it does not say."""

    def explain(self, env: str) -> str:
        """Say what a prompt of `env` may have, with the arithmetic."""
        served = "" if self.context is None else f"max_model_len {self.context} - sampling.max_tokens {self.max_tokens[env]}, "
        trained = f"orchestrator.seq_len {self.seq_len} - 1 that is trained on"
        return f"a prompt of {env} may have {self.max_prompt(env)} tokens at most (the least of {served}{trained})"

    def max_prompt(self, env: str) -> int:
        """Return the most tokens that a prompt of `env` may have."""
        return min(self.seq_len - 1, self.seq_len if self.context is None else self.context - self.max_tokens[env])


def limits_of(config: OrchestratorConfig) -> PromptLimits:
    """Return the limits that the configuration alone gives."""
    max_tokens = {env.label: env.sampling.over(config.sampling).max_tokens or 1 for env in config.env}
    return PromptLimits(seq_len=config.seq_len, max_tokens=max_tokens)


async def check_prompts(
    draws: Sequence[Draw], *, limits: PromptLimits, pool: EnvironmentPool, client: InferenceClient, model: str
) -> PromptLimits:
    """Measure the prompts of `draws`, log those that do not fit, and return the limits with the server's context.

    Raises:
        BatchError: none fits.
    """
    found: list[tuple[Draw, int]] = []
    draws = list({(draw.env, draw.example_id): draw for draw in draws}.values())
    for draw in draws:
        messages = await pool.prompt(draw.env, split=Split.TRAIN, example_id=draw.example_id)
        try:
            count, context = await client.count_tokens(messages, model=model)
        except InferenceError as exc:  # another server than ours need not answer, and the first rollouts say the same
            logger.info("lengths of prompts are not known: %s", exc)
            return limits
        limits = replace(limits, context=context)
        if count > limits.max_prompt(draw.env):
            found.append((draw, count))
    if found:
        named = [f"example {draw.example_id} of {draw.env}: {count} tokens" for draw, count in found[:MAX_NAMED]]
        named += ["..."] * (len(found) > MAX_NAMED)
        finding = f"{len(found)} of {len(draws)} prompts looked at do not fit ({', '.join(named)})"
        reasons = "; ".join(limits.explain(env) for env in sorted({draw.env for draw, _ in found}))
        advice = "raise max_model_len and seq_len, lower sampling.max_tokens, or leave such examples out"
        if len(found) == len(draws):
            raise BatchError(f"{finding}: {reasons}; {advice}")
        logger.warning("%s: %s; they are left out of training, %s", finding, reasons, advice)
    return limits
