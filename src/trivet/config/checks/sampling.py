"""Checks of how tokens are sampled in training and in evaluations: the run's section, and each environment's over it."""

from collections.abc import Iterator, Sequence

from trivet.config.loading.findings import ROOT, Key
from trivet.config.sections.environment import EnvConfig
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.config.sections.sampling import EvalSamplingConfig, RequestSamplingConfig, SamplingConfig

BIASING_KEYS = ("min_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling keys that change the distribution in a way that the trainer's log-probabilities do not follow."""


def run_sampling_problems(config: OrchestratorConfig, at: Key) -> Iterator[str]:
    """Check the run's sampling and each environment's over it. A problem of the run's is reported once."""
    problems = [*_schedule_problems(config, config.sampling, at.sampling), *sampling_problems(config.sampling, at.sampling)]
    yield from problems
    if problems:
        return
    for index, env in enumerate(config.env):
        merged, of_env = env.sampling.over(config.sampling), at.env[index].sampling
        yield from _schedule_problems(config, merged, of_env)
        yield from sampling_problems(merged, of_env)


def eval_sampling_problems(sampling: EvalSamplingConfig, envs: Sequence[EnvConfig], at: Key) -> Iterator[str]:
    """Check evaluations' sampling and each environment's over it. A problem of the first is reported once."""
    problems = [*sampling_problems(sampling, at.sampling)]
    yield from problems
    for index, env in enumerate(envs):
        of_env = at.env[index].sampling
        if env.sampling.temp_scheduler is not None:
            yield f"{of_env.temp_scheduler} changes with the step, and evaluations are compared; set {of_env.temperature}"
        elif not problems:
            yield from sampling_problems(env.sampling.over(sampling), of_env)


def _schedule_problems(config: OrchestratorConfig, sampling: SamplingConfig, at: Key) -> Iterator[str]:
    schedule = sampling.temp_scheduler
    if schedule is not None and schedule.total_steps is None and config.max_steps is None:
        yield f"{at.temp_scheduler} ends after {ROOT.max_steps}, which is not set: set total_steps in it, or {ROOT.max_steps}"


def sampling_problems(sampling: SamplingConfig | EvalSamplingConfig, at: Key) -> Iterator[str]:
    """Yield the problems of the section `at`."""
    own = {"temperature", *RequestSamplingConfig.model_fields} - {"extra_body"}
    knobs = {key: key for key in own} | {"max_completion_tokens": "max_tokens"}
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        yield f"{at.min_tokens} ({sampling.min_tokens}) must be <= {at.max_tokens} ({sampling.max_tokens})"
    for knob in sorted(knobs.keys() & sampling.extra_body.keys()):
        key = knobs[knob]
        yield (
            f"{at.extra_body[knob]} ({sampling.extra_body[knob]}) and {at[key]} ({getattr(sampling, key)})"
            f" are the same knob; set {at[key]} and remove it from {at.extra_body}"
        )


def sampling_notices(config: OrchestratorConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield a notice that names every key whose effect the trainer's log-probabilities do not follow."""
    default = SamplingConfig()
    of_envs = ((at.env[index].sampling, env.sampling) for index, env in enumerate(config.env))
    biasing = [
        f"{place[key]} ({value})"
        for place, section in ((at.sampling, config.sampling), *of_envs)
        for key in BIASING_KEYS
        if (value := getattr(section, key)) not in (None, getattr(default, key)) and (key, value) != ("top_k", 0)
    ]
    if biasing:
        yield f"the trainer cannot reproduce {', '.join(biasing)}: the importance ratio is biased"
