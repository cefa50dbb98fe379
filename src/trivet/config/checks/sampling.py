"""Checks of how tokens are sampled in training and in evaluations: the run's section, and each environment's over it."""

from collections.abc import Iterator, Sequence

from trivet.config.sections.environment import EnvConfig
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.config.sections.sampling import EvalSamplingConfig, RequestSamplingConfig, SamplingConfig

BIASING_KEYS = ("min_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling keys that change the distribution in a way that the trainer's log-probabilities do not follow."""


def run_sampling_problems(config: OrchestratorConfig, prefix: str) -> Iterator[str]:
    """Check the run's sampling and each environment's over it. A problem of the run's is reported once."""
    problems = [*_schedule_problems(config, config.sampling, f"{prefix}sampling")]
    problems += sampling_problems(config.sampling, f"{prefix}sampling")
    yield from problems
    if problems:
        return
    for index, env in enumerate(config.env):
        merged, name = env.sampling.over(config.sampling), f"{prefix}env.{index}.sampling"
        yield from _schedule_problems(config, merged, name)
        yield from sampling_problems(merged, name)


def eval_sampling_problems(sampling: EvalSamplingConfig, envs: Sequence[EnvConfig], name: str) -> Iterator[str]:
    """Check evaluations' sampling and each environment's over it. A problem of the first is reported once."""
    prefix = f"{name}." if name else ""
    problems = [*sampling_problems(sampling, f"{prefix}sampling")]
    yield from problems
    for index, env in enumerate(envs):
        of_env = f"{prefix}env.{index}.sampling"
        if env.sampling.temp_scheduler is not None:
            yield f"{of_env}.temp_scheduler changes with the step, and evaluations are compared; set {of_env}.temperature"
        elif not problems:
            yield from sampling_problems(env.sampling.over(sampling), of_env)


def _schedule_problems(config: OrchestratorConfig, sampling: SamplingConfig, name: str) -> Iterator[str]:
    schedule = sampling.temp_scheduler
    if schedule is not None and schedule.total_steps is None and config.max_steps is None:
        yield f"{name}.temp_scheduler ends after max_steps, which is not set: set total_steps in it, or max_steps"


def sampling_problems(sampling: SamplingConfig | EvalSamplingConfig, name: str) -> Iterator[str]:
    """Yield the problems of one section; `name` is its key."""
    own = {"temperature", *RequestSamplingConfig.model_fields} - {"extra_body"}
    knobs = {key: key for key in own} | {"max_completion_tokens": "max_tokens"}
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        yield f"{name}.min_tokens ({sampling.min_tokens}) must be <= {name}.max_tokens ({sampling.max_tokens})"
    for knob in sorted(knobs.keys() & sampling.extra_body.keys()):
        key = knobs[knob]
        yield (
            f"{name}.extra_body.{knob} ({sampling.extra_body[knob]}) and {name}.{key} ({getattr(sampling, key)})"
            f" are the same knob; set {name}.{key} and remove it from {name}.extra_body"
        )


def sampling_notices(config: OrchestratorConfig, prefix: str) -> Iterator[str]:
    """Yield a notice that names every key whose effect the trainer's log-probabilities do not follow."""
    default = SamplingConfig()
    of_envs = ((f"env.{index}.sampling", env.sampling) for index, env in enumerate(config.env))
    biasing = [
        f"{prefix}{name}.{key} ({value})"
        for name, section in (("sampling", config.sampling), *of_envs)
        for key in BIASING_KEYS
        if (value := getattr(section, key)) not in (None, getattr(default, key)) and (key, value) != ("top_k", 0)
    ]
    if biasing:
        yield f"the trainer cannot reproduce {', '.join(biasing)}: the importance ratio is biased"
