"""Checks the configuration of one role. `at` is its section in the configuration of a run, for the keys in messages."""

from collections.abc import Iterator, Sequence

from trivet.config.dump import literal
from trivet.config.findings import ROOT, Key
from trivet.config.masking import mask_table
from trivet.config.schema.environment import (
    EnvConfig,
    EvalSamplingConfig,
    OnlineEvalConfig,
    RequestSamplingConfig,
    SamplingConfig,
)
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import VLLM_KEYS, InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import RunIdentity
from trivet.config.schema.trainer import BenchConfig, DefaultLossConfig, TrainerConfig, TrainingConfig
from trivet.wire.sampling_fields import biasing_fields


def steps_problem(max_steps: int | None, *, resume_step: int) -> str | None:
    """Check that a run that resumes from `resume_step` has a step left to do."""
    if max_steps is None or max_steps > resume_step:
        return None
    return f"max_steps ({max_steps}) must be above the step resumed from ({resume_step}): nothing is left to do; raise it"


def tensor_parallel_problem(tp: int, *, num_gpus: int, key: str, gpu_ids: str) -> str | None:
    """Check that whole replicas of a server fit its GPUs.

    Args:
        key: the key that `tp` is the value of.
        gpu_ids: the key that lists the GPUs.
    """
    if num_gpus % tp == 0:
        return None
    return (
        f"{gpu_ids} names {num_gpus} GPU(s), which must be divisible by {key} ({tp}):"
        f" {num_gpus} % {tp} = {num_gpus % tp}; change either"
    )


def replicas_problem(num_replicas: int, *, num_ranks: int, key: str, ranks: str) -> str | None:
    """Check that every copy of the trainer's model gets the same number of ranks.

    Args:
        key: the key that `num_replicas` is the value of.
        ranks: what `num_ranks` counts, for the message.
    """
    if num_ranks % num_replicas == 0:
        return None
    divisors = ", ".join(str(number) for number in range(1, num_ranks + 1) if num_ranks % number == 0)
    return (
        f"{key} ({num_replicas}) must divide {ranks} ({num_ranks}): {num_ranks} % {num_replicas} = {num_ranks % num_replicas};"
        f" set it to one of {divisors}"
    )


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


def training_problems(config: TrainingConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield the problems of a trainer or of supervised fine-tuning."""
    schedule = config.scheduler
    if schedule.type != "constant":
        if config.max_steps is None and schedule.total_steps is None and not isinstance(config, SftConfig):
            yield f'{at.scheduler.type} "{schedule.type}" decays until the last step: set {ROOT.max_steps}'
        if schedule.min_lr > config.optim.lr:
            yield f"{at.scheduler.min_lr} ({schedule.min_lr}) must be <= {at.optim.lr} ({config.optim.lr}); lower the first"
    if config.trace_path is not None and config.max_steps is not None and config.max_steps < 3:
        yield f"{at.trace_path} traces the third and fourth step, and {ROOT.max_steps} is {config.max_steps}; raise it"
    if config.bench is not None:
        yield from _bench_problems(config.bench, seq_len=config.model.seq_len, at=at)
    if isinstance(config, TrainerConfig) and config.data.fake is not None and config.data.replay is not None:
        yield f"{at.data.fake} and {at.data.replay} are two sources of batches; remove one"
    if isinstance(config, TrainerConfig) and isinstance(config.loss, DefaultLossConfig):
        loss = config.loss
        for name in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(loss, f"{name}_low"), getattr(loss, f"{name}_high")
            if low >= high:
                low_key, high_key = at.loss[f"{name}_low"], at.loss[f"{name}_high"]
                yield f"{low_key} ({low}) must be < {high_key} ({high}): no token would be trained on"


def _bench_problems(bench: BenchConfig, *, seq_len: int, at: Key) -> Iterator[str]:
    answer_len = 2 if bench.answer_len is None else bench.answer_len
    if bench.prompt_len + answer_len > seq_len:
        yield (
            f"{at.bench.prompt_len} ({bench.prompt_len}) and an answer of {answer_len} tokens must fit into"
            f" {at.model.seq_len} ({seq_len}); shorten them"
        )


def orchestrator_problems(config: OrchestratorConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield the problems of an orchestrator."""
    batch, group = config.batch_size, config.rollouts_per_example
    if batch % group:
        below = batch - batch % group
        tries = f"{below} or {below + group}" if below else f"{group}"
        yield (
            f"{at.batch_size} ({batch}) must be divisible by {at.rollouts_per_example} ({group}):"
            f" {batch} % {group} = {batch % group}; try {tries}"
        )
    if config.max_concurrent is not None and config.max_concurrent < group:
        yield (
            f"{at.max_concurrent} ({config.max_concurrent}) must be >= {at.rollouts_per_example} ({group}):"
            f" a group is in flight as a whole; try {group}"
        )
    if group < 2 and config.advantage.needs_a_group:
        yield (
            f'{at.rollouts_per_example} must be >= 2 for advantage "{config.advantage.type}", got {group};'
            f' raise it (one rollout has no others to be compared with) or set {at.advantage} = "None"'
        )
    if config.max_async_level > config.max_off_policy_steps:
        yield (
            f"{at.max_async_level} ({config.max_async_level}) must be <= {at.max_off_policy_steps}"
            f" ({config.max_off_policy_steps}): a rollout that lags as far as allowed would be dropped as stale"
        )
    if config.deterministic:
        needs = {
            "strict_async_level": (config.strict_async_level, True),
            "oversampling_factor": (config.oversampling_factor, 1.0),
        }
        for key, (value, needed) in needs.items():
            if value != needed:
                yield f"{at.deterministic} = true needs {at[key]} = {literal(needed)}, got {literal(value)}; set it"
        if config.sampling.seed is None:
            yield f"{at.deterministic} = true needs {at.sampling.seed}, which is not set; set it to any whole number"
    yield from name_problems(config.env, at.env)
    yield from _ratio_problems(config, at)
    yield from run_sampling_problems(config, at)
    if config.eval is not None:
        yield from _eval_problems(config, config.eval, at.eval)
    yield from _replay_problems(config, at)


def _replay_problems(config: OrchestratorConfig, at: Key) -> Iterator[str]:
    """Yield what needs a server: a replay has none."""
    if config.replay is None:
        return
    needs = {
        at.eval: config.eval,
        at.val: config.val,
        at.teacher_model: config.teacher_model,
        at.client.elastic: config.client.elastic,
    }
    for key, value in needs.items():
        if value is not None:
            yield f'{key} needs an inference server, and {at.replay} ({config.replay}) starts none; set {key} = "None"'
    if config.ckpt.resume_from is not None:
        yield (
            f"{at.ckpt.resume_from} ({config.ckpt.resume_from}) goes on with the groups of that run, and {at.replay} takes those of"
            f" a record; remove it, and start from its weights with {ROOT.model.name}"
        )


def _eval_problems(config: OrchestratorConfig, evals: OnlineEvalConfig, at: Key) -> Iterator[str]:
    yield from name_problems(evals.env, at.env)
    yield from eval_sampling_problems(evals.sampling, evals.env, at)
    trained = {env.label: env for env in config.env}
    for index, env in enumerate(evals.env):
        taken = trained.get(config.pool_name(env))
        if taken is not None and taken.program != env.program:
            yield (
                f'the workers of {at.env[index]} would have the name "{taken.label}" of an environment that is trained on;'
                f" set another name in {at.env[index]}"
            )


def _ratio_problems(config: OrchestratorConfig, at: Key) -> Iterator[str]:
    ratios = config.buffer.env_ratios
    if ratios is not None and len(ratios) != len(config.env):
        labels = ", ".join(env.label for env in config.env)
        yield (
            f"{at.buffer.env_ratios} has {len(ratios)} numbers for {len(config.env)} environments ({labels}):"
            f" {len(ratios)} != {len(config.env)}; give one number per [[{at.env}]], in their order"
        )


def orchestrator_notices(config: OrchestratorConfig) -> Iterator[str]:
    """Yield the notices of an orchestrator that was started by hand; the launcher gives a run's own notices."""
    if config.run.id != RunIdentity().id:
        return  # started by the launcher, which gave these notices
    if config.max_steps is None:
        yield f"{ROOT.max_steps} is not set: the orchestrator goes on until it is stopped"
    yield from sampling_notices(config)


def offline_problems(config: EvalConfig) -> Iterator[str]:
    """Yield the problems of the command `eval`."""
    if config.steps is not None and (not config.steps or min(config.steps) < 1):
        yield f"{ROOT.steps} must name steps >= 1, got {literal(config.steps)}; the start model is {ROOT.eval_base}"
    if config.resume_path is not None and config.output_dir is not None:
        yield (
            f"{ROOT.resume_path} ({config.resume_path}) says where the results are, and {ROOT.output_dir} ({config.output_dir})"
            f" too; remove {ROOT.output_dir}"
        )
    if config.retry.wait_min > config.retry.wait_max:
        wait_min, wait_max = ROOT.retry.wait_min, ROOT.retry.wait_max
        yield f"{wait_min} ({config.retry.wait_min}) must be <= {wait_max} ({config.retry.wait_max}); lower the first"
    yield from name_problems(config.env, ROOT.env)
    yield from eval_sampling_problems(config.sampling, config.env, ROOT)


def inference_problems(config: InferenceConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield the problems of an inference server."""
    for name, value in config.vllm_args.items():
        if key := VLLM_KEYS.get(name.replace("-", "_")):
            yield f"{at.vllm_args[name]} ({value}) has a key of its own: set {at[key]} instead"
    if config.enable_lora and config.max_cpu_loras < config.max_loras:
        yield (
            f"{at.max_cpu_loras} ({config.max_cpu_loras}) must be >= {at.max_loras} ({config.max_loras}): adapters in"
            " use must stay loaded; raise the first or lower the second"
        )


def name_problems(envs: Sequence[EnvConfig], at: Key) -> Iterator[str]:
    """Yield a problem for each label that two environments share.

    Args:
        at: the list of environments.
    """
    labels = [env.label for env in envs]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        places = " and ".join(str(at[index]) for index, env in enumerate(envs) if env.label == label)
        yield f'{places} are both called "{label}", which names them in logs and metrics; set a different name in each'
