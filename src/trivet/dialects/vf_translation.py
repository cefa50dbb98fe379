"""Translates the dialect of `vf-rl` to the keys of a run. Reads and writes no files; `vf-rl --dry-run` prints the result."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from trivet.config.findings import ROOT, Findings
from trivet.config.keys import find_key
from trivet.config.load import LoadedConfig, environment_entries, load_sources
from trivet.config.schema.environment import parse_environment_id
from trivet.config.schema.inference import VLLM_KEYS
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import TrackingConfig
from trivet.config.schema.vf_rl import VfRLConfig, VfTrainerArgs, VfWandbConfig
from trivet.config.values import Entry
from trivet.key_names import key_name

_ARGS = "trainer.args"
_CHECKPOINT = re.compile(r"(?:.*/)?checkpoint-(\d+)/?")
_EQUAL_KEYS = {
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
"""Key of a run by the key of [trainer.args] that has the same value."""
_LORA_KEYS = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_use_rslora": "rslora",
}
"""Key of the section trainer.model.lora by the key of [trainer.args] that has the same value."""
RUN_NAMES = {
    **{key: f"{_ARGS}.{name}" for name, key in _EQUAL_KEYS.items()},
    **{f"trainer.model.lora.{key}": f"{_ARGS}.{name}" for name, key in _LORA_KEYS.items()},
    **{f"inference.{key}": f"inference.args.{name}" for name, key in VLLM_KEYS.items()},
    **dict.fromkeys(
        ("max_model_len", "inference.model.max_model_len", "trainer.model.seq_len", "orchestrator.seq_len"),
        f"{_ARGS}.max_seq_len",
    ),
    **dict.fromkeys(("ckpt.interval", "ckpt.weights.interval"), f"{_ARGS}.save_steps"),
    "ckpt.resume_step": f"{_ARGS}.resume_from_checkpoint",
    "ckpt.allow_changes": "the variable TRIVET_CKPT__ALLOW_CHANGES",
    "inference_gpu_ids": "inference.gpus",
    "trainer_gpu_ids": "trainer.gpus",
    "inference.vllm_args.": "inference.args.",
    "--trainer.ckpt.resume-step -1": f"--{_ARGS}.resume-from-checkpoint true",
    "--ckpt.resume-step -1": f"--{_ARGS}.resume-from-checkpoint true",
    "ckpt.resume_step = -1": f"{_ARGS}.resume_from_checkpoint = true",
    "--clean": f"--{_ARGS}.overwrite-output-dir true",
}
"""The dialect's names by keys and flags of the run, for messages; see `trivet.key_names`."""


def load_run(
    loaded: LoadedConfig[VfRLConfig], *, environ: Mapping[str, str], run_entries: Sequence[Entry] = ()
) -> LoadedConfig[RLConfig]:
    """Return the run that a `vf-rl` configuration describes, checked like any other.

    Args:
        environ: variables with the prefix TRIVET_ set keys of the run. Values that the user wrote in the dialect win over them,
            defaults of the dialect do not.
        run_entries: values of keys of the run, which win over all others.
    """
    findings = Findings()
    for notice in loaded.notices:
        findings.notice(notice)
    _check(loaded.config, findings)
    findings.raise_problems()
    by_default, written = list[Entry](), list[Entry]()
    for entry, source in translate_entries(loaded):
        (written if source in loaded.origins else by_default).append(entry)
    variables = [entry for entry in environment_entries(RLConfig, environ) if find_key(VfRLConfig, entry.path) is None]
    if any(entry.path == ("trainer", "loss", "type") for entry in run_entries):  # the dialect's defaults are for its own loss
        by_default = [entry for entry in by_default if entry.path[:2] != ("trainer", "loss")]
    return load_sources(RLConfig, [by_default, variables, written, run_entries], findings)


def translate_entries(loaded: LoadedConfig[VfRLConfig]) -> Iterator[tuple[Entry, str]]:
    """Yield the keys of the run that a `vf-rl` configuration sets, each with the key of the dialect that it follows from."""
    for key, value, source in _translate(loaded.config):
        origin = f"{key_name(source)}, {loaded.origins.get(source, 'its default')}"
        yield Entry(path=tuple(key.split(".")), value="None" if value is None else value, origin=origin), source


def _check(config: VfRLConfig, findings: Findings) -> None:
    """Refuse values that only the dialect forbids, and add a notice for each key whose effect differs from verifiers' trainer."""
    args, num_gpus, keys = config.trainer.args, config.trainer.gpus, ROOT.trainer.args
    num_at_once, resume = args.micro_batch_size * num_gpus, args.resume_from_checkpoint
    if args.batch_size % num_at_once:
        findings.refuse(
            f"{keys.batch_size} ({args.batch_size}) must be divisible by {keys.micro_batch_size} * {ROOT.trainer.gpus} "
            f"({args.micro_batch_size} * {num_gpus} = {num_at_once}): "
            f"{args.batch_size} % {num_at_once} = {args.batch_size % num_at_once}; "
            f"try batch_size = {num_at_once * max(1, round(args.batch_size / num_at_once))}"
        )
    if isinstance(resume, str) and _CHECKPOINT.fullmatch(resume) is None:
        findings.refuse(f'{keys.resume_from_checkpoint} must be true, false, or end with checkpoint-N, got "{resume}"')
    if unknown := sorted({*_report_targets(args)} - {"wandb", "none", "all", *TrackingConfig.model_fields}):
        known = ", ".join(f'"{name}"' for name in ("wandb", *TrackingConfig.model_fields))
        findings.refuse(f'{keys.report_to} knows {known} and "none", got "{", ".join(unknown)}"')
    length = f"max_seq_len ({args.max_seq_len})"
    if "micro_batch_size" in args.model_fields_set:
        findings.notice(f"{keys.micro_batch_size}: rows of packed rollouts have at most {length} tokens, however many fit")
    if args.max_prompt_len is not None:
        findings.notice(f"{keys.max_prompt_len}: prompts are not cut; {length} bounds prompt and completion")
    if "/" in config.env.id:
        package = f"the package {_environment_name(config)} of this machine is used; nothing is downloaded"
        findings.notice(f'env.id "{config.env.id}": {package}')


def _environment_name(config: VfRLConfig) -> str:
    """Return the name of the environment's package, without its owner."""
    return parse_environment_id(config.env.id).name


def _translate(config: VfRLConfig) -> Iterator[tuple[str, object, str]]:
    """Yield each value of the run that follows from the dialect: the key of the run, the value, and the key of the dialect."""
    num_inference_gpus, args = config.inference.gpus, config.trainer.args
    yield "model.name", config.model, "model"
    yield "orchestrator.env", [_environment(config)], "env.id"
    max_model_len: tuple[str, object, str] = "max_model_len", args.max_seq_len, f"{_ARGS}.max_seq_len"
    for name, value in config.inference.args.items():
        argument = name.removeprefix("--").replace("-", "_")
        if argument == "max_model_len":
            max_model_len = argument, value, f"inference.args.{name}"
        else:
            yield f"inference.{VLLM_KEYS.get(argument, f'vllm_args.{argument}')}", value, f"inference.args.{name}"
    yield max_model_len
    yield "inference_gpu_ids", list(range(num_inference_gpus)), "inference.gpus"
    yield "trainer_gpu_ids", list(range(num_inference_gpus, num_inference_gpus + config.trainer.gpus)), "trainer.gpus"
    run_keys = {
        **_EQUAL_KEYS,
        **({name: f"trainer.model.lora.{key}" for name, key in _LORA_KEYS.items()} if args.use_lora else {}),
    }
    for name, key in run_keys.items():
        if (value := getattr(args, name)) is not None or name == "max_grad_norm":
            yield key, value, f"{_ARGS}.{name}"
        if key.startswith("orchestrator.sampling.") and value is not None and args.eval_strategy == "steps":
            yield (
                key.replace("orchestrator.", "orchestrator.eval.", 1),
                value,
                f"{_ARGS}.{name}",
            )  # evaluations sample as training does
    for is_set, key, value, name in _derived_values(config):
        if is_set:
            yield key, value, f"{_ARGS}.{name}"


def _environment(config: VfRLConfig) -> dict[str, object]:
    """Return the entry of `orchestrator.env` for the dialect's environment."""
    named = {"name": _environment_name(config)} if "/" in config.env.id else {}
    return {"id": config.env.id, "args": config.env.args, **named}


def _derived_values(config: VfRLConfig) -> list[tuple[bool, str, object, str]]:
    """Return the values of the run that are computed from values of the dialect.

    Each item is: whether the run gets the value, the key of the run, the value, and the key of [trainer.args] for its origin.
    """
    args = config.trainer.args
    run_name = args.run_name or _environment_name(config)
    dtypes: dict[object, str] = {"auto": "auto", True: "bfloat16", False: "float32"}
    resumed = _CHECKPOINT.fullmatch(str(args.resume_from_checkpoint))
    kind, warmup = args.lr_scheduler_type, args.warmup_steps or math.ceil(args.warmup_ratio * args.max_steps)
    warmup_key = "warmup_steps" if args.warmup_steps or not args.warmup_ratio else "warmup_ratio"
    decay_steps = max(0, args.max_steps - warmup) if kind == "linear" else 0
    saves, evaluates = args.save_strategy == "steps", args.eval_strategy == "steps"
    wandb, shows_samples = args.wandb or VfWandbConfig(), args.log_completions
    has_wandb = args.wandb is not None or not {"wandb", "all"}.isdisjoint(_report_targets(args))
    return [
        (True, "output_dir", args.output_dir or f"outputs/{run_name}", "output_dir" if args.output_dir else "run_name"),
        (True, "trainer.model.compute_dtype", dtypes[args.bf16], "bf16"),
        (args.gradient_checkpointing, "trainer.model.ac.freq", 1, "gradient_checkpointing"),
        (args.sync_ref_model, "trainer.loss.reference_update_interval", args.ref_model_sync_steps, "sync_ref_model"),
        (saves, "ckpt.interval", args.save_steps, "save_steps"),
        (saves, "ckpt.weights.interval", args.save_steps, "save_steps"),
        (
            bool(args.resume_from_checkpoint),
            "ckpt.resume_step",
            int(resumed.group(1)) if resumed else -1,
            "resume_from_checkpoint",
        ),
        (evaluates, "orchestrator.eval.interval", args.eval_steps, "eval_steps"),
        (evaluates, "orchestrator.eval.env", [_environment(config)], "eval_strategy"),
        (True, "trainer.scheduler.type", "linear" if kind == "constant_with_warmup" else kind, "lr_scheduler_type"),
        (kind != "constant", "trainer.scheduler.warmup_steps", warmup, warmup_key),
        (kind in ("linear", "constant_with_warmup"), "trainer.scheduler.decay_steps", decay_steps, "lr_scheduler_type"),
        (has_wandb, "wandb.project", wandb.project, "wandb.project"),
        (has_wandb, "wandb.name", wandb.name or run_name, "wandb.name"),
        (has_wandb, "wandb.offline", wandb.offline, "wandb.offline"),
        # The documented trainer logs sample completions with every line of numbers.
        (has_wandb, "wandb.log_extras.interval", args.logging_steps, "logging_steps"),
        (has_wandb, "wandb.log_extras.samples", shows_samples, "log_completions"),
        *((name in _report_targets(args), f"tracking.{name}", {}, "report_to") for name in TrackingConfig.model_fields),
        *((name in _report_targets(args), f"tracking.{name}.name", run_name, "run_name") for name in ("trackio", "mlflow")),
        (shows_samples, "orchestrator.shown_samples.count", args.num_completions_to_print, "num_completions_to_print"),
        (not shows_samples, "orchestrator.shown_samples", None, "log_completions"),
    ]


def _report_targets(args: VfTrainerArgs) -> list[str]:
    """Return `report_to` as a list."""
    return [args.report_to] if isinstance(args.report_to, str) else args.report_to
