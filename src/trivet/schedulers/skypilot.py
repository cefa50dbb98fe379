"""Writes a command as a task of SkyPilot, whose machines are its nodes. Nothing here talks to a cloud.

One node runs `schedulers.job`. Each of several nodes runs `cluster.bring_up`, which starts Ray, and the job on the first of them.
SkyPilot starts a managed job (`sky jobs launch`) again on new machines when some are lost, or when it ends with exit code 75: the
command goes on from its newest commit.

Fields: the task schema of SkyPilot 0.14.
"""

import shlex
from pathlib import Path
from typing import Any

from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.deployment import SkyPilotConfig, SlurmCommand
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError, NodesMissing
from trivet.process.lifetime import module_command
from trivet.schedulers.documents import merge, to_yaml, without_none
from trivet.schedulers.preparation import count_gpus, count_machines, require_commits, require_portable, write_files


def write(config: RLConfig | SftConfig, *, command: SlurmCommand) -> str:
    """Write task and configuration of a command with a table [skypilot]; return how to start it.

    Raises:
        ConfigError: the table and other keys do not fit together, or the files cannot be written.
    """
    sky = config.skypilot
    assert sky is not None
    require_portable(
        config, "skypilot", shared="working_dir", working_dir=sky.working_dir, merged="task_overrides", secret="secrets"
    )
    require_commits(config, restarted_by="a managed job of SkyPilot", otherwise="")
    directory = RunLayout(config.output_dir).skypilot.absolute()
    task, configuration = directory / "task.yaml", directory / f"{command}.toml"
    made = make_task(config, command=command, configuration=configuration)
    write_files(directory, {configuration: to_toml(config.model_copy(update={"skypilot": None})), task: to_yaml([made])})
    flags = "".join(f" --secret {name}" for name in sky.secrets)
    return f"wrote {task}; start it with: sky jobs launch{flags} {shlex.quote(str(task))}"


def make_task(config: RLConfig | SftConfig, *, command: SlurmCommand, configuration: Path) -> dict[str, Any]:
    """Return the task of a command.

    Args:
        configuration: file of the resolved configuration on this machine; SkyPilot copies it to the nodes.

    Raises:
        ConfigError: there are GPUs of no kind.
    """
    sky = config.skypilot
    assert sky is not None
    num_gpus = count_gpus(config, asked=sky.gpus_per_node)
    on_node = f"~/.trivet/{sky.name}/{command}.toml"
    parts: dict[str, Any] = {
        "name": sky.name,
        "num_nodes": count_machines(config),
        "resources": _resources(sky, num_gpus=num_gpus),
        "envs": sky.env or None,
        "secrets": dict.fromkeys(sky.secrets) or None,
        "file_mounts": {on_node: str(configuration)},
        "setup": sky.setup,
        "run": _run_script(config, sky, command=command, configuration=on_node, num_gpus=num_gpus),
    }
    return merge(without_none(parts), sky.task_overrides)


def _resources(sky: SkyPilotConfig, *, num_gpus: int) -> dict[str, Any]:
    if num_gpus and sky.accelerator is None:
        raise ConfigError(
            f"skypilot.accelerator must say of which kind the {num_gpus} GPUs of each node are, such as H100; set it, or"
            " skypilot.gpus_per_node = 0 for a run on CPUs"
        )
    found = {
        "accelerators": f"{sky.accelerator}:{num_gpus}" if num_gpus else None,
        "image_id": f"docker:{sky.image}" if sky.image is not None else None,
        "job_recovery": {"recover_on_exit_codes": [NodesMissing.exit_code]},
    }
    return without_none(found)


def _run_script(
    config: RLConfig | SftConfig, sky: SkyPilotConfig, *, command: SlurmCommand, configuration: str, num_gpus: int
) -> str:
    notes = RunLayout(config.output_dir).skypilot
    lines = [f"cd -- {shlex.quote(str(sky.working_dir))}"]
    task = shlex.join(module_command("trivet.schedulers.job", command, python=sky.python))
    # A managed job keeps its id when it is started again.
    task += f' {configuration} --pid-file {shlex.quote(str(notes))}/"$SKYPILOT_TASK_ID".pid'
    if isinstance(config, RLConfig) and config.deployment.is_multi_node:
        # SkyPilot does not count starts. Other machines have other addresses, or at least another authority of certificates.
        lines.append('start="$SKYPILOT_TASK_ID-$(cksum <<< "$SKYPILOT_NODE_IPS" | cut -d " " -f 1)"')
        words = ["--directory", str(notes), "--gpus", str(num_gpus), "--lost-after-s", f"{config.deployment.lost_after_s:g}"]
        bring_up = shlex.join(module_command("trivet.cluster.bring_up", *words, python=sky.python))
        task = f'{bring_up} --job "$start" --index "$SKYPILOT_NODE_RANK" -- {task}'
    return "\n".join([*lines, f"exec {task}", ""])
