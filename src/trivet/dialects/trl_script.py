"""Turns the arguments of TRL's GRPO scripts into a run: first into the keys of `vf-rl`, whose trainer took most names from TRL.

TRL's defaults are written out where they differ. Data set and reward functions are Python of the script, so an environment has to
hold them here. Reads no files.
"""

import math
from collections.abc import Mapping, Sequence

from trivet.config.dump import literal
from trivet.config.keys import find_key
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.config.spellings import current_path
from trivet.dialects.migration import MigratedKey, Migration, translate
from trivet.errors import ConfigError

_DEFAULTS: dict[str, object] = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "temperature": 1.0,
    "gradient_checkpointing": True,
    "use_peft": False,
    "save_steps": 500,
    "logging_steps": 10,
    "log_completions": False,
    "loss_type": "dapo",
    "epsilon": 0.2,
    "scale_rewards": "group",
}
"""Defaults of TRL's GRPOConfig and ModelConfig that are others in `vf-rl`."""
_NAMES = {
    "max_completion_length": "max_tokens",
    "max_prompt_length": "max_prompt_len",
    "lora_r": "lora_rank",
    "use_peft": "use_lora",
    "use_rslora": "lora_use_rslora",
}
"""Names of TRL's that verifiers' trainer changed. The others are equal, or among the spellings of `vf-rl`."""
_NORMALIZATIONS = {"grpo": "sample", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}
"""How TRL's loss types divide, as `trainer.loss.normalization` of the loss `grpo`."""
_IN_ENVIRONMENT = ("dataset_", "reward_")
"""Beginnings of arguments that say what the environment says here."""
_OWN_KEYS = {
    "cispo": {},
    "luspo": {},
    "sapo": {"sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg"},
    "vespo": {f"vespo_{name}": name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
"""The loss types of TRL that are losses of the same name here, with their own arguments, whose defaults are equal."""
_LOSS_KEYS = frozenset({"loss_type", "epsilon", "epsilon_high", "importance_sampling_level", "scale_rewards"}).union(
    *_OWN_KEYS.values()
)


def migrate_script(given: Mapping[str, object], *, env: str) -> Migration:
    """Return the run for the arguments of a script.

    Args:
        given: TRL's arguments by name, with underscores.
        env: the id of the environment that has the script's data set and rewards.
    """
    arguments = {**_DEFAULTS, **given}
    found = Migration(VfRLConfig, [])
    found.lines += [
        MigratedKey(("env", "id"), env, "has the data set and the reward functions of the script"),
        MigratedKey(("inference", "gpus"), 1),
        MigratedKey(("trainer", "gpus"), 1),
    ]
    lengths = [arguments.pop(name) for name in ("max_prompt_length", "max_completion_length")]
    _add(found, "max_seq_len", sum(map(_whole, lengths)), "max_prompt_length + max_completion_length")
    _add(found, "max_tokens", lengths[1], _comment("max_completion_length", given))
    _add_batch(found, arguments)
    if _whole(arguments.get("max_steps", -1)) < 1:
        arguments.pop("max_steps", None)
        found.dropped.append("max_steps is unset, which is num_train_epochs in TRL: a run has 500 steps unless you set it")
    if not arguments["use_peft"]:
        arguments = {name: value for name, value in arguments.items() if not name.startswith("lora_")}
    run_lines = _loss_lines(arguments, given, max_tokens=_whole(lengths[1]))
    for name, value in arguments.items():
        path = ("model",) if name == "model_name_or_path" else ("trainer", "args", _NAMES.get(name, name))
        if name in _LOSS_KEYS:
            continue
        if find_key(VfRLConfig, current_path(VfRLConfig, path)) is None:
            in_environment = "data and rewards are in the environment: `uv run trivet env init NAME` writes one"
            reason = in_environment if name.startswith(_IN_ENVIRONMENT) else "nothing here is like it"
            found.dropped.append(f"{name} = {literal(value)}: {reason}")
        elif value is not None:
            found.lines.append(MigratedKey(current_path(VfRLConfig, path), value, _comment(name, given)))
    return translate(found, run_lines)


def _add(found: Migration, name: str, value: object, comment: str) -> None:
    found.lines.append(MigratedKey(("trainer", "args", name), value, comment))


def _add_batch(found: Migration, arguments: dict[str, object]) -> None:
    """Add the sizes of a batch, which TRL counts for each process. A batch has whole groups of rollouts here."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    per_device, accumulation = (_whole(arguments.pop(name)) for name in names)
    processes, group = _whole(arguments.pop("num_processes", 1)), _whole(arguments.pop("num_generations"))
    batch = per_device * accumulation * processes
    text = f"{' * '.join(names)} * processes ({per_device} * {accumulation} * {processes})"
    if batch % group:
        batch, text = group * math.ceil(batch / group), f"{text}, up to whole groups"
    _add(found, "rollouts_per_example", group, "was num_generations")
    _add(found, "batch_size", batch, f"was {text}")
    _add(found, "micro_batch_size", math.gcd(batch, per_device), "was per_device_train_batch_size")


def _loss_lines(arguments: Mapping[str, object], given: Mapping[str, object], *, max_tokens: int) -> Sequence[MigratedKey]:
    """Return the keys of the run for TRL's loss and its scale of rewards, which `vf-rl` cannot say."""
    low = arguments["epsilon"]
    high = arguments.get("epsilon_high") or low
    loss_type = str(arguments["loss_type"])
    is_sequence = arguments.get("importance_sampling_level") == "sequence" and loss_type not in ("luspo", "sapo", "vespo")
    kind = "gspo" if is_sequence else loss_type if loss_type in _OWN_KEYS else "grpo"
    values: dict[str, tuple[object, str]] = {"type": (kind, _comment("loss_type", given))}
    values |= {ours: (given[name], _comment(name, given)) for name, ours in _OWN_KEYS.get(kind, {}).items() if name in given}
    if not _OWN_KEYS.get(kind):
        values["clip_high"] = high, _comment("epsilon_high" if arguments.get("epsilon_high") else "epsilon", given)
    if kind in ("grpo", "gspo", "luspo"):
        values["clip_low"] = low, _comment("epsilon", given)
    if kind == "grpo":
        values["normalization"] = _NORMALIZATIONS.get(loss_type, "token"), f"loss_type {loss_type}"
    if values.get("normalization", ("",))[0] == "constant":
        values["normalization_length"] = max_tokens, "was max_completion_length"
    is_scaled = str(arguments["scale_rewards"]).lower() not in ("false", "none")
    advantage = MigratedKey(
        ("orchestrator", "advantage", "type"), "std_norm" if is_scaled else "default", _comment("scale_rewards", given)
    )
    return [*(MigratedKey(("trainer", "loss", name), *value) for name, value in values.items()), advantage]


def _comment(name: str, given: Mapping[str, object]) -> str:
    return f"was {name}" if name in given else f"{name}, TRL's default"


def _whole(value: object) -> int:
    """Return a number that a command line may have given as text."""
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError(
            f"numbers of steps, tokens, processes and rollouts must be whole numbers, got {literal(value)}"
        ) from None
