"""Builds the configuration of a v1 environment from the `id` and `args` of `[[orchestrator.env]]`."""

from collections.abc import Iterator, Mapping
from typing import Any

from verifiers.v1 import AgentConfig, EnvConfig, SubprocessConfig
from verifiers.v1.configs.select import SelectConfig  # pyright: ignore[reportMissingImports]  checked with 0.3.1
from verifiers.v1.utils.loaders import env_config_type, harness_class, resolve_env_config

from trivet.errors import EnvironmentLoadError


def read_arguments(env_id: str, args: Mapping[str, Any]) -> tuple[dict[str, Any], SelectConfig]:
    """Return the data of the environment's configuration, and which of its tasks are used.

    `args.select` chooses tasks. Other keys that the environment's configuration does not have are the taskset's. `env_id` names
    the taskset, or the environment where `args.taskset.id` names another taskset.
    """
    data = dict(args)
    select = SelectConfig.model_validate(data.pop("select", {}))
    taskset = dict(data.pop("taskset", {}))
    if "id" in taskset:
        data["id"] = env_id
    else:
        taskset["id"] = env_id
    fields = env_config_type(taskset["id"], data.get("id", "")).model_fields
    for name in [name for name in data if name not in fields]:
        taskset[name] = data.pop(name)
    return {**data, "taskset": taskset}, select


def make_config(data: Mapping[str, Any], *, name: str) -> EnvConfig:
    """Return the configuration, with every agent in a process of this machine unless it says another place.

    verifiers' own default is a sandbox that has to be paid for.

    Raises:
        EnvironmentLoadError: an agent's harness runs what the model writes, and nothing says where.
    """
    config = resolve_env_config(dict(data))
    harnesses = config.agent_harnesses()
    places: dict[str, AgentConfig] = {}
    for agent, spec in _agents_without_a_place(config, data):
        harness = harness_class(harnesses[agent].id)
        if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
            raise EnvironmentLoadError(
                f"environment {name!r}: harness {harnesses[agent].id!r} of its agent {agent!r} runs commands that the model "
                f'writes, and nothing says where. Set args.{agent}.runtime.type, e.g. to "docker"; "subprocess" runs them on '
                f'this machine without isolation. args.{agent}.harness.id = "null" is a chat without a shell'
            )
        places[agent] = spec.model_copy(update={"runtime": SubprocessConfig()})
    return config.model_copy(update=places)


def _agents_without_a_place(config: EnvConfig, data: Mapping[str, Any]) -> Iterator[tuple[str, AgentConfig]]:
    """Yield the agents for which neither the environment's author nor the user chose a runtime."""
    for name, value in config:
        if isinstance(value, AgentConfig):
            declared = type(config).model_fields[name].default
            said = data.get(name)
            if "runtime" not in declared.model_fields_set and not (isinstance(said, Mapping) and "runtime" in said):
                yield name, value
