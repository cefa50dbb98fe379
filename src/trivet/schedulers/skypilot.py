"""Writes a command as a task of SkyPilot, whose machines are its nodes. Nothing here talks to a cloud.

Every node runs `schedulers.job`, which learns from SkyPilot's variables which node it is. SkyPilot starts a managed job (`sky jobs
launch`) again on new machines when some are lost, or when it ends with exit code 75: the command goes on from its newest commit.

Fields: the task schema of SkyPilot 0.14.
"""

import shlex
from pathlib import Path
from typing import Any

from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.load import LoadedConfig
from trivet.config.schema.deployment import SkyPilotConfig, SlurmCommand
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError, NodesMissing
from trivet.process.lifetime import module_command
from trivet.schedulers.documents import merge, to_yaml, without_none
from trivet.schedulers.preparation import (
    Submittable,
    count_gpus,
    count_nodes,
    require_below,
    require_commits,
    require_no_secret_variable,
    require_nothing_hidden,
    show_resolved,
    write_files,
)


def write(loaded: LoadedConfig[Submittable], *, command: SlurmCommand, is_dry_run: bool) -> int:
    """Write task and configuration of a command with a table [skypilot], and print how to start it; return the exit code.

    Args:
        is_dry_run: show the resolved configuration too.

    Raises:
        ConfigError: the table and other keys do not fit together, or the files cannot be written.
    """
    config = loaded.config
    assert not isinstance(config, EvalConfig)
    assert config.skypilot is not None
    if isinstance(config, RLConfig) and config.deployment.is_multi_node and config.deployment.engine == "ray":
        raise ConfigError('[skypilot] starts no Ray cluster yet: set deployment.engine = "agents"')
    require_below(config, config.skypilot.working_dir, working_dir=config.skypilot.working_dir, key="skypilot.working_dir")
    require_nothing_hidden(config, file="bucket through which SkyPilot copies it", instead="skypilot.secrets")
    require_no_secret_variable(config.skypilot.task_overrides, key="skypilot.task_overrides", instead="skypilot.secrets")
    require_commits(config, restarted_by="a managed job of SkyPilot", otherwise="")
    directory = RunLayout(config.output_dir).skypilot.absolute()
    task, configuration = directory / "task.yaml", directory / f"{command}.toml"
    made = make_task(config, command=command, configuration=configuration)
    text = to_toml(config.model_copy(update={"skypilot": None}))
    write_files(directory, {configuration: text, task: to_yaml([made])})
    if is_dry_run:
        show_resolved(loaded)
    flags = "".join(f" --secret {name}" for name in config.skypilot.secrets)
    print(f"{'# ' if is_dry_run else ''}wrote {task}; start it with: sky jobs launch{flags} {shlex.quote(str(task))}")
    return 0


def make_task(config: RLConfig | SftConfig, *, command: SlurmCommand, configuration: Path) -> dict[str, Any]:
    """Return the task of a command.

    Args:
        configuration: file of the resolved configuration on this machine; SkyPilot copies it to the nodes.

    Raises:
        ConfigError: there are GPUs of no kind.
    """
    sky = config.skypilot
    assert sky is not None
    on_node = f"~/.trivet/{sky.name}/{command}.toml"
    parts: dict[str, Any] = {
        "name": sky.name,
        "num_nodes": count_nodes(config),
        "resources": _resources(config, sky),
        "envs": sky.env or None,
        "secrets": dict.fromkeys(sky.secrets) or None,
        "file_mounts": {**sky.file_mounts, on_node: str(configuration)},
        "setup": sky.setup,
        "run": _run_script(config, sky, command=command, configuration=on_node),
    }
    return merge(without_none(parts), sky.task_overrides)


def _resources(config: RLConfig | SftConfig, sky: SkyPilotConfig) -> dict[str, Any]:
    num_gpus = count_gpus(config, asked=sky.gpus_per_node)
    if num_gpus and sky.accelerator is None:
        raise ConfigError(
            f"skypilot.accelerator must say of which kind the {num_gpus} GPUs of each node are, such as H100; set it, or"
            " skypilot.gpus_per_node = 0 for a run on CPUs"
        )
    found = {
        "accelerators": f"{sky.accelerator}:{num_gpus}" if num_gpus else None,
        "cpus": f"{sky.cpus}+" if sky.cpus is not None else None,
        "memory": f"{sky.memory_gb}+" if sky.memory_gb is not None else None,
        "image_id": f"docker:{sky.image}" if sky.image is not None else None,
        "job_recovery": {"recover_on_exit_codes": [NodesMissing.exit_code]},
    }
    return without_none(found)


def _run_script(config: RLConfig | SftConfig, sky: SkyPilotConfig, *, command: SlurmCommand, configuration: str) -> str:
    task = module_command("trivet.schedulers.job", command, python=sky.python)
    notes = RunLayout(config.output_dir).skypilot
    lines = [
        f"cd -- {shlex.quote(str(sky.working_dir))}",
        # A managed job keeps its id when it is started again.
        f'exec {shlex.join(task)} {configuration} --pid-file {shlex.quote(str(notes))}/"$SKYPILOT_TASK_ID".pid',
    ]
    return "\n".join([*lines, ""])
