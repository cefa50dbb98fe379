"""Checks of how tokens are sampled in training and in evaluations: the run's section, and each environment's over it."""

from collections.abc import Iterator, Sequence

from trivet.config.loading.findings import ROOT, Key
from trivet.config.masking import mask_table
from trivet.config.sections.environment import EnvConfig
from trivet.config.sections.inference import InferenceConfig
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.config.sections.sampling import EvalSamplingConfig, RequestSamplingConfig, SamplingConfig
from trivet.wire.sampling_fields import biasing_fields

_MAX_SHOWN_CHARS = 60
"""A longer value, such as a list of token ids, is cut in a notice."""
REPRODUCIBLE_ENGINE = (
    "aggregate_engine_logging",
    "all2all_backend",
    "async_scheduling",
    "block_size",
    "chat_template_content_format",
    "compilation_config",
    "cpu_offload",
    "cudagraph",
    "data_parallel",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_fastapi_docs",
    "disable_log",
    "disable_uvicorn",
    "distributed_",
    "download_dir",
    "enable_auto_tool_choice",
    "enable_chunked_prefill",
    "enable_dbo",
    "enable_expert_parallel",
    "enable_eplb",
    "enable_log",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "eplb_config",
    "exclude_tools_when_tool_choice_none",
    "kv_cache_memory_bytes",
    "kv_cache_metrics",
    "kv_events_config",
    "kv_offloading",
    "limit_mm_per_prompt",
    "log_",
    "max_",
    "num_gpu_blocks_override",
    "numa_bind",
    "optimization_level",
    "otlp_traces_endpoint",
    "performance_mode",
    "pipeline_parallel_size",
    "prefix_caching_hash_algo",
    "reasoning_parser_plugin",
    "root_path",
    "safetensors_",
    "scheduling_policy",
    "ssl_",
    "stream_interval",
    "swap_space",
    "tool_parser_plugin",
    "trust_request_chat_template",
    "use_tqdm_on_load",
    "uvicorn_",
)
"""Beginnings of the vLLM arguments that say where, when and how fast tokens are sampled, and not which."""


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
    of_envs = ((at.env[index].sampling, env.sampling) for index, env in enumerate(config.env))
    biasing: list[str] = []
    for place, section in ((at.sampling, config.sampling), *of_envs):
        keys = biasing_fields({key: getattr(section, key) for key in RequestSamplingConfig.model_fields if key != "extra_body"})
        biasing += [f"{place[key]} ({value})" for key, value in keys.items()]
        biasing += [
            f"{place.extra_body[key]} ({_shown(key, value)})" for key, value in biasing_fields(section.extra_body).items()
        ]
    if biasing:
        yield f"the trainer cannot reproduce {', '.join(biasing)}: the importance ratio is biased"


def engine_notices(config: InferenceConfig, at: Key) -> Iterator[str]:
    """Yield a notice that names every argument of vLLM that is not known to leave its tokens those of the policy."""
    unknown = [
        f"{at.vllm_args[name]} ({_shown(name, value)})"
        for name, value in config.vllm_args.items()
        if not name.replace("-", "_").startswith(REPRODUCIBLE_ENGINE)
    ]
    if unknown:
        yield (
            f"the trainer computes without {', '.join(unknown)}: if tokens are sampled otherwise for it, the importance ratio is"
            " biased; watch mismatch_kl/mean"
        )


def _shown(name: str, value: object) -> str:
    """Return the beginning of a value, without secrets: these keys are of others, and may hold any."""
    text = str(mask_table({name: value})[name])
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
