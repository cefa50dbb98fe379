"""Checks the configuration of one role.

Each check yields texts for the user. Its argument `at` is the key of the role's section in the configuration of a run, or the root
if the role has a configuration of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isclose, prod
from typing import Any, cast
from urllib.parse import urlsplit

from trivet.config.dump import literal
from trivet.config.findings import ROOT, Key
from trivet.config.masking import mask_table
from trivet.config.resolve import LOCAL_HOSTS
from trivet.config.schema.environment import (
    EnvConfig,
    EvalSamplingConfig,
    OnlineEvalConfig,
    RequestSamplingConfig,
    SamplingConfig,
)
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import (
    COMPUTED_VLLM_ARGUMENTS,
    SERVER_OWNED_VLLM_ARGUMENTS,
    VLLM_KEYS,
    InferenceConfig,
)
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.sft import ConversationsConfig, FakeDataConfig, SftConfig
from trivet.config.schema.shared import RunIdentity
from trivet.config.schema.trainer import TrainerConfig, TrainingConfig
from trivet.wire.groups import biasing_fields

_MAX_SHOWN_CHARS = 60
"""A notice shows at most this much of a value, which may be a long list of token ids."""
_HARMLESS_VLLM_ARGUMENTS = """
    aggregate_engine_logging all2all_backend async_scheduling block_size chat_template_content_format compilation_config
    cpu_offload cudagraph data_parallel disable_cascade_attn disable_custom_all_reduce disable_fastapi_docs disable_log
    disable_uvicorn distributed_ download_dir enable_auto_tool_choice enable_chunked_prefill enable_dbo
    enable_expert_parallel enable_eplb enable_log enable_prefix_caching enable_sleep_mode eplb_config
    exclude_tools_when_tool_choice_none kv_cache_memory_bytes kv_cache_metrics kv_events_config kv_offloading
    limit_mm_per_prompt log_ max_ num_gpu_blocks_override numa_bind optimization_level otlp_traces_endpoint
    performance_mode pipeline_parallel_size prefix_caching_hash_algo reasoning_parser_plugin root_path safetensors_
    scheduling_policy speculative_config ssl_ stream_interval swap_space tool_parser_plugin trust_request_chat_template
    use_tqdm_on_load uvicorn_
"""
"""Beginnings of the vLLM arguments that affect where, when and how fast tokens are sampled, but not which tokens."""


def steps_problem(max_steps: int | None, *, resume_step: int) -> str | None:
    """Return the problem of a run that resumes from `resume_step` and has no step left; None if steps are left."""
    if max_steps is None or max_steps > resume_step:
        return None
    return f"max_steps ({max_steps}) must be above the step resumed from ({resume_step}): nothing is left to do; raise it"


def tensor_parallel_problem(tp: int, *, num_gpus: int, key: object, gpu_ids: object) -> str | None:
    """Return the problem of a server whose GPUs cannot be divided into replicas of `tp` GPUs, or None. `key` is the key of `tp`."""
    if num_gpus % tp == 0:
        return None
    remainder = f"{num_gpus} % {tp} = {num_gpus % tp}"
    return f"{gpu_ids} names {num_gpus} GPU(s), which must be divisible by {key} ({tp}): {remainder}; change either"


def ranks_problem(parts: Mapping[Any, int], *, num_ranks: int, ranks: str) -> str | None:
    """Return the problem of a trainer whose ranks cannot be divided into groups of equal size, or None.

    Args:
        parts: into how many parts the ranks are divided, and each part again, by the key that says so.
        ranks: what the ranks are, as text for the message.
    """
    product = prod(parts.values())
    if num_ranks % product == 0:
        return None
    divisors = ", ".join(str(number) for number in range(1, num_ranks + 1) if num_ranks % number == 0)
    used = [f"{key} ({number})" for key, number in parts.items() if number > 1]
    remainder = f"{num_ranks} % {product} = {num_ranks % product}"
    changed = "it" if len(used) == 1 else "their product"
    return f"{' x '.join(used)} must divide {ranks} ({num_ranks}): {remainder}; set {changed} to one of {divisors}"


def training_problems(config: TrainingConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield the problems of a trainer or of supervised fine-tuning."""
    schedule, bench = config.scheduler, config.bench
    if schedule.type != "constant":
        if config.max_steps is None and schedule.total_steps is None and not isinstance(config, SftConfig):
            yield f'{at.scheduler.type} "{schedule.type}" decays until the last step: set {ROOT.max_steps}'
        if schedule.min_lr > config.optim.lr:
            yield f"{at.scheduler.min_lr} ({schedule.min_lr}) must be <= {at.optim.lr} ({config.optim.lr}); lower the first"
    if config.trace_path is not None and config.max_steps is not None and config.max_steps < 3:
        yield f"{at.trace_path} traces the third and fourth step, and {ROOT.max_steps} is {config.max_steps}; raise it"
    answer_len = 2 if bench is None or bench.answer_len is None else bench.answer_len
    if bench is not None and bench.prompt_len + answer_len > config.model.seq_len:
        yield (
            f"{at.bench.prompt_len} ({bench.prompt_len}) and an answer of {answer_len} tokens must fit into"
            f" {at.model.seq_len} ({config.model.seq_len}); shorten them"
        )
    if isinstance(config, TrainerConfig):
        yield from _trainer_problems(config, at)
    if isinstance(config, SftConfig):
        yield from _sft_problems(config, at)


def _trainer_problems(config: TrainerConfig, at: Key) -> Iterator[str]:
    """Yield the problems of a trainer that supervised fine-tuning cannot have."""
    if config.data.fake is not None and config.data.replay is not None:
        yield f"{at.data.fake} and {at.data.replay} are two sources of batches; remove one"
    for name in ("token_mask", "geo_mask", "sequence_mask") if isinstance(config.loss, DefaultLossConfig) else ():
        low, high = getattr(config.loss, f"{name}_low"), getattr(config.loss, f"{name}_high")
        if low >= high:
            low_key, high_key = at.loss[f"{name}_low"], at.loss[f"{name}_high"]
            yield f"{low_key} ({low}) must be < {high_key} ({high}): no token would be trained on"


def _sft_problems(config: SftConfig, at: Key) -> Iterator[str]:
    """Yield the problems of supervised fine-tuning: of its data, and of a way to servers that it does not have."""
    if config.weights.transport != "files":
        yield f"{at.weights.transport} ({config.weights.transport}) is for runs with servers; remove it"
    if not isinstance(config.data, FakeDataConfig):
        yield from _mixture_problems(config.data, at.data)
    elif config.max_steps is None:
        yield f'{at.data.type} "fake" has no end: set {at.max_steps}'
    if config.val is not None:
        yield from _mixture_problems(config.val.data, at.val.data)


def _mixture_problems(config: ConversationsConfig, at: Key) -> Iterator[str]:
    """Yield the first problem in the keys that mix several sources of conversations."""
    subsets, splits, chances = config.subsets, config.splits, config.probabilities
    for key, names in ((at.subsets, subsets), (at.splits, splits)):
        if names is not None and (not names or "" in names):
            yield f"{key} must name at least one, and no name may be empty, got {literal(names)}; remove the key for all in one"
            return
    num_sources = max(len(subsets or ()), len(splits or ()), 1)
    if subsets is not None and splits is not None and len(subsets) != len(splits):
        yield (
            f"{at.splits} has {len(splits)} names for {len(subsets)} {at.subsets}: {len(splits)} != {len(subsets)};"
            f" give one split for each subset, in their order"
        )
    elif chances is not None and len(chances) != num_sources:
        yield (
            f"{at.probabilities} has {len(chances)} numbers for {num_sources} sources: {len(chances)} != {num_sources};"
            f" give one for each of {at.subsets} or {at.splits}, in their order"
        )
    elif chances is not None and min(chances) <= 0:
        yield f"{at.probabilities} must be > 0, got {literal(chances)}; remove a source that is not wanted"
    elif chances is not None and not isclose(sum(chances), 1.0, abs_tol=1e-6):
        scaled = ", ".join(f"{chance / sum(chances):.4g}" for chance in chances)
        yield f"{at.probabilities} must sum to 1, got {' + '.join(map(str, chances))} = {sum(chances):g}; try [{scaled}]"


def _origin_problems(config: OrchestratorConfig) -> Iterator[str]:
    """Check that servers on other machines can reach the origin."""
    url, at, client = config.weights.origin_url, ROOT.weights, config.client
    urls = client.base_url if client.elastic is None else [client.elastic.source]
    distant = [url for url in urls if urlsplit(url).hostname not in LOCAL_HOSTS]
    if url is not None and urlsplit(url).hostname in LOCAL_HOSTS and distant:
        yield (
            f'{at.transport} = "http": the server {distant[0]} is on another machine and cannot fetch from {url}; set'
            f" {at.origin.host} to an address of this machine, or to 0.0.0.0 and {at.origin.advertise} to its name"
        )


def orchestrator_problems(config: OrchestratorConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield the problems of an orchestrator."""
    batch, group, ratios, num_envs = config.batch_size, config.rollouts_per_example, config.buffer.env_ratios, len(config.env)
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
        yield from _deterministic_problems(config, at)
    yield from _origin_problems(config)
    yield from _name_problems(config.env, at.env)
    if ratios is not None and len(ratios) != num_envs:
        labels = ", ".join(env.label for env in config.env)
        yield (
            f"{at.buffer.env_ratios} has {len(ratios)} numbers for {num_envs} environments ({labels}):"
            f" {len(ratios)} != {num_envs}; give one number per [[{at.env}]], in their order"
        )
    problems = list(_run_sampling_problems(config, config.sampling, at.sampling))
    yield from problems
    for index, env in enumerate([] if problems else config.env):  # a problem of the run's sampling is reported once
        yield from _run_sampling_problems(config, env.sampling.over(config.sampling), at.env[index].sampling)
    if config.eval is not None:
        yield from _eval_problems(config, config.eval, at.eval)
    if config.replay is not None:
        yield from _replay_problems(config, at)


def _deterministic_problems(config: OrchestratorConfig, at: Key) -> Iterator[str]:
    """Yield a problem for each key whose value keeps the orchestrator from being deterministic."""
    strict, oversampling = config.strict_async_level, config.oversampling_factor
    for key, value, needed in ((at.strict_async_level, strict, True), (at.oversampling_factor, oversampling, 1.0)):
        if value != needed:
            yield f"{at.deterministic} = true needs {key} = {literal(needed)}, got {literal(value)}; set it"
    if config.sampling.seed is None:
        yield f"{at.deterministic} = true needs {at.sampling.seed}, which is not set; set it to any whole number"


def _eval_problems(config: OrchestratorConfig, evals: OnlineEvalConfig, at: Key) -> Iterator[str]:
    """Yield the problems of evaluations during a run, among them workers that would have the name of other workers."""
    yield from _name_problems(evals.env, at.env)
    yield from _eval_sampling_problems(evals.sampling, evals.env, at)
    trained = {env.label: env for env in config.env}
    for index, env in enumerate(evals.env):
        same_name = trained.get(config.pool_name(env))
        if same_name is not None and same_name.program != env.program:
            yield (
                f'the workers of {at.env[index]} would have the name "{same_name.label}" of an environment that is trained on;'
                f" set another name in {at.env[index]}"
            )


def _replay_problems(config: OrchestratorConfig, at: Key) -> Iterator[str]:
    """Yield a problem for each key that needs a server, because a replay starts none, and for a resume from another run."""
    teacher, elastic = config.teacher_model, config.client.elastic
    with_server = ((at.eval, config.eval), (at.val, config.val), (at.teacher_model, teacher), (at.client.elastic, elastic))
    for key, value in with_server:
        if value is not None:
            yield f'{key} needs an inference server, and {at.replay} ({config.replay}) starts none; set {key} = "None"'
    if config.ckpt.resume_from is not None:
        yield (
            f"{at.ckpt.resume_from} ({config.ckpt.resume_from}) goes on with the groups of that run, and {at.replay} takes those of"
            f" a record; remove it, and start from its weights with {ROOT.model.name}"
        )


def orchestrator_notices(config: OrchestratorConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield the notices of an orchestrator that was started by hand. In a run the launcher has printed them already."""
    if config.run.id != RunIdentity().id:
        return
    if config.max_steps is None:
        yield f"{at.max_steps} is not set: the orchestrator goes on until it is stopped"
    yield from sampling_notices(config, at)


def offline_problems(config: EvalConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield the problems of the command `eval`."""
    if config.steps is not None and (not config.steps or min(config.steps) < 1):
        yield f"{at.steps} must name steps >= 1, got {literal(config.steps)}; the start model is {at.eval_base}"
    if config.resume_path is not None and config.output_dir is not None:
        yield (
            f"{at.resume_path} ({config.resume_path}) says where the results are, and {at.output_dir} ({config.output_dir})"
            f" too; remove {at.output_dir}"
        )
    wait_min, wait_max = config.retry.wait_min, config.retry.wait_max
    if wait_min > wait_max:
        yield f"{at.retry.wait_min} ({wait_min}) must be <= {at.retry.wait_max} ({wait_max}); lower the first"
    yield from _name_problems(config.env, at.env)
    yield from _eval_sampling_problems(config.sampling, config.env, at)


def inference_problems(config: InferenceConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield the problems of an inference server."""
    for name, value in config.vllm_args.items():
        argument, shown = name.replace("-", "_"), f"{at.vllm_args[name]} ({_format_value(name, value)})"
        if key := (VLLM_KEYS | COMPUTED_VLLM_ARGUMENTS).get(argument):
            yield f"{shown} has a key of its own: set {at[key]} instead"
        if reason := SERVER_OWNED_VLLM_ARGUMENTS.get(argument):
            yield f"{shown} is not allowed: {reason}; remove it"
        if argument == "speculative_config":
            yield from _speculative_problems(name, value, config, at)
    if config.return_routed_experts and config.deterministic:
        yield (
            f"{at.return_routed_experts} needs the prefix cache, which {at.deterministic} turns off: vLLM keeps experts with it;"
            " remove one of both"
        )
    if config.enable_lora and config.max_cpu_loras < config.max_loras:
        yield (
            f"{at.max_cpu_loras} ({config.max_cpu_loras}) must be >= {at.max_loras} ({config.max_loras}): adapters in"
            " use must stay loaded; raise the first or lower the second"
        )


def _speculative_problems(name: str, value: Any, config: InferenceConfig, at: Key) -> Iterator[str]:
    """Yield the problems of speculative decoding: drafts must change how fast tokens are sampled, and nothing else."""
    if isinstance(value, dict) and cast("dict[str, object]", value).get("rejection_sample_method") == "synthetic":
        yield (
            f'{at.vllm_args[name]}.rejection_sample_method = "synthetic" accepts drafts whatever the policy thinks of them, so'
            ' log-probabilities are not those of the distribution sampled from; set "standard" or "block"'
        )
    for key, is_set in ((at.deterministic, config.deterministic), (at.return_routed_experts, config.return_routed_experts)):
        if is_set:
            yield f"{key} = true does not go with drafts, which are computed and may be refused: remove {at.vllm_args[name]}"


def _name_problems(envs: Sequence[EnvConfig], at: Key) -> Iterator[str]:
    """Yield a problem for each label that two environments of the list `at` share."""
    labels = [env.label for env in envs]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        places = " and ".join(str(at[index]) for index, env in enumerate(envs) if env.label == label)
        yield f'{places} are both called "{label}", which names them in logs and metrics; set a different name in each'


def _run_sampling_problems(config: OrchestratorConfig, sampling: SamplingConfig, at: Key) -> Iterator[str]:
    """Yield the problems of `sampling` in training: of the run's own section, or of an environment's merged with it."""
    schedule, end = sampling.temp_scheduler, ROOT.max_steps
    if schedule is not None and schedule.total_steps is None and config.max_steps is None:
        yield f"{at.temp_scheduler} ends after {end}, which is not set: set total_steps in it, or {end}"
    yield from _sampling_problems(sampling, at)


def _eval_sampling_problems(sampling: EvalSamplingConfig, envs: Sequence[EnvConfig], at: Key) -> Iterator[str]:
    """Yield the problems of the sampling of evaluations, and of each environment's changes to it. A shared problem comes once."""
    problems = list(_sampling_problems(sampling, at.sampling))
    yield from problems
    for index, env in enumerate(envs):
        env_key = at.env[index].sampling
        if env.sampling.temp_scheduler is not None:
            yield f"{env_key.temp_scheduler} changes with the step, and evaluations are compared; set {env_key.temperature}"
        elif not problems:
            yield from _sampling_problems(env.sampling.over(sampling), env_key)


def _sampling_problems(sampling: SamplingConfig | EvalSamplingConfig, at: Key) -> Iterator[str]:
    """Yield the problems of sampling, among them fields of extra_body that have a key of their own."""
    names = {"temperature", *RequestSamplingConfig.model_fields} - {"extra_body"}
    key_of_field = {name: name for name in names} | {"max_completion_tokens": "max_tokens"}
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        yield f"{at.min_tokens} ({sampling.min_tokens}) must be <= {at.max_tokens} ({sampling.max_tokens})"
    for field in sorted(key_of_field.keys() & sampling.extra_body.keys()):
        key = key_of_field[field]
        yield (
            f"{at.extra_body[field]} ({sampling.extra_body[field]}) and {at[key]} ({getattr(sampling, key)})"
            f" are the same knob; set {at[key]} and remove it from {at.extra_body}"
        )


def sampling_notices(config: OrchestratorConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield a notice with all sampling keys whose effect the trainer's log-probabilities do not contain."""
    biasing: list[str] = []
    env_sections = ((at.env[index].sampling, env.sampling) for index, env in enumerate(config.env))
    for section_key, section in ((at.sampling, config.sampling), *env_sections):
        set_values = {key: getattr(section, key) for key in RequestSamplingConfig.model_fields if key != "extra_body"}
        biasing += [f"{section_key[key]} ({value})" for key, value in biasing_fields(set_values).items()]
        further = biasing_fields(section.extra_body).items()
        biasing += [f"{section_key.extra_body[key]} ({_format_value(key, value)})" for key, value in further]
    if biasing:
        yield f"the trainer cannot reproduce {', '.join(biasing)}: the importance ratio is biased"


def engine_notices(config: InferenceConfig, at: Key = ROOT) -> Iterator[str]:
    """Yield a notice with all arguments of vLLM that may change the distribution from which tokens are sampled."""
    known = tuple(_HARMLESS_VLLM_ARGUMENTS.split())
    unknown = {name: value for name, value in config.vllm_args.items() if not name.replace("-", "_").startswith(known)}
    if unknown:
        named = ", ".join(f"{at.vllm_args[name]} ({_format_value(name, value)})" for name, value in unknown.items())
        yield (
            f"the trainer computes without {named}: if tokens are sampled otherwise for it, the importance ratio is biased; watch"
            " mismatch_kl/mean"
        )


def _format_value(name: str, value: object) -> str:
    """Return the beginning of a value as text, without secrets: fields of other programs may contain secrets."""
    text = str(mask_table({name: value})[name])
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
