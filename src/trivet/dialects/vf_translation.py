"""Translates the dialect of `vf-rl` to the keys of a run. Pure; the command `vf-rl --dry-run` prints the result."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trivet.config.environment_ids import parse_environment_id
from trivet.config.findings import Findings, Key, NameOf
from trivet.config.keys import find_key
from trivet.config.load import LoadedConfig, environment_entries, load_sources
from trivet.config.schema.inference import VLLM_KEYS
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.vf_rl import VfRLConfig, VfTrainerArgs
from trivet.config.sources import Entry

_ARGS = "trainer.args"
_CHECKPOINT = re.compile(r"(?:.*/)?checkpoint-(\d+)/?")
_SAME_MEANING = {
    "learning_rate": "trainer.optim.lr",
    "weight_decay": "trainer.optim.weight_decay",
    "adam_beta1": "trainer.optim.betas1",
    "adam_beta2": "trainer.optim.betas2",
    "adam_epsilon": "trainer.optim.eps",
    "max_grad_norm": "trainer.optim.max_norm",
    "batch_size": "orchestrator.batch_size",
    "rollouts_per_example": "orchestrator.rollouts_per_example",
    "max_steps": "max_steps",
    "max_seq_len": "seq_len",
    "max_tokens": "orchestrator.sampling.max_tokens",
    "temperature": "orchestrator.sampling.temperature",
    "top_p": "orchestrator.sampling.top_p",
    "top_k": "orchestrator.sampling.top_k",
    "min_p": "orchestrator.sampling.min_p",
    "repetition_penalty": "orchestrator.sampling.repetition_penalty",
    "presence_penalty": "orchestrator.sampling.presence_penalty",
    "frequency_penalty": "orchestrator.sampling.frequency_penalty",
    "mask_ratio_low": "trainer.loss.token_mask_low",
    "mask_ratio_high": "trainer.loss.token_mask_high",
    "mask_truncated_completions": "orchestrator.mask_truncated_completions",
    "zero_truncated_completions": "orchestrator.zero_truncated_completions",
    "beta": "trainer.loss.beta",
    "num_iterations": "trainer.num_iterations",
    "num_batches_ahead": "max_async_level",
    "max_concurrent": "orchestrator.max_concurrent",
    "generation_timeout": "orchestrator.rollout_timeout_s",
    "seed": "seed",
    "overwrite_output_dir": "clean",
    "save_total_limit": "ckpt.keep_last",
    "vllm_server_host": "inference.server.host",
    "vllm_server_port": "inference.server.port",
    "vllm_server_timeout": "orchestrator.client.wait_for_ready_timeout",
}
"""Key of [trainer.args] to the run's key that has its value as it is."""
_SAMPLING = "orchestrator.sampling."
_LORA = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_use_rslora": "rslora",
}
"""Key of [trainer.args] to the key below trainer.model.lora that has its value as it is."""
RUN_KEYS = {
    **{key: f"{_ARGS}.{name}" for name, key in _SAME_MEANING.items()},
    **{f"trainer.model.lora.{key}": f"{_ARGS}.{name}" for name, key in _LORA.items()},
    **{f"inference.{key}": f"inference.args.{name}" for name, key in VLLM_KEYS.items()},
    **dict.fromkeys(
        ("max_model_len", "inference.model.max_model_len", "trainer.model.seq_len", "orchestrator.seq_len"),
        f"{_ARGS}.max_seq_len",
    ),
    **dict.fromkeys(("ckpt.interval", "ckpt.weights.interval"), f"{_ARGS}.save_steps"),
    "ckpt.resume_step": f"{_ARGS}.resume_from_checkpoint",
    "inference_gpu_ids": "inference.gpus",
    "trainer_gpu_ids": "trainer.gpus",
}
"""Key of the run to the key of the dialect that sets it."""
RUN_NAMES = {
    **RUN_KEYS,
    "--trainer.ckpt.resume-step -1": f"--{_ARGS}.resume-from-checkpoint true",
    "--ckpt.resume-step -1": f"--{_ARGS}.resume-from-checkpoint true",
    "ckpt.resume_step = -1": f"{_ARGS}.resume_from_checkpoint = true",
    "--clean": f"--{_ARGS}.overwrite-output-dir true",
    "ckpt.allow_changes": "the variable TRIVET_CKPT__ALLOW_CHANGES",
}
"""Names of keys and flags of the run in the messages of its processes."""
_VLLM_ARGS = "inference.vllm_args."


def name_in_dialect(key: str) -> str:
    """Return the key of the dialect that sets `key` of the run, or `key` itself if none does."""
    if key.startswith(_VLLM_ARGS):
        return f"inference.args.{key.removeprefix(_VLLM_ARGS)}"
    return RUN_KEYS.get(key, key)


def load_run(
    loaded: LoadedConfig[VfRLConfig],
    *,
    environ: Mapping[str, str],
    run_entries: Sequence[Entry] = (),
    name_of: NameOf = name_in_dialect,
) -> LoadedConfig[RLConfig]:
    """Return the run that a `vf-rl` configuration describes, checked like any other.

    Args:
        loaded: the configuration in the dialect.
        environ: variables with our prefix set keys of the run; what the user wrote in the dialect wins, its defaults do not.
        run_entries: values of the run's own keys, which win over all others.
        name_of: returns the name by which the user knows a key of the run or of the dialect.

    Raises:
        ConfigError: lists every problem, by the names that the user wrote.
    """
    findings = Findings(name_of=name_of)
    for problem in batch_problems(loaded.config, findings.key()):
        findings.refuse(problem)
    findings.raise_problems()
    for notice in (*loaded.notices, *notices_of(loaded.config, findings.key())):
        findings.notice(notice)
    translated = list(translate(loaded, name_of=name_of))
    by_default, written = ([value.entry for value in translated if value.is_written == wanted] for wanted in (False, True))
    variables = [entry for entry in environment_entries(RLConfig, environ) if find_key(VfRLConfig, entry.path) is None]
    if any(entry.path == ("trainer", "loss", "type") for entry in run_entries):  # the dialect's defaults are of another loss
        by_default = [entry for entry in by_default if entry.path[:2] != ("trainer", "loss")]
    return load_sources(RLConfig, [by_default, variables, written, list(run_entries)], findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A value of the dialect as a value of the run."""

    entry: Entry
    """The value at the run's key. Its origin has the user's name of the dialect's key, and where that was written."""
    is_written: bool
    """True if the user wrote it; else it is the dialect's default."""


def translate(loaded: LoadedConfig[VfRLConfig], *, name_of: NameOf) -> Iterator[Translated]:
    """Yield every value of the dialect as a value of the run. A dry run prints its origin, so the name in it is final."""

    def entry(key: str, value: object, source: str) -> Translated:
        origin = f"{name_of(source)}, {loaded.origins.get(source, 'its default')}"
        path = tuple(key.split("."))
        return Translated(
            entry=Entry(path=path, value="None" if value is None else value, origin=origin),
            is_written=source in loaded.origins,
        )

    config = loaded.config
    args = config.trainer.args
    yield entry("model.name", config.model, "model")
    yield entry("orchestrator.env", [_environment(config)], "env.id")
    yield from (
        entry(f"inference.{key}", value, source) for key, value, source in _inference(config) if key != "model.max_model_len"
    )
    yield entry("max_model_len", *_max_model_len(config))
    first = config.inference.gpus
    yield entry("inference_gpu_ids", list(range(first)), "inference.gpus")
    yield entry("trainer_gpu_ids", list(range(first, first + config.trainer.gpus)), "trainer.gpus")
    for name, key in _SAME_MEANING.items():
        value = getattr(args, name)
        if value is not None or name == "max_grad_norm":
            yield entry(key, value, f"{_ARGS}.{name}")
    if args.use_lora:
        for name, key in _LORA.items():
            if (value := getattr(args, name)) is not None:
                yield entry(f"trainer.model.lora.{key}", value, f"{_ARGS}.{name}")
    for key, value, name in _derived(config):
        yield entry(key, value, f"{_ARGS}.{name}")


def batch_problems(config: VfRLConfig, at: Key) -> Iterator[str]:
    """Yield the problems of batch settings that the dialect alone restricts."""
    args, num_gpus, keys = config.trainer.args, config.trainer.gpus, at.trainer.args
    at_once = args.micro_batch_size * num_gpus
    if args.batch_size % at_once:
        yield (
            f"{keys.batch_size} ({args.batch_size}) must be divisible by {keys.micro_batch_size} * {at.trainer.gpus} "
            f"({args.micro_batch_size} * {num_gpus} = {at_once}): {args.batch_size} % {at_once} = {args.batch_size % at_once}; "
            f"try batch_size = {at_once * max(1, round(args.batch_size / at_once))}"
        )
    if isinstance(args.resume_from_checkpoint, str) and _CHECKPOINT.fullmatch(args.resume_from_checkpoint) is None:
        yield f'{keys.resume_from_checkpoint} must be true, false, or end with checkpoint-N, got "{args.resume_from_checkpoint}"'
    unknown = sorted({*_reports(args)} - {"wandb", "none", "all"})
    if unknown:
        yield f'{keys.report_to} knows "wandb" and "none", got "{", ".join(unknown)}"'


def notices_of(config: VfRLConfig, at: Key) -> Iterator[str]:
    """Yield a notice for each key whose effect here differs from the dialect's."""
    args, keys = config.trainer.args, at.trainer.args
    written = args.model_fields_set
    if "micro_batch_size" in written:
        yield (
            f"{keys.micro_batch_size}: rows of packed rollouts have at most max_seq_len ({args.max_seq_len}) tokens, however "
            "many rollouts fit"
        )
    if args.max_prompt_len is not None:
        yield f"{keys.max_prompt_len}: prompts are not cut; max_seq_len ({args.max_seq_len}) bounds prompt and completion"
    if "/" in config.env.id:
        yield f'env.id "{config.env.id}": the package {environment_name(config)} of this machine is used; nothing is downloaded'


def _environment(config: VfRLConfig) -> dict[str, object]:
    named = {"name": environment_name(config)} if "/" in config.env.id else {}
    return {"id": config.env.id, "args": config.env.args, **named}


def environment_name(config: VfRLConfig) -> str:
    """Return the name of the environment's package, without its owner."""
    return parse_environment_id(config.env.id).name


def run_name(config: VfRLConfig) -> str:
    """Return the name that the run's directory and its W&B run have."""
    return config.trainer.args.run_name or environment_name(config)


def _inference(config: VfRLConfig) -> Iterator[tuple[str, object, str]]:
    for name, value in config.inference.args.items():
        argument = name.removeprefix("--").replace("-", "_")
        yield VLLM_KEYS.get(argument, f"vllm_args.{argument}"), value, f"inference.args.{name}"


def _max_model_len(config: VfRLConfig) -> tuple[object, str]:
    """Return the longest context, and the key of the dialect that sets it."""
    written = ((value, source) for key, value, source in _inference(config) if key == "model.max_model_len")
    return next(written, (config.trainer.args.max_seq_len, f"{_ARGS}.max_seq_len"))


def _derived(config: VfRLConfig) -> Iterator[tuple[str, object, str]]:
    """Yield keys whose value here is made of other values there: key, value, and the name it follows from."""
    args = config.trainer.args
    yield "output_dir", args.output_dir or f"outputs/{run_name(config)}", "output_dir" if args.output_dir else "run_name"
    yield from _schedule(args)
    if args.bf16 == "auto":
        yield "trainer.model.compute_dtype", "auto", "bf16"
    else:
        yield "trainer.model.compute_dtype", "bfloat16" if args.bf16 else "float32", "bf16"
    if args.gradient_checkpointing:
        yield "trainer.model.ac.freq", 1, "gradient_checkpointing"
    if args.sync_ref_model:
        yield "trainer.loss.reference_update_interval", args.ref_model_sync_steps, "sync_ref_model"
    if args.save_strategy == "steps":
        yield "ckpt.interval", args.save_steps, "save_steps"
        yield "ckpt.weights.interval", args.save_steps, "save_steps"
    if args.resume_from_checkpoint:
        named = _CHECKPOINT.fullmatch(str(args.resume_from_checkpoint))
        yield "ckpt.resume_step", int(named.group(1)) if named else -1, "resume_from_checkpoint"
    if args.eval_strategy == "steps":
        yield "orchestrator.eval.interval", args.eval_steps, "eval_steps"
        yield "orchestrator.eval.env", [_environment(config)], "eval_strategy"
        for name, key in _SAME_MEANING.items():  # measured as it is trained
            if key.startswith(_SAMPLING) and (value := getattr(args, name)) is not None:
                yield f"orchestrator.eval.sampling.{key.removeprefix(_SAMPLING)}", value, name
    yield from _shown_rollouts(config)


def _shown_rollouts(config: VfRLConfig) -> Iterator[tuple[str, object, str]]:
    """Yield what W&B and the console show; like `_derived`."""
    args = config.trainer.args
    if args.wandb is not None or not {"wandb", "all"}.isdisjoint(_reports(args)):
        wandb = args.wandb
        yield "wandb.project", wandb.project if wandb else "trivet", "wandb.project"
        yield "wandb.name", (wandb.name if wandb else None) or run_name(config), "wandb.name"
        yield "wandb.offline", wandb.offline if wandb else False, "wandb.offline"
        # The documented trainer logs sample completions with every line of numbers.
        yield "wandb.log_extras.interval", args.logging_steps, "logging_steps"
        yield "wandb.log_extras.samples", args.log_completions, "log_completions"
    if not args.log_completions:
        yield "orchestrator.shown_samples", None, "log_completions"
    else:
        yield "orchestrator.shown_samples.count", args.num_completions_to_print, "num_completions_to_print"


def _schedule(args: VfTrainerArgs) -> Iterator[tuple[str, object, str]]:
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * args.max_steps)
    source = "warmup_steps" if args.warmup_steps or not args.warmup_ratio else "warmup_ratio"
    match args.lr_scheduler_type:
        case "constant":
            yield "trainer.scheduler.type", "constant", "lr_scheduler_type"
        case "constant_with_warmup":
            yield "trainer.scheduler.type", "linear", "lr_scheduler_type"
            yield "trainer.scheduler.warmup_steps", warmup, source
            yield "trainer.scheduler.decay_steps", 0, "lr_scheduler_type"
        case "linear":
            yield "trainer.scheduler.type", "linear", "lr_scheduler_type"
            yield "trainer.scheduler.warmup_steps", warmup, source
            yield "trainer.scheduler.decay_steps", max(0, args.max_steps - warmup), "lr_scheduler_type"
        case "cosine":
            yield "trainer.scheduler.type", "cosine", "lr_scheduler_type"
            yield "trainer.scheduler.warmup_steps", warmup, source


def _reports(args: VfTrainerArgs) -> list[str]:
    return [args.report_to] if isinstance(args.report_to, str) else args.report_to
