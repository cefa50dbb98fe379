"""Fills in the values of a run's roles that follow from the run's own values, or from another role's. Runs before validation.

Where roles may differ, an explicit value of a role wins. Where they must agree, two different values are an error that names
both. Each role's section is then complete: no role reads another role's section.
"""

from dataclasses import dataclass
from typing import get_args
from urllib.parse import urlsplit

from trivet.config.dump import literal
from trivet.config.findings import Findings
from trivet.config.keys import find_key
from trivet.config.schema.inference import ServerConfig
from trivet.config.schema.model import Dtype
from trivet.config.schema.rl import RLConfig
from trivet.config.tables import as_list, as_table
from trivet.config.values import UNSET, Values
from trivet.key_names import key_name

LOCAL_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "::", "::1")
SHARED_TRANSPORT_KEYS = ("host", "advertise", "port", "max_message_mib")
"""Transport keys that must be equal for trainer and orchestrator. The others, such as timeouts, may differ."""
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
_STEPPING_ROLES = ("trainer", "orchestrator")
_ROLES = (*_STEPPING_ROLES, "inference")
_FILLED_SECTIONS = {
    **dict.fromkeys(("wandb", "tracking", "detectors"), _STEPPING_ROLES),
    "bench": ("trainer",),
    "log": _ROLES,
}
"""The roles whose sections a section of the run fills, key by key."""


def resolve(values: Values, findings: Findings) -> None:
    """Fill the roles' sections of a run in `values`, in the order of `_Resolution.run`."""
    _Resolution(values, findings).run()


@dataclass(frozen=True, slots=True)
class _Resolution:
    """Derives the values of a run's roles, one rule after the other."""

    _values: Values
    _findings: Findings

    def run(self) -> None:
        values = self._values
        if values.has_value("orchestrator.replay") and values.find("orchestrator.replay") is not None:
            values.derive("inference", None, self._origin("orchestrator.replay"))  # a replay samples nothing
        self._make_deterministic()
        # A server that the run does not start may serve the model under another name.
        names = _STEPPING_ROLES[:1] if values.is_null("inference") else _ROLES
        self._agree("model.name", *(f"{role}.model.name" for role in names))
        self._fill("model.name", "orchestrator.model.name")
        self._fill("seq_len", "trainer.model.seq_len", "orchestrator.seq_len")
        self._fill("max_model_len", "inference.model.max_model_len")
        for name, roles in (("max_steps", _STEPPING_ROLES), ("max_async_level", _STEPPING_ROLES), ("output_dir", _ROLES)):
            self._agree(name, *(f"{role}.{name}" for role in roles))
        for name in ("faults.schedule", "seed"):
            self._fill(name, *(f"{role}.{name}" for role in _ROLES))
        for name, roles in _FILLED_SECTIONS.items():
            self._fill_section(name, *(f"{role}.{name}" for role in roles))
        for name in ("weights", "ckpt"):
            self._agree_section(name, *(f"{role}.{name}" for role in _STEPPING_ROLES))
        self._agree_section(*(f"{role}.run" for role in _ROLES))
        transports = [f"{role}.rollout_transport" for role in _STEPPING_ROLES]
        for name in self._names_in(*transports):
            keys = [f"{transport}.{name}" for transport in transports]
            if name in SHARED_TRANSPORT_KEYS:
                self._agree(*keys)
            else:
                self._fill(*keys)
                self._fill(*reversed(keys))
        self._fill("trainer.max_async_level", "max_async_level", with_default=True)
        self._configure_teacher()
        if not values.is_null("inference"):
            self._match_server()

    def _make_deterministic(self) -> None:
        """Set the keys of `DETERMINISTIC` if the run is deterministic. Another explicit value of such a key is refused."""
        values, key = self._values, key_name
        if str(values.find("deterministic")).lower() != "true":
            return
        for name, value in DETERMINISTIC.items():
            found = values.find(name)
            if not values.has_value(name):
                if not values.is_null(name):
                    values.derive(name, value, self._origin("deterministic"))
            elif _comparable(found).lower() not in (str(value).lower(), f"{value:g}" if value == 1 else ""):
                shown = literal(found) if isinstance(found, bool) else found
                self._findings.refuse(
                    f"{key('deterministic')} = true ({values.origin(('deterministic',))}) needs {key(name)} = {literal(value)},"
                    f" got {shown} ({self._source(name)}); remove {key(name)}"
                )
        self._fill("seed", "orchestrator.sampling.seed", with_default=True)

    def _fill(self, source: str, *targets: str, with_default: bool = False) -> None:
        """Copy the value of `source` to each target without a value. With `with_default`, an unset source has its default."""
        values = self._values
        if not values.has_value(source) and not with_default:
            return
        value = values.find(source) if values.has_value(source) else _default(source)
        for target in targets:
            if values.find(target) is UNSET and not values.is_null(target):
                values.derive(target, value, self._origin(source))

    def _fill_section(self, source: str, *targets: str) -> None:
        """Copy the values that are set in the section `source` to the sections `targets`, key by key."""
        if not isinstance(self._values.find(source), dict):
            self._fill(source, *targets)
            return
        for target in targets:
            if self._values.find(target) is UNSET and not self._values.is_null(target):
                self._values.derive(target, {}, source)
        for name in self._names_in(source):
            self._fill_section(f"{source}.{name}", *(f"{target}.{name}" for target in targets))

    def _agree_section(self, *sections: str) -> None:
        """Give each key that is set in one of `sections` the same value in all of them."""
        for name in self._names_in(*sections):
            keys = [f"{section}.{name}" for section in sections]
            holds_keys = any(isinstance(self._values.find(key), dict) for key in keys)
            agree = self._agree_section if holds_keys else self._agree
            agree(*keys)

    def _names_in(self, *sections: str) -> list[str]:
        """Return the names of the keys that are set in one of `sections`."""
        tables = [as_table(self._values.find(section)) or {} for section in sections]
        return list(dict.fromkeys(name for table in tables for name in table))

    def _agree(self, *keys: str) -> None:
        """Give all `keys` the value that one of them has. Two different values are refused."""
        values, key = self._values, key_name
        explicit = [name for name in keys if values.has_value(name)]
        if not explicit:
            return
        first, value = explicit[0], values.find(explicit[0])
        for name in explicit:
            other = values.find(name)
            if _comparable(other) != _comparable(value):
                self._findings.refuse(
                    f"{key(first)} ({value}, {self._source(first)}) and {key(name)} ({other}, {self._source(name)}) must be"
                    f" equal; set {key(keys[0])} alone"
                )
        for name in keys:
            if name not in explicit and not values.is_null(name):
                values.derive(name, value, self._origin(first))

    def _configure_teacher(self) -> None:
        """Fill [teacher_inference], if the run starts a server for the teacher, and give the orchestrator its address."""
        values, key = self._values, key_name
        if values.find("teacher_inference") is UNSET:
            if not values.has_value("teacher_gpu_ids"):
                return
            values.derive("teacher_inference", {}, self._origin("teacher_gpu_ids"))
        elif values.is_null("teacher_inference"):
            return
        names = ("orchestrator.teacher_model.model.name", "teacher_inference.model.name")
        if not any(map(values.has_value, names)):
            self._findings.refuse(
                f"{key(names[0])} is not set: name the teacher that [{key('teacher_inference')}] or {key('teacher_gpu_ids')}"
                " starts a server for"
            )
        self._agree(*names)
        self._agree("output_dir", "teacher_inference.output_dir")
        values.derive("teacher_inference.is_teacher", True, "teacher_inference")
        self._fill_section("orchestrator.run", "teacher_inference.run")
        self._fill("seed", "teacher_inference.seed")
        # The server generates at least one token after a sample of seq_len tokens. Its port is the next one to the policy's server.
        for target, source in (("model.max_model_len", "orchestrator.seq_len"), ("server.port", "inference.server.port")):
            value = str(values.find(source) if values.has_value(source) else _default(source))
            if not values.has_value(f"teacher_inference.{target}") and value.isdecimal():  # else refused by its own name
                values.derive(f"teacher_inference.{target}", int(value) + 1, self._origin(source))
        self._fill_section("log", "teacher_inference.log")
        self._point_client_at_server(server="teacher_inference", client="orchestrator.teacher_model.client")

    def _point_client_at_server(self, *, server: str, client: str) -> None:
        """Set base_url of the section `client` to the address in the section `server`; refuse another explicit address."""
        values, key = self._values, key_name
        names = [name for name in (f"{server}.server.host", f"{server}.server.port") if values.has_value(name)]
        given = {name.rpartition(".")[2]: str(values.find(name)) for name in names}
        host, port = given.get("host", ServerConfig().host), given.get("port", str(ServerConfig().port))
        if not values.has_value(f"{client}.base_url"):
            reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else host
            origin = ", ".join(map(self._source, names)) or "default"
            values.derive(f"{client}.base_url", [f"http://{reachable}:{port}/v1"], f"{server}.server, {origin}")
            return
        urls = values.find(f"{client}.base_url")
        for url in as_list(urls) or [urls]:
            address = urlsplit(str(url)).netloc.rpartition("@")[2]
            found_host = urlsplit(str(url)).hostname
            is_same_host = found_host == host or (found_host in LOCAL_HOSTS and host in LOCAL_HOSTS)
            if not is_same_host or address.rpartition(":")[2] != port:
                self._findings.refuse(
                    f"{key(f'{client}.base_url')} ({url}, {self._source(f'{client}.base_url')}) is not the server of this run,"
                    f" {key(f'{server}.server')} ({host}:{port}); remove base_url, or set {key(server)} ="
                    ' "None" when someone else starts the servers'
                )

    def _match_server(self) -> None:
        """Make trainer, orchestrator and the server that the run starts agree on dtype, LoRA, chat template and positions."""
        values = self._values
        self._point_client_at_server(server="inference", client="orchestrator.client")
        # If one of both names a dtype, the other gets it too. If neither does, `config.compute_dtype` replaces `auto` later.
        trained, served = "trainer.model.compute_dtype", "inference.model.dtype"
        named = {key: values.find(key) for key in (trained, served) if values.find(key) in get_args(Dtype)}
        for key, other in ((trained, served), (served, trained)):
            if other in named and (not values.has_value(key) or values.find(key) == "auto"):
                values.derive(key, named[other], self._origin(other))
        if not values.is_null("trainer.model.lora") and values.find("trainer.model.lora") is not UNSET:
            if not values.has_value("inference.enable_lora"):
                values.derive("inference.enable_lora", True, "trainer.model.lora")
            self._fill("trainer.model.lora.rank", "inference.max_lora_rank", with_default=True)
        self._fill("trainer.router_replay", "inference.return_routed_experts")
        self._fill("weights.transport", "inference.weights_transport")
        self._fill("inference.sleep_while_training", "orchestrator.sleep_servers", "trainer.release_gpu_memory")
        self._agree("trainer.tokenizer.chat_template", "inference.model.chat_template")
        self._agree_section("trainer.model.rope_scaling", "inference.model.rope_scaling")

    def _source(self, key: str) -> str:
        """Return the origin of the value of `key` itself."""
        return self._values.origin(tuple(key.split(".")))

    def _origin(self, key: str) -> str:
        """Return the origin that a value derived from `key` gets: the key, and the key's own origin."""
        return f"{key}, {self._source(key) if self._values.has_value(key) else 'default'}"


def _default(key: str) -> object:
    """Return the default of a run's key. If the key has none because it only fills roles, return the trainer's default."""
    for path in (key.split("."), ["trainer", *key.split(".")]):
        found = find_key(RLConfig, tuple(path))
        if found is not None and found.field is not None and found.field.default is not None:
            return found.field.default
    raise AssertionError(f"{key} has no default")


def _comparable(value: object) -> str:
    """Return a value as text that can be compared: flags are text, files have types. A last slash of a path is left out."""
    return str(value).rstrip("/")
