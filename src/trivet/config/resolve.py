"""Fills in the values that a whole run derives for its roles, in the order of `resolve`. Works on values before validation.

An explicit value of a role wins where roles may differ; where they may not, two different values are an error that names
both. What a role runs with is then complete: no role looks at another's section.
"""

from collections.abc import Iterable, Sequence
from typing import get_args
from urllib.parse import urlsplit

from pydantic.fields import FieldInfo

from trivet.config.dump import literal
from trivet.config.findings import ROOT, Findings, Key
from trivet.config.origins import Draft, Sourced
from trivet.config.schema.inference import ServerConfig
from trivet.config.schema.model import Dtype, LoRAConfig, RopeScalingConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import (
    CkptConfig,
    CkptWeightsConfig,
    DetectorsConfig,
    LogConfig,
    LogExtrasConfig,
    RunIdentity,
    TransportConfig,
    WandbConfig,
    WeightsConfig,
)
from trivet.config.schema.trainer import BenchConfig, TrainerConfig
from trivet.config.tables import as_list

LOCAL_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "::", "::1")
CONNECTING = ("host", "advertise", "port", "max_message_mib")
"""Transport keys that mean the same to both ends; how long each waits is its own affair."""


DETERMINISTIC: dict[str, object] = {
    "trainer.deterministic": True,
    "trainer.model.optimization_dtype": "float32",
    "trainer.model.reduce_dtype": "float32",
    "orchestrator.deterministic": True,
    "orchestrator.strict_async_level": True,
    "orchestrator.oversampling_factor": 1.0,
    "inference.deterministic": True,
    "inference.max_num_seqs": 1,
}
"""Values that `deterministic = true` sets in each role, besides seeds."""


def resolve(draft: Draft, findings: Findings) -> None:
    """Fill the roles' sections of a run in `draft`."""
    _leave_out_servers(draft)
    _make_deterministic(draft, findings)
    _agree(draft, findings, _model_names(draft))
    _fill(draft, "model.name", ("orchestrator.model.name",))
    _fill(draft, "seq_len", ("trainer.model.seq_len", "orchestrator.seq_len"))
    _fill(draft, "max_model_len", ("inference.model.max_model_len",))
    _agree(draft, findings, ("max_steps", "trainer.max_steps", "orchestrator.max_steps"))
    _agree(draft, findings, ("max_async_level", "trainer.max_async_level", "orchestrator.max_async_level"))
    _fill(draft, "faults.schedule", ("trainer.faults.schedule", "orchestrator.faults.schedule", "inference.faults.schedule"))
    _fill(draft, "seed", ("trainer.seed", "orchestrator.seed", "inference.seed"))
    _agree(draft, findings, ("output_dir", "trainer.output_dir", "orchestrator.output_dir", "inference.output_dir"))
    _fill_section(draft, "wandb", ("trainer.wandb", "orchestrator.wandb"), WandbConfig.model_fields)
    _fill_section(draft, "wandb.log_extras", ("orchestrator.wandb.log_extras",), LogExtrasConfig.model_fields)
    _fill_section(draft, "detectors", ("trainer.detectors", "orchestrator.detectors"), DetectorsConfig.model_fields)
    _fill_section(draft, "bench", ("trainer.bench",), BenchConfig.model_fields)
    _fill_section(draft, "log", ("trainer.log", "orchestrator.log", "inference.log"), LogConfig.model_fields)
    for name in WeightsConfig.model_fields:
        _agree(draft, findings, (f"weights.{name}", f"trainer.weights.{name}", f"orchestrator.weights.{name}"))
    kept = (f"weights.{name}" for name in CkptWeightsConfig.model_fields)
    for name in (*(name for name in CkptConfig.model_fields if name != "weights"), *kept):
        _agree(draft, findings, (f"ckpt.{name}", f"trainer.ckpt.{name}", f"orchestrator.ckpt.{name}"))
    for name in TransportConfig.model_fields:
        ends = (f"trainer.rollout_transport.{name}", f"orchestrator.rollout_transport.{name}")
        if name in CONNECTING:
            _agree(draft, findings, ends)
        else:
            _fill(draft, ends[0], ends[1:])
            _fill(draft, ends[1], ends[:1])
    for name in RunIdentity.model_fields:
        _agree(draft, findings, (f"trainer.run.{name}", f"orchestrator.run.{name}", f"inference.run.{name}"))
    _derive_default(draft, "max_async_level", "trainer.max_async_level", TrainerConfig.model_fields["max_async_level"])
    _place_teacher(draft, findings)
    if not draft.is_null("inference"):
        _point_client_at_server(draft, findings, server="inference", client="orchestrator.client")
        _compute_as_served(draft)
        _serve_adapters(draft)
        _take_turns(draft)
        _agree(draft, findings, ("trainer.tokenizer.chat_template", "inference.model.chat_template"))
        for name in RopeScalingConfig.model_fields:
            _agree(draft, findings, (f"trainer.model.rope_scaling.{name}", f"inference.model.rope_scaling.{name}"))


def _leave_out_servers(draft: Draft) -> None:
    """A replay samples nothing: the run starts no inference server, whatever [inference] says."""
    replay = draft.leaf("orchestrator.replay")
    if replay is not None and replay.value is not None:
        draft.tree["inference"] = Sourced(None, _derived("orchestrator.replay", replay), is_derived=True)


def _make_deterministic(draft: Draft, findings: Findings) -> None:
    wanted = draft.leaf("deterministic")
    if wanted is None or _normal(wanted.value).lower() != "true":
        return
    for key, value in DETERMINISTIC.items():
        leaf = draft.leaf(key)
        if leaf is None and not draft.is_null(key):
            draft.derive(key, value, _derived("deterministic", wanted))
        elif leaf is not None and _normal(leaf.value).lower() not in (str(value).lower(), f"{value:g}" if value == 1 else ""):
            found = literal(leaf.value) if isinstance(leaf.value, bool) else leaf.value
            findings.refuse(
                f"{ROOT.deterministic} = true ({wanted.origin}) needs {Key(key)} = {literal(value)}, got {found} ({leaf.origin});"
                f" remove {Key(key)}"
            )
    _derive_default(draft, "orchestrator.sampling.seed", "seed", OrchestratorConfig.model_fields["seed"])


def _model_names(draft: Draft) -> Sequence[str]:
    """Return the keys that must name one model. Someone else's server may serve it under a name of its own."""
    if draft.is_null("inference"):
        return ("model.name", "trainer.model.name")
    return ("model.name", "trainer.model.name", "orchestrator.model.name", "inference.model.name")


def _fill(draft: Draft, source: str, targets: Sequence[str]) -> None:
    """Copy a shared value to each role that has none of its own."""
    shared = draft.leaf(source)
    if shared is None:
        return
    for target in targets:
        if draft.find(target) is None and not draft.is_null(target):
            draft.derive(target, shared.value, _derived(source, shared))


def _fill_section(draft: Draft, source: str, targets: Sequence[str], names: Iterable[str]) -> None:
    section = draft.find(source)
    if isinstance(section, Sourced):
        _fill(draft, source, targets)
    elif section is not None:
        for target in targets:
            if draft.find(target) is None and not draft.is_null(target):
                draft.derive(target, {}, source)
        for name in names:
            _fill(draft, f"{source}.{name}", tuple(f"{target}.{name}" for target in targets))


def _agree(draft: Draft, findings: Findings, keys: Sequence[str]) -> None:
    """Give `keys` one value: any of them sets all, two different ones are refused."""
    explicit = {key: leaf for key in keys if (leaf := draft.leaf(key)) is not None}
    if not explicit:
        return
    first, chosen = next(iter(explicit.items()))
    for key, leaf in explicit.items():
        if _normal(leaf.value) != _normal(chosen.value):
            findings.refuse(
                f"{Key(first)} ({chosen.value}, {chosen.origin}) and {Key(key)} ({leaf.value}, {leaf.origin}) must be equal;"
                f" set {Key(keys[0])} alone"
            )
    for key in keys:
        if key not in explicit and not draft.is_null(key):
            draft.derive(key, chosen.value, _derived(first, chosen))


def _derived(key: str, leaf: Sourced) -> str:
    return f"{key}, {leaf.origin}"


def _normal(value: object) -> str:
    """Return a value as text to compare: flags are text and files are typed; a last slash of a directory does not count."""
    return str(value).rstrip("/")


def _place_teacher(draft: Draft, findings: Findings) -> None:
    """Fill the section of a teacher's server that the run starts, and point the orchestrator at it."""
    gpu_ids = draft.leaf("teacher_gpu_ids")
    if draft.find("teacher_inference") is None:
        if gpu_ids is None or draft.is_null("teacher_inference"):
            return
        draft.derive("teacher_inference", {}, _derived("teacher_gpu_ids", gpu_ids))
    names = ("orchestrator.teacher_model.model.name", "teacher_inference.model.name")
    if not any(draft.leaf(name) for name in names):
        findings.refuse(
            f"{Key(names[0])} is not set: name the teacher that [{ROOT.teacher_inference}] or {ROOT.teacher_gpu_ids} starts a"
            " server for"
        )
    _agree(draft, findings, names)
    _agree(draft, findings, ("output_dir", "teacher_inference.output_dir"))
    draft.derive("teacher_inference.is_teacher", True, "teacher_inference")
    for name in RunIdentity.model_fields:
        _fill(draft, f"orchestrator.run.{name}", (f"teacher_inference.run.{name}",))
    _fill(draft, "seed", ("teacher_inference.seed",))
    # Room for a sample of seq_len tokens, and the one that the server insists on generating.
    seq_len = OrchestratorConfig.model_fields["seq_len"]
    _derive_next(draft, "teacher_inference.model.max_model_len", "orchestrator.seq_len", seq_len)
    _derive_next(draft, "teacher_inference.server.port", "inference.server.port", ServerConfig.model_fields["port"])
    _fill_section(draft, "log", ("teacher_inference.log",), LogConfig.model_fields)
    _point_client_at_server(draft, findings, server="teacher_inference", client="orchestrator.teacher_model.client")


def _point_client_at_server(draft: Draft, findings: Findings, *, server: str, client: str) -> None:
    default = ServerConfig()
    host_leaf, port_leaf = draft.leaf(f"{server}.server.host"), draft.leaf(f"{server}.server.port")
    host = str(host_leaf.value if host_leaf else default.host)
    port = str(port_leaf.value if port_leaf else default.port)
    urls = draft.leaf(f"{client}.base_url")
    if urls is None:
        reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        origin = ", ".join(leaf.origin for leaf in (host_leaf, port_leaf) if leaf) or "default"
        draft.derive(f"{client}.base_url", [f"http://{reachable}:{port}/v1"], f"{server}.server, {origin}")
        return
    for url in as_list(urls.value) or [urls.value]:
        parts = urlsplit(str(url))
        is_same_host = parts.hostname == host or (parts.hostname in LOCAL_HOSTS and host in LOCAL_HOSTS)
        if not is_same_host or _port_of(str(url)) != port:
            findings.refuse(
                f"{Key(client).base_url} ({url}, {urls.origin}) is not the server of this run, {Key(server).server}"
                f' ({host}:{port}); remove base_url, or set {Key(server)} = "None" when someone else starts the servers'
            )


def _compute_as_served(draft: Draft) -> None:
    """Trainer and server get the dtype that one of them names. If neither does, both stay `auto` for `config.compute_dtype`."""
    trained, served = "trainer.model.compute_dtype", "inference.model.dtype"
    named = {key: leaf for key in (trained, served) if (leaf := draft.leaf(key)) and leaf.value in get_args(Dtype)}
    for key, other in ((trained, served), (served, trained)):
        leaf = draft.leaf(key)
        if other in named and (leaf is None or leaf.value == "auto"):
            draft.derive(key, named[other].value, _derived(other, named[other]))


def _serve_adapters(draft: Draft) -> None:
    if draft.find("trainer.model.lora") is None or draft.is_null("trainer.model.lora"):
        return
    if draft.leaf("inference.enable_lora") is None:
        draft.derive("inference.enable_lora", True, "trainer.model.lora")
    _derive_default(draft, "inference.max_lora_rank", "trainer.model.lora.rank", LoRAConfig.model_fields["rank"])


def _take_turns(draft: Draft) -> None:
    """Derive the keys by which the other roles take turns with a server that sleeps."""
    _fill(draft, "inference.sleep_while_training", ("orchestrator.sleep_servers", "trainer.release_gpu_memory"))


def _port_of(url: str) -> str:
    try:
        port = urlsplit(url).port
    except ValueError:
        return ""
    return str(port or "")


def _derive_default(draft: Draft, key: str, source: str, field: FieldInfo) -> None:
    """Give `key`, unless it has a value, that of `source` or the default of its `field`."""
    if draft.leaf(key) is None:
        leaf = draft.leaf(source) or Sourced(field.default, "default")
        draft.derive(key, leaf.value, _derived(source, leaf))


def _derive_next(draft: Draft, key: str, source: str, field: FieldInfo) -> None:
    """Give `key`, unless it has a value, one more than `source`; a `source` that is no number is refused by its own name."""
    leaf = draft.leaf(source) or Sourced(field.default, "default")
    if draft.leaf(key) is None and str(leaf.value).isdecimal():
        draft.derive(key, int(str(leaf.value)) + 1, _derived(source, leaf))
