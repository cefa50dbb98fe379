"""Checks over several keys of a validated configuration, with the arithmetic shown, before anything is started.

Every check is a function of values. What looks at files is apart (`file_problems`): a configuration can be read where
the model is not.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from trivet.config.base import Section
from trivet.config.dump import literal
from trivet.config.environment import EnvConfig
from trivet.config.evaluation import EvalConfig
from trivet.config.findings import Findings
from trivet.config.inference import InferenceConfig
from trivet.config.keys import Shape, all_keys
from trivet.config.layout import RunLayout
from trivet.config.lora import LoRAConfig
from trivet.config.losses import DefaultLossConfig
from trivet.config.model import DebugModelConfig, TrainerModelConfig
from trivet.config.model_files import choose_targets, find_linear_modules
from trivet.config.online_eval import OnlineEvalConfig
from trivet.config.orchestrator import OrchestratorConfig
from trivet.config.rl import RLConfig
from trivet.config.sampling import EvalSamplingConfig, RequestSamplingConfig, SamplingConfig
from trivet.config.sft import SftConfig
from trivet.config.sft_checks import data_problems, sft_problems
from trivet.config.shared import RunIdentity
from trivet.config.trainer import TrainerConfig, TrainingConfig
from trivet.errors import ConfigError

BIASING_KEYS = ("min_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling keys that change the distribution in a way that the trainer's log-probabilities do not follow."""

VLLM_NAMES = {
    "model": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "enforce_eager": "model.enforce_eager",
    "trust_remote_code": "model.trust_remote_code",
    "enable_auto_tool_choice": "model.enable_auto_tool_choice",
    "tool_call_parser": "model.tool_call_parser",
    "reasoning_parser": "model.reasoning_parser",
    "tensor_parallel_size": "parallel.tp",
    "data_parallel_size": "parallel.dp",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_cpu_loras": "max_cpu_loras",
    "max_lora_rank": "max_lora_rank",
    "seed": "seed",
    "host": "server.host",
    "port": "server.port",
}
"""vLLM engine arguments that have a key of ours."""

LOCAL_ROOTS = ("models", "outputs")
"""First parts of a name that mean a directory of this project, even before it exists."""


def check(config: Section, findings: Findings) -> None:
    """Check everything that concerns more than one key of `config`."""
    if isinstance(config, RLConfig):
        _extend(findings, _rl_problems(config), _rl_notices(config))
    elif isinstance(config, OrchestratorConfig):
        _extend(findings, orchestrator_problems(config), _orchestrator_notices(config))
    elif isinstance(config, TrainingConfig):
        _extend(findings, training_problems(config), iter(()))
        if isinstance(config, SftConfig):
            _extend(findings, sft_problems(config), iter(()))
    elif isinstance(config, InferenceConfig):
        _extend(findings, inference_problems(config), iter(()))
    elif isinstance(config, EvalConfig):
        _extend(findings, _offline_problems(config), iter(()))
        _extend(findings, _name_problems(config.env, "env"), iter(()))
        _extend(findings, _eval_sampling_problems(config.sampling, config.env, ""), iter(()))


def _extend(findings: Findings, problems: Iterator[str], notices: Iterator[str]) -> None:
    for problem in problems:
        findings.refuse(problem)
    for notice in notices:
        findings.notice(notice)


def _rl_problems(config: RLConfig) -> Iterator[str]:
    yield from training_problems(config.trainer, "trainer.")
    if config.trainer.bench is not None:
        return  # the trainer alone is started
    if config.trainer.data.fake is not None:
        yield "trainer.data.fake trains without orchestrator and servers: give it to `uv run trainer` as data.fake"
    if config.trainer.data.replay is not None:
        yield (
            f"trainer.data.replay ({config.trainer.data.replay}) trains without orchestrator and servers: give it to"
            " `uv run trainer` as data.replay"
        )
    yield from _layout_problems(config)
    yield from orchestrator_problems(config.orchestrator, "orchestrator.")
    if config.inference is not None:
        yield from inference_problems(config.inference, "inference.")
        yield from _length_problems(config, config.inference)
        yield from _adapter_problems(config.trainer.model.lora, config.inference)
        tp, num_gpus = config.inference.parallel.tp, len(config.inference_gpu_ids)
        if num_gpus % tp:
            yield (
                f"inference_gpu_ids names {num_gpus} GPUs, which must be divisible by inference.parallel.tp ({tp}):"
                f" {num_gpus} % {tp} = {num_gpus % tp}"
            )
    yield from _port_problems(config)
    yield from _teacher_problems(config)
    for key, ids in (("inference_gpu_ids", config.inference_gpu_ids), ("trainer_gpu_ids", config.trainer_gpu_ids)):
        if len(set(ids)) != len(ids) or not ids:
            yield f"{key} must name at least one GPU and each once, got {ids}"
    trainer_len, orchestrator_len = config.trainer.model.seq_len, config.orchestrator.seq_len
    if trainer_len < orchestrator_len:
        yield (
            f"trainer.model.seq_len ({trainer_len}) must be >= orchestrator.seq_len ({orchestrator_len}), which packs rows of"
            f" that length; raise trainer.model.seq_len, or set seq_len for both"
        )


def _layout_problems(config: RLConfig) -> Iterator[str]:
    """Of the trainer's model: over which ranks it lies, and whether it is the one that is served."""
    model, num_gpus = config.trainer.model, len(config.trainer_gpu_ids)
    if num_gpus % model.dp_replicate:
        yield (
            f"trainer.model.dp_replicate ({model.dp_replicate}) must divide the GPUs of trainer_gpu_ids ({num_gpus}):"
            f" {num_gpus} % {model.dp_replicate} = {num_gpus % model.dp_replicate}"
        )
    if model.debug != DebugModelConfig():
        yield (
            "trainer.model.debug makes a model that servers do not have: they load all of model.name; use it with"
            " `uv run trainer` and data.replay, or with `uv run sft`, or save such a model and give its directory as model.name"
        )


def _port_problems(config: RLConfig) -> Iterator[str]:
    if config.trainer.metrics_server is None:
        return
    port = config.trainer.metrics_server.port
    others = {"trainer.rollout_transport.port": config.trainer.rollout_transport.port}
    if config.inference is not None:
        others["inference.server.port"] = config.inference.server.port
    if config.teacher_inference is not None:
        others["teacher_inference.server.port"] = config.teacher_inference.server.port
    for key, taken in others.items():
        if port == taken:
            yield f"trainer.metrics_server.port ({port}) is {key} too; set another, or 0 for any that is free"


def _teacher_problems(config: RLConfig) -> Iterator[str]:
    if config.trainer.loss.needs_teacher and config.orchestrator.teacher_model is None:
        yield (
            "trainer.loss.teacher_tau is above 0 and there is no teacher: set orchestrator.teacher_model.model.name, and"
            " teacher_gpu_ids for a server that the run starts, or orchestrator.teacher_model.client.base_url for one that runs"
        )
    if config.teacher_inference is not None:
        yield from inference_problems(config.teacher_inference, "teacher_inference.")


def _teacher_notices(config: RLConfig) -> Iterator[str]:
    if config.orchestrator.teacher_model is None:
        return
    loss = config.trainer.loss
    if not loss.needs_teacher and loss.type != "custom":
        yield (
            "orchestrator.teacher_model is asked about every sample and nothing is learnt from it: trainer.loss.teacher_tau is"
            ' 0, or the loss is not of type "default"'
        )
    if loss.needs_teacher and config.orchestrator.buffer.online_difficulty_filtering:
        yield (
            "orchestrator.buffer.online_difficulty_filtering leaves out groups of equal rewards, which the teacher could still"
            " teach"
        )
    if config.orchestrator.sampling.temperature not in (None, 1.0):
        yield (
            f"orchestrator.sampling.temperature is {config.orchestrator.sampling.temperature}, and the teacher's"
            " log-probabilities are of temperature 1: the policy at that temperature is pulled towards them"
        )
    taught, seq_len = config.teacher_inference, config.orchestrator.seq_len
    if taught is not None and taught.model.max_model_len is not None and taught.model.max_model_len <= seq_len:
        yield (
            f"teacher_inference.model.max_model_len ({taught.model.max_model_len}) <= orchestrator.seq_len ({seq_len}): the"
            " teacher refuses samples of that length or more, and their groups fail"
        )


def _length_problems(config: RLConfig, inference: InferenceConfig) -> Iterator[str]:
    max_tokens, max_model_len = config.orchestrator.sampling.max_tokens, inference.model.max_model_len
    if max_tokens is not None and max_model_len is not None and max_tokens >= max_model_len:
        yield (
            f"orchestrator.sampling.max_tokens ({max_tokens}) must be < inference.model.max_model_len ({max_model_len}):"
            f" the prompt needs room too, and the server would refuse every request; lower the first or raise the second"
        )


def _adapter_problems(lora: LoRAConfig | None, inference: InferenceConfig) -> Iterator[str]:
    if lora is None:
        return
    if not inference.enable_lora:
        yield "inference.enable_lora must be true with trainer.model.lora: what is published are adapters; remove the key"
    if inference.max_lora_rank < lora.rank:
        yield (
            f"inference.max_lora_rank ({inference.max_lora_rank}) must be >= trainer.model.lora.rank ({lora.rank});"
            f" remove inference.max_lora_rank"
        )
    if lora.modules_to_save:
        yield (
            f"trainer.model.lora.modules_to_save ({literal(lora.modules_to_save)}) cannot be served: servers load low-rank"
            f" adapters alone; remove it, or train all weights (without trainer.model.lora)"
        )


def training_problems(config: TrainingConfig, prefix: str = "") -> Iterator[str]:
    schedule = config.scheduler
    if schedule.type != "constant":
        if config.max_steps is None and not isinstance(config, SftConfig):
            yield f'{prefix}scheduler.type "{schedule.type}" decays until the last step: set {_shared(prefix)}max_steps'
        if schedule.min_lr > config.optim.lr:
            yield f"{prefix}scheduler.min_lr ({schedule.min_lr}) must be <= {prefix}optim.lr ({config.optim.lr})"
    if config.trace_path is not None and config.max_steps is not None and config.max_steps < 3:
        yield f"{prefix}trace_path traces the third and fourth step, and {_shared(prefix)}max_steps is {config.max_steps}; raise it"
    if isinstance(config, TrainerConfig) and config.data.fake is not None and config.data.replay is not None:
        yield f"{prefix}data.fake and {prefix}data.replay are two sources of batches; remove one"
    if isinstance(config, TrainerConfig) and isinstance(config.loss, DefaultLossConfig):
        loss = config.loss
        for name in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(loss, f"{name}_low"), getattr(loss, f"{name}_high")
            if low >= high:
                yield (
                    f"{prefix}loss.{name}_low ({low}) must be < {prefix}loss.{name}_high ({high}): no token would be trained on"
                )


def orchestrator_problems(config: OrchestratorConfig, prefix: str = "") -> Iterator[str]:
    batch, group = config.batch_size, config.rollouts_per_example
    if batch % group:
        below = batch - batch % group
        tries = f"{below} or {below + group}" if below else f"{group}"
        yield (
            f"{prefix}batch_size ({batch}) must be divisible by {prefix}rollouts_per_example ({group}):"
            f" {batch} % {group} = {batch % group}; try {tries}"
        )
    if config.max_concurrent is not None and config.max_concurrent < group:
        yield (
            f"{prefix}max_concurrent ({config.max_concurrent}) must be >= {prefix}rollouts_per_example ({group}):"
            f" a group is in flight as a whole; try {group}"
        )
    if group < 2 and config.advantage.needs_a_group:
        yield (
            f'{prefix}rollouts_per_example must be >= 2 for advantage "{config.advantage.type}", got {group};'
            f' raise it (one rollout has no others to be compared with) or set {prefix}advantage = "None"'
        )
    if config.max_async_level > config.max_off_policy_steps:
        yield (
            f"{prefix}max_async_level ({config.max_async_level}) must be <= {prefix}max_off_policy_steps"
            f" ({config.max_off_policy_steps}): a rollout that lags as far as allowed would be dropped as stale"
        )
    if config.deterministic:
        needs = {
            "strict_async_level": (config.strict_async_level, True),
            "oversampling_factor": (config.oversampling_factor, 1.0),
        }
        for key, (value, needed) in needs.items():
            if value != needed:
                yield f"{prefix}deterministic = true needs {prefix}{key} = {literal(needed)}, got {literal(value)}; set it"
        if config.sampling.seed is None:
            yield f"{prefix}deterministic = true needs {prefix}sampling.seed, which is not set; set it to any whole number"
    yield from _name_problems(config.env, f"{prefix}env")
    yield from _ratio_problems(config, prefix)
    yield from _run_sampling_problems(config, prefix)
    if config.eval is not None:
        yield from _eval_problems(config, config.eval, f"{prefix}eval")


def _eval_problems(config: OrchestratorConfig, evals: OnlineEvalConfig, name: str) -> Iterator[str]:
    yield from _name_problems(evals.env, f"{name}.env")
    yield from _eval_sampling_problems(evals.sampling, evals.env, name)
    trained = {env.label: env for env in config.env}
    for index, env in enumerate(evals.env):
        taken = trained.get(config.pool_name(env))
        if taken is not None and taken.program != env.program:
            yield (
                f'the workers of {name}.env.{index} would be called "{taken.label}" like an environment that is trained on;'
                f" set another name in {name}.env.{index}"
            )


def _ratio_problems(config: OrchestratorConfig, prefix: str) -> Iterator[str]:
    ratios = config.buffer.env_ratios
    if ratios is not None and len(ratios) != len(config.env):
        labels = ", ".join(env.label for env in config.env)
        yield (
            f"{prefix}buffer.env_ratios has {len(ratios)} numbers for {len(config.env)} environments ({labels}):"
            f" {len(ratios)} != {len(config.env)}; give one number per [[{prefix}env]], in their order"
        )


def _run_sampling_problems(config: OrchestratorConfig, prefix: str) -> Iterator[str]:
    """Of the run's sampling, and of each environment's over it; what is wrong with the run's is said once."""
    problems = [*_schedule_problems(config, config.sampling, f"{prefix}sampling")]
    problems += sampling_problems(config.sampling, f"{prefix}sampling")
    yield from problems
    if problems:
        return
    for index, env in enumerate(config.env):
        merged, name = env.sampling.over(config.sampling), f"{prefix}env.{index}.sampling"
        yield from _schedule_problems(config, merged, name)
        yield from sampling_problems(merged, name)


def _eval_sampling_problems(sampling: EvalSamplingConfig, envs: Sequence[EnvConfig], name: str) -> Iterator[str]:
    """Of evaluations' sampling, and of each environment's over it; what is wrong with the first is said once."""
    prefix = f"{name}." if name else ""
    problems = [*sampling_problems(sampling, f"{prefix}sampling")]
    yield from problems
    for index, env in enumerate(envs):
        of_env = f"{prefix}env.{index}.sampling"
        if env.sampling.temp_scheduler is not None:
            yield f"{of_env}.temp_scheduler changes with the step, and evaluations are compared; set {of_env}.temperature"
        elif not problems:
            yield from sampling_problems(env.sampling.over(sampling), of_env)


def _offline_problems(config: EvalConfig) -> Iterator[str]:
    if config.steps is not None and (not config.steps or min(config.steps) < 1):
        yield f"steps must name steps >= 1, got {literal(config.steps)}; the start model is eval_base"
    if config.resume_path is not None and config.output_dir is not None:
        yield (
            f"resume_path ({config.resume_path}) says where results are, and output_dir ({config.output_dir}) too;"
            f" remove output_dir"
        )
    if config.retry.wait_min > config.retry.wait_max:
        yield f"retry.wait_min ({config.retry.wait_min}) must be <= retry.wait_max ({config.retry.wait_max})"


def _schedule_problems(config: OrchestratorConfig, sampling: SamplingConfig, name: str) -> Iterator[str]:
    schedule = sampling.temp_scheduler
    if schedule is not None and schedule.total_steps is None and config.max_steps is None:
        yield f"{name}.temp_scheduler ends after max_steps, which is not set: set total_steps in it, or max_steps"


def sampling_problems(sampling: SamplingConfig | EvalSamplingConfig, name: str) -> Iterator[str]:
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


def inference_problems(config: InferenceConfig, prefix: str = "") -> Iterator[str]:
    for name, value in config.vllm_args.items():
        if key := VLLM_NAMES.get(name.replace("-", "_")):
            yield f"{prefix}vllm_args.{name} ({value}) has a key of its own: set {prefix}{key} instead"
    if config.enable_lora and config.max_cpu_loras < config.max_loras:
        yield (
            f"{prefix}max_cpu_loras ({config.max_cpu_loras}) must be >= {prefix}max_loras ({config.max_loras}): what is in use"
            f" stays loaded; raise the first or lower the second"
        )


def _name_problems(envs: Sequence[EnvConfig], name: str) -> Iterator[str]:
    labels = [env.label for env in envs]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        places = " and ".join(f"{name}.{index}" for index, env in enumerate(envs) if env.label == label)
        yield f'{places} are both called "{label}", which names them in logs and metrics; set a different name in each'


def _rl_notices(config: RLConfig) -> Iterator[str]:
    if config.trainer.bench is not None:
        return
    if config.max_steps is None:
        yield "max_steps is not set: the run goes on until it is stopped"
    yield from _sampling_notices(config.orchestrator, "orchestrator.")
    yield from _teacher_notices(config)
    tokenizer = config.trainer.tokenizer.name
    if tokenizer is not None and tokenizer != config.trainer.model.name:
        yield (
            f"trainer.tokenizer.name ({tokenizer}) is saved with the weights; generation starts with the tokenizer of"
            f" model.name ({config.trainer.model.name})"
        )
    if config.inference is None:
        return
    yield from _length_notices(config.orchestrator.seq_len, config.inference.model.max_model_len)
    served, computed = config.inference.model.dtype, config.trainer.model.compute_dtype
    if served not in ("auto", computed):
        yield (
            f"inference.model.dtype ({served}) differs from trainer.model.compute_dtype ({computed}): their log-probabilities"
            f" will differ by rounding"
        )


def _length_notices(seq_len: int, max_model_len: int | None) -> Iterator[str]:
    if max_model_len is not None and max_model_len > seq_len:
        yield (
            f"inference.model.max_model_len ({max_model_len}) > orchestrator.seq_len ({seq_len}): the server may generate"
            f" samples of up to {max_model_len} tokens, of which the first {seq_len} are trained on"
        )
    elif max_model_len is not None and max_model_len < seq_len:
        yield (
            f"inference.model.max_model_len ({max_model_len}) < orchestrator.seq_len ({seq_len}): the server ends a completion"
            f" when it and its prompt reach {max_model_len} tokens"
        )


def _orchestrator_notices(config: OrchestratorConfig) -> Iterator[str]:
    if config.run.id != RunIdentity().id:
        return  # started by the launcher, which has said it
    if config.max_steps is None:
        yield "max_steps is not set: the orchestrator goes on until it is stopped"
    yield from _sampling_notices(config, "")


def _sampling_notices(config: OrchestratorConfig, prefix: str) -> Iterator[str]:
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


def _shared(prefix: str) -> str:
    """Prefix of a value that a whole run sets once for all roles."""
    return "" if prefix == "trainer." else prefix


def file_problems(config: Section) -> Iterator[str]:
    """What `config` names and this machine does not have."""
    if isinstance(config, EvalConfig):
        if config.weights_dir is not None and not config.weights_dir.is_dir() and not config.watcher:
            yield f"weights_dir ({config.weights_dir}) is not a directory"
        return
    if isinstance(config, TrainerConfig) and (replay := config.data.replay) is not None:
        if not RunLayout(replay).batches.is_dir():
            yield f"data.replay ({replay}) holds no batches/: give the output_dir of a run with trainer.data.record = true"
        elif replay.resolve() == config.output_dir.resolve():
            yield f"data.replay ({replay}) is output_dir: a replay is a run of its own, choose another output_dir"
    if isinstance(config, SftConfig) and config.bench is None:
        yield from data_problems(config)
    trainer = config.trainer if isinstance(config, RLConfig) else config
    if isinstance(trainer, TrainingConfig):
        yield from _target_problems(trainer.model, "trainer." if trainer is not config else "")
    seen: set[str] = set()
    for path, key in all_keys(type(config)):
        if key.shape is Shape.VALUE and path[-1] == "name" and path[-2:-1] in (("model",), ("tokenizer",)):
            name = _value_at(config, path)
            if isinstance(name, str) and name not in seen:
                seen.add(name)
                yield from _model_problems(name, ".".join(str(part) for part in path), is_model=path[-2] == "model")


def _target_problems(model: TrainerModelConfig, prefix: str) -> Iterator[str]:
    """Modules that the files of the model show not to exist; files that are not here are looked at when the model is built."""
    if model.lora is None:
        return
    names = find_linear_modules(model.name)
    if names:
        try:
            choose_targets(model.lora.target_modules, names=names)
        except ConfigError as exc:
            yield f"{prefix}{exc}"


def _value_at(config: Section, path: tuple[str | int, ...]) -> object:
    value: object = config
    for part in path:
        value = getattr(value, str(part), None)
    return value


def _model_problems(name: str, key: str, *, is_model: bool) -> Iterator[str]:
    path = Path(name).expanduser()
    parts = name.split("/")
    looks_local = name.startswith((".", "/", "~")) or len(parts) > 2 or parts[0] in LOCAL_ROOTS or path.exists()
    if not looks_local:
        return
    if not path.is_dir():
        yield f"{key} ({name}) is not a directory; give a model directory, or a Hugging Face name such as Qwen/Qwen3-0.6B"
    elif is_model and not (path / "config.json").is_file():
        yield f"{key} ({name}) has no config.json: it is not a model directory"
