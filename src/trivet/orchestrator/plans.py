"""Reads from the configuration how tokens of a group are sampled and what is looked for in its rollouts."""

from collections.abc import Callable

from trivet.algorithms.filters import Gibberish, Repetition, RolloutFilter, RolloutFilters
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.sampling import sampling_arguments
from trivet.orchestrator.sampler import Draw
from trivet.wire.groups import SamplingArguments


def sampling_plan(config: OrchestratorConfig) -> Callable[[Draw], SamplingArguments]:
    """Return the run's sampling with the changes of the draw's environment, at the temperature of the draw's step.

    A function of the draw alone, so that a group dispatched again is sampled alike.
    """
    by_env = {env.label: env.sampling.over(config.sampling) for env in config.env}

    def plan(draw: Draw) -> SamplingArguments:
        """Return the sampling of the group of `draw`."""
        sampling = by_env[draw.env]
        return sampling_arguments(sampling, temperature=sampling.temperature_at(draw.step, max_steps=config.max_steps))

    return plan


def rollout_filters(config: OrchestratorConfig) -> RolloutFilters:
    """Return the filters to apply to each rollout, and which of them mask it."""
    filters = config.filters
    sections = {
        RolloutFilter.REPETITION: filters.repetition,
        RolloutFilter.GIBBERISH: filters.gibberish,
        RolloutFilter.ZERO_ADVANTAGE: filters.zero_advantage,
    }
    enforced = {name for name, section in sections.items() if section is not None and section.enforce}
    if config.mask_truncated_completions:
        enforced.add(RolloutFilter.TRUNCATED)
    repetition, gibberish = filters.repetition, filters.gibberish
    return RolloutFilters(
        repetition=repetition and Repetition(window=repetition.window, prob_threshold=repetition.prob_threshold),
        gibberish=gibberish and Gibberish(token_id_threshold=gibberish.token_id_threshold, max_logprob=gibberish.max_logprob),
        is_measuring_zero_advantage=filters.zero_advantage is not None,
        enforced=frozenset(enforced),
    )
