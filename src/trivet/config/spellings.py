"""Translates the spellings of keys in prime-rl and verifiers, past and present, into those of trivet.

A renamed key is accepted with a notice, a removed key is refused with a text that names its replacement, and a key without effect
is dropped with a notice. Existing keys are never changed. The tables contain the keys of a whole run (`orchestrator.group_size`). A
role's own file has the same keys without the role's prefix. The prefixes `eval.` and `vf.`, for the commands `eval` and `vf-rl`,
exist only in these tables.
"""

from collections.abc import Sequence
from dataclasses import replace

from trivet.config.dump import literal
from trivet.config.findings import Findings, Key
from trivet.config.keys import KeyPath, Shape, dotted, find_key
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import VLLM_KEYS, InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import ENV_RESPONSES_ARE_MASKED, VfRLConfig
from trivet.config.tables import as_list, as_table
from trivet.config.values import Entry, Text

ROLE_PREFIXES: dict[type[Section], tuple[str, ...]] = {
    TrainerConfig: ("trainer",),
    SftConfig: ("trainer",),
    OrchestratorConfig: ("orchestrator",),
    InferenceConfig: ("inference",),
    EvalConfig: ("eval",),
    VfRLConfig: ("vf",),
}
"""The prefix that the tables below give the keys of each configuration; a whole run has none."""

_TRAINING_PREFIXES = ("", "trainer.", "orchestrator.")
"""Prefixes of the sections that a run may set for trainer and orchestrator at once, at its top level, or for each role."""
_SHARED_PREFIXES = (*_TRAINING_PREFIXES, "inference.")
"""Prefixes of the sections that a run may set for all roles at once, or for each role."""
_EVAL_PREFIXES = ("eval.", "orchestrator.eval.")
"""Prefixes of evaluations: of the command `eval`, and of evaluations during a run."""


def _with_prefixes(prefixes: Sequence[str], names: Sequence[str], text: str) -> dict[str, str]:
    """Return a table with the value `text` for every combination of a prefix and a name."""
    return {f"{prefix}{name}": text for prefix in prefixes for name in names}


_REASONING_EFFORT = "sampling.extra_body.reasoning_effort"
RENAMED = {
    **dict.fromkeys(("environment", "orchestrator.environment", "orchestrator.train.env"), "orchestrator.env"),
    "orchestrator.train.sampling": "orchestrator.sampling",
    "orchestrator.sampling.max_completion_tokens": "orchestrator.sampling.max_tokens",
    "orchestrator.group_size": "orchestrator.rollouts_per_example",
    **_with_prefixes(
        ["orchestrator.", "orchestrator.train."],
        ["filter_zero_advantages"],
        "orchestrator.buffer.online_difficulty_filtering",
    ),
    "orchestrator.model.client": "orchestrator.client",
    **{
        f"{section}sampling.reasoning_effort": f"{section}{_REASONING_EFFORT}" for section in ("orchestrator.", *_EVAL_PREFIXES)
    },
    "orchestrator.concurrency.max_inflight": "orchestrator.max_concurrent",
    "rollout_transport": "trainer.rollout_transport",
    **{f"{role}weight_broadcast.type": f"{role}weights.transport" for role in _TRAINING_PREFIXES},
    **{f"{role}weight_broadcast.timeout": f"{role}weights.transfer_timeout" for role in _TRAINING_PREFIXES},
    "inference.weight_broadcast.type": "inference.weights_transport",
    **{f"{role}{section}.wandb": f"{role}wandb" for role in _TRAINING_PREFIXES for section in ("monitors", "tracking")},
    **{f"{role}resume.step": f"{role}ckpt.resume_step" for role in _TRAINING_PREFIXES},
    "trainer.enable_router_replay": "trainer.router_replay",
    "trainer.model.experimental.lora": "trainer.model.lora",
    "trainer.model.fused_lm_head_token_chunk_size": "trainer.model.fused_lm_head_chunk_size",
    "trainer.data.seq_len": "trainer.model.seq_len",
    "vf.trainer.run_name": "vf.trainer.args.run_name",
    "vf.trainer.args.num_generations": "vf.trainer.args.rollouts_per_example",
    "vf.trainer.args.per_device_train_batch_size": "vf.trainer.args.micro_batch_size",
    **{
        f"inference.vllm.{argument}": f"inference.{key}"
        for argument, key in VLLM_KEYS.items()
        if argument not in ("host", "port")  # refused by config.check_roles, which names the key
    },
    **{f"{role}.model.rope_scaling.type": f"{role}.model.rope_scaling.rope_type" for role in ("trainer", "inference")},
    **_with_prefixes(["inference.vllm.hf_overrides."], ["rope_scaling", "rope_parameters"], "inference.model.rope_scaling"),
    "inference.vllm": "inference.vllm_args",
    "eval.save.disk.path": "eval.output_dir",
    "eval.eval_base_model": "eval.eval_base",
    "eval.client.extra_body": "eval.sampling.extra_body",
}
"""New beginning of a key by its old beginning. The longest old beginning is replaced, repeatedly until none fits."""

_MEMORY_ADVICE = "remove the key, and for memory use more ranks, or trainer.model.fsdp_cpu_offload on a GPU"
REFUSED = {
    **_with_prefixes(
        _SHARED_PREFIXES,
        ["weight_broadcast"],
        "weights.transport says how policies reach the servers; remove the key",
    ),
    "trainer.max_concurrent_runs": "a trainer trains one model; start a run for each",
    "orchestrator.optim": "set trainer.optim",
    "orchestrator.model.lora": "set trainer.model.lora",
    "orchestrator.bench": "its benchmark is a script: uv run python scripts/bench/orchestrator.py",
    "orchestrator.train.source": "environments are [[orchestrator.env]] with id, name and args",
    "orchestrator.max_inflight_rollouts": "set orchestrator.oversampling_factor (in flight = factor * batch_size)"
    " or orchestrator.max_concurrent",
    "orchestrator.token_batch_size": "batches are counted in rollouts: set orchestrator.batch_size",
    "orchestrator.algo": "set orchestrator.advantage",
    "orchestrator.mask_env_responses": ENV_RESPONSES_ARE_MASKED,
    **_with_prefixes(
        _TRAINING_PREFIXES,
        ["rollout_transport.type"],
        "batches go from orchestrator to trainer over ZeroMQ; remove the key. To keep them as files set"
        " trainer.data.record = true; `uv run trainer` trains on such files again with data.replay",
    ),
    "orchestrator.buffer.skip_verification": "set trainer.loss.adv_tau = 0 to learn from a teacher alone; rewards are computed"
    " and recorded all the same",
    **_with_prefixes(
        _TRAINING_PREFIXES,
        ["events.sign"],
        "events are not signed: `trivet check` compares them with the run's files; remove the key",
    ),
    "run": "the launcher names the run; set output_dir to choose where it is kept",
    "orchestrator.ckpt.wait_for_weights_timeout": "set orchestrator.rollout_transport.timeout_s",
    "resume.dir": "set ckpt.resume_from to the output_dir of the other run",
    "resume": "set ckpt.resume_step; -1 takes the newest committed checkpoint",
    "slurm.template_path": "the script is written by the command; set slurm.pre_run_command, slurm.sbatch_args or slurm.srun_args",
    "slurm.cleanup_grace_period": "set recovery.preemption_grace_s and shutdown_timeout_s",
    "slurm.shared_fs": "the node must see output_dir and this environment; remove the key",
    **_with_prefixes(
        _EVAL_PREFIXES, ["save.hf"], "results stay on this machine: upload evals/ with `hf upload` if others should have them"
    ),
    **_with_prefixes(
        _EVAL_PREFIXES,
        ["save.env_hub"],
        "results stay on this machine: upload evals/ by other means if others should have them",
    ),
    **_with_prefixes(
        _EVAL_PREFIXES, ["per_rollout"], "the rollouts of an example are scored together, for rewards of groups; remove the key"
    ),
    "trainer.model.tp": f"FSDP shards parameters, and no matrix product is split over ranks; {_MEMORY_ADVICE}",
}
"""The text that says what replaced a key, by the beginning of the old key."""

IGNORED = {
    **_with_prefixes(
        [f"{role}weight_broadcast." for role in _SHARED_PREFIXES],
        ["host", "port", "inference_world_size"],
        "servers and trainer find each other by themselves",
    ),
    **_with_prefixes(_SHARED_PREFIXES, ["log.file"], "everything is written to files, in logs/"),
    **_with_prefixes(
        _SHARED_PREFIXES, ["log.vf_level", "log.env_worker_logs"], "what environments log is in logs/env_workers/"
    ),
    **_with_prefixes(_SHARED_PREFIXES, ["log.log_data"], "trainer.data.record keeps batches, rollouts/ has the texts"),
    **_with_prefixes(_TRAINING_PREFIXES, ["wandb.id"], "a run that is resumed goes on as the run that it was"),
    **_with_prefixes(
        ["", "trainer."], ["weight_broadcast.save_sharded"], "ckpt.weights.save_sharded decides it for every policy"
    ),
    **_with_prefixes(_TRAINING_PREFIXES, ["rollout_transport.hwm"], "two batches wait in the trainer at most"),
    "trainer.model.impl": "models are those of transformers",
    "trainer.model.moe_use_grouped_mm": "trainer.model.experts_implementation chooses how experts are multiplied",
    "trainer.tokenizer.trust_remote_code": "model.trust_remote_code counts for the tokenizer too",
    "orchestrator.prime_monitor": "runs are watched by `trivet view`, wandb and metrics_server",
    "orchestrator.client.skip_model_check": "servers are asked which policy they hold, not for a list of models",
    "inference.api_server_count": "one process answers requests",
    **_with_prefixes(_EVAL_PREFIXES, ["save.disk"], "results are always written, to evals/step_N/<env>/ in output_dir"),
    **_with_prefixes(_EVAL_PREFIXES, ["save.stream"], "results are always written as examples finish"),
    "eval.skip_eval_on_resume": "resume_path never repeats what is finished",
    **_with_prefixes(
        _EVAL_PREFIXES, ["reasoning_field"], "thinking is found under each of its usual names, and kept with the message"
    ),
    "orchestrator.eval.retry": "a rollout that a server fails is tried three times, and on another server when its own was lost",
    **_with_prefixes(
        ["", "trainer."], ["ckpt.weights.save_adapter_separately"], "with LoRA the adapter's files are what is published"
    ),
    "trainer.loss_impl": "head and loss are computed together, in chunks of model.fused_lm_head_chunk_size tokens",
    "trainer.data.num_workers": "a batch is read and tokenized in the milliseconds before its step",
    **_with_prefixes(
        ["trainer.val.data."],
        ["batch_size", "micro_batch_size", "pack_function", "shuffle", "num_workers", "seq_len"],
        "the held-out loss is the mean over the whole set, in any order and packing, at model.seq_len",
    ),
    "vf.trainer.args.gradient_accumulation_steps": "batch_size is the number of rollouts of a step",
    "vf.trainer.args.generation_batch_size": "max_concurrent says how many rollouts are in flight",
    "vf.trainer.args.ds3_gather_for_generation": "a server of its own generates",
    "vf.trainer.args.use_liger": "logits are never kept whole",
    "vf.trainer.args.remove_unused_columns": "environments keep what they need",
    "orchestrator.num_train_workers": "packing does not depend on the number of trainer ranks",
    "orchestrator.model.trust_remote_code": "the orchestrator runs no model code",
}
"""The reason why a key has no effect here, by the beginning of the key."""

SINGLE_VALUES = {
    **_with_prefixes(["", "trainer."], ["weight_broadcast.save_format"], "safetensors"),
    **_with_prefixes(["trainer."], ["max_concurrent_runs", "model.tp"], "1"),
    "trainer.val.data.type": "sft",
    **_with_prefixes(_TRAINING_PREFIXES, ["events.sign"], "false"),
    **_with_prefixes(_TRAINING_PREFIXES, ["rollout_transport.type"], "zmq"),
    "orchestrator.mask_env_responses": "true",
    **_with_prefixes(_EVAL_PREFIXES, ["per_rollout"], "false"),
    "orchestrator.buffer.skip_verification": "false",
}
"""The only value that is possible here, by key of prime-rl. Setting it is correct and has no effect."""
SWITCHES = ("trainer.model.ac", "trainer.model.ac_offloading", "trainer.model.compile", "bench", "trainer.bench")
"""Sections that the value `true` turns on with their defaults, and `false` turns off."""
GPU_COUNTS = {
    **dict.fromkeys(("inference_gpus", "deployment.num_infer_gpus"), "inference"),
    **dict.fromkeys(("trainer_gpus", "deployment.num_train_gpus"), "trainer"),
}
"""The role whose number of GPUs a key sets."""


def use_current_names(kind: type[Section], entries: Sequence[Entry], findings: Findings) -> list[Entry]:
    """Return `entries` of one source with current keys. Refused entries are left out and reported in `findings`."""
    kept: list[Entry] = []
    gpu_counts: dict[str, Entry] = {}
    by_path = {entry.path: entry for entry in entries}
    for entry in entries:
        name = _full_name(kind, entry.path)
        if kind is RLConfig and name in GPU_COUNTS:
            gpu_counts[GPU_COUNTS[name]] = entry
            continue
        current = replace(entry, path=current_path(kind, entry.path))
        old_key, key = Key(*entry.path), Key(*current.path)
        if current.path != entry.path:
            findings.notice(f"{old_key} is called {key} here ({entry.origin})")
            other = by_path.get(current.path)
            if other is not None and other.value != entry.value:
                findings.refuse(
                    f"{old_key} ({entry.value!r}) and {key} ({other.value!r}) are two names of one key with two values"
                    f" ({entry.origin}); remove the first"
                )
        if name == "trainer.model.ac" and entry.value in ("full", "selective"):
            and_mode = "" if entry.value == "full" else ', mode = "selective"'
            findings.refuse(
                f'{old_key} is a table, not "{entry.value}": write [{old_key}] and below it freq = 1{and_mode} ({entry.origin})'
            )
        elif find_key(kind, current.path):
            kept.append(_current_value(kind, current))
        elif not _report_unsupported(current, name, findings):
            kept.append(current)
    return [*kept, *_gpu_ids(gpu_counts, findings)]


def use_underscores(kind: type[Section], entry: Entry, findings: Findings) -> Entry:
    """Return the entry of a file with underscores in place of dashes: a file may write keys like flags, `micro-batch-size = 8`.

    Names that the user chose, such as an environment's arguments, stay as they are. A key in both spellings is refused.
    """
    if (table := as_table(entry.value)) is not None:
        typed: dict[str, str] = {}
        spelled: dict[str, object] = {}
        for name, item in table.items():
            underscored = name.replace("-", "_")
            path = current_path(kind, (*entry.path, underscored))
            if any((key := find_key(kind, path[:end])) and key.shape is Shape.TABLE for end in range(len(path))):
                underscored = name
            if (other := typed.setdefault(underscored, name)) != name:
                names = " and ".join(dotted((*entry.path, spelling)) for spelling in sorted((other, name)))
                findings.refuse(f"{names} are two spellings of one key ({entry.origin}); remove one")
            inner = replace(entry, path=(*entry.path, underscored), value=item)
            spelled[underscored] = use_underscores(kind, inner, findings).value
        return replace(entry, value=spelled)
    items, key = as_list(entry.value), find_key(kind, current_path(kind, entry.path))
    if items is None or key is None or key.shape is not Shape.SECTION_LIST:
        return entry
    elements = (replace(entry, path=(*entry.path, str(index)), value=item) for index, item in enumerate(items))
    return replace(entry, value=[use_underscores(kind, element, findings).value for element in elements])


def current_path(kind: type[Section], path: KeyPath) -> KeyPath:
    """Return the current path of a key. If `path` exists, or if the tables lead to no existing key, it is `path` itself."""
    if find_key(kind, path):
        return path
    renamed = _full_name(kind, path)
    while old := _longest_prefix(renamed, RENAMED):
        renamed = RENAMED[old] + renamed.removeprefix(old)
    prefix = ROLE_PREFIXES.get(kind, ())
    current = tuple(renamed.split("."))
    exists = current[: len(prefix)] == prefix and find_key(kind, current[len(prefix) :])
    return current[len(prefix) :] if exists else path


def _report_unsupported(entry: Entry, name: str, findings: Findings) -> bool:
    """Report an entry that has no key here, as a notice or a problem. Return False if no table contains its key."""
    named = f"{Key(*entry.path)} ({entry.origin})"
    if name in SINGLE_VALUES and literal(entry.value).strip('"') == SINGLE_VALUES[name]:
        findings.notice(f"{named}: {SINGLE_VALUES[name]} is the only choice here; remove the key")
    elif old := _longest_prefix(name, IGNORED):
        findings.notice(f"{named} has no effect: {IGNORED[old]}")
    elif old := _longest_prefix(name, REFUSED):
        findings.refuse(f"{named} does not exist here: {REFUSED[old]}")
    else:
        return False
    return True


def _current_value(kind: type[Section], entry: Entry) -> Entry:
    """Return the entry of an existing key with its current value: prime-rl wrote some values in another form."""
    name, key, text = _full_name(kind, entry.path), find_key(kind, entry.path), str(entry.value)
    if name in SWITCHES and text.lower() in ("true", "false"):
        return replace(entry, value={} if text.lower() == "true" else None)
    if name.endswith(("weights.transport", "weights_transport")) and text == "filesystem":
        return replace(entry, value="files")
    if name == "orchestrator.advantage" and text == "None":
        return replace(entry, path=(*entry.path, "type"), value="none")
    if key and key.shape is Shape.LIST and type(entry.value) is str and text != "None":
        return replace(entry, value=Text(text))
    return entry


def _full_name(kind: type[Section], path: KeyPath) -> str:
    """Return the name that the tables have for a key of `kind`."""
    return dotted((*ROLE_PREFIXES.get(kind, ()), *path))


def _longest_prefix(name: str, table: dict[str, str]) -> str | None:
    """Return the longest key of `table` that is `name` or a section around it; None if there is none."""
    return max((old for old in table if name == old or name.startswith(f"{old}.")), key=len, default=None)


def _gpu_ids(counts: dict[str, Entry], findings: Findings) -> list[Entry]:
    """Return the keys with lists of GPU ids for given numbers of GPUs. Inference gets the first ids; a missing number is 1."""
    numbers = {"inference": 1, "trainer": 1}
    for role, entry in counts.items():
        text = str(entry.value)
        if not text.isdecimal() or int(text) < 1:
            findings.refuse(f"{dotted(entry.path)} must be a number of GPUs >= 1, got {text!r} ({entry.origin})")
            return []
        numbers[role] = int(text)
    if not counts:
        return []
    origin, num_inference_gpus = ", ".join(dict.fromkeys(entry.origin for entry in counts.values())), numbers["inference"]
    ids = {
        "inference_gpu_ids": range(num_inference_gpus),
        "trainer_gpu_ids": range(num_inference_gpus, num_inference_gpus + numbers["trainer"]),
    }
    return [Entry(path=(key,), value=list(value), origin=origin) for key, value in ids.items()]
