"""Checks the configuration of one role. `at` is its section in the configuration of a run, for the keys in messages."""

from collections.abc import Iterator, Sequence

from trivet.config.checks.sampling import eval_sampling_problems, run_sampling_problems, sampling_notices
from trivet.config.loading.dump import literal
from trivet.config.loading.findings import ROOT, Key
from trivet.config.sections.bench import BenchConfig
from trivet.config.sections.environment import EnvConfig
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.inference import InferenceConfig
from trivet.config.sections.losses import DefaultLossConfig
from trivet.config.sections.online_eval import OnlineEvalConfig
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.config.sections.sft import SftConfig
from trivet.config.sections.shared import RunIdentity
from trivet.config.sections.trainer import TrainerConfig, TrainingConfig
from trivet.config.vllm_keys import VLLM_KEYS


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
