"""The command `rl`: checks, takes the output directory, starts the three roles and watches them to the end."""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack

import msgspec

from trivet.config.command import run_command
from trivet.config.layout import RunLayout
from trivet.config.rl import RLConfig
from trivet.config.shared import RunIdentity
from trivet.environments.installed import require_installed
from trivet.launcher.logs import RunLog
from trivet.launcher.machine import inspect_machine
from trivet.launcher.plan import Plan, Ports, plan, share_gpus
from trivet.launcher.ports import HeldPorts
from trivet.launcher.run_directory import RunDirectory, write_configs
from trivet.launcher.supervisor import supervise
from trivet.telemetry.events import read_events
from trivet.wire.events import Stop
from trivet.wire.versions import Step


def main() -> int:
    return run_command(RLConfig, start, check=check)


def check(config: RLConfig) -> None:
    """Refuse what this machine cannot run; starts and writes nothing.

    Raises:
        EnvironmentLoadError: an environment is not installed.
        ConfigError: GPU ids that do not exist.
    """
    for env in config.orchestrator.env:
        require_installed(env.id)
    share_gpus(config, inspect_machine().gpus)


def start(config: RLConfig) -> int:
    """Run `config`, resolved and checked, to its end; returns the exit code."""
    layout = RunLayout(config.output_dir)
    with ExitStack() as held:
        directory = held.enter_context(RunDirectory(layout))
        step = directory.choose_start(resume_step=config.trainer.ckpt.resume_step, does_clean=config.clean)
        run = directory.identify(is_resumed=step is not None)
        planned = plan(
            config,
            machine=inspect_machine(),
            python=sys.executable,
            run=run,
            ports=_take_ports(config, held.enter_context(HeldPorts())),
            resume_step=step,
        )
        directory.begin(run, resumed_from=step)
        write_configs(planned.configs)
        layout.logs.mkdir(parents=True, exist_ok=True)
        log = RunLog(sys.stdout, held.enter_context(layout.log_file("rl.log").open("a")))
        _introduce(run, layout, planned, step, log)
        exit_code = _carry_out(planned, config, run, log)
        if exit_code == 0:
            log.say(f"weights: {layout.weights}  metrics: {layout.metrics}  rollouts: {layout.root / 'rollouts'}")
        return exit_code


def _take_ports(config: RLConfig, held: HeldPorts) -> Ports:
    transport = config.trainer.rollout_transport
    inference = 0
    if config.inference is not None:
        inference = held.take(config.inference.server.host, preferred=config.inference.server.port)
    return Ports(inference=inference, transport=held.take(transport.host, preferred=transport.port))


def _introduce(run: RunIdentity, layout: RunLayout, planned: Plan, step: Step | None, log: RunLog) -> None:
    origin = "from the start model" if step is None else f"from the checkpoint of step {step}"
    log.say(f"run {run.id} attempt {run.attempt} {origin}, output in {layout.root}, logs in {layout.logs}")
    for notice in planned.notices:
        log.say(f"notice: {notice}")


def _carry_out(planned: Plan, config: RLConfig, run: RunIdentity, log: RunLog) -> int:
    layout = RunLayout(config.output_dir)
    return supervise(
        planned.processes,
        python=sys.executable,
        environ=role_environment(os.environ),
        log=log,
        is_complete=lambda role: has_completed(layout, role, run=run, max_steps=config.trainer.max_steps),
        base_urls=planned.base_urls,
        shutdown_timeout_s=config.shutdown_timeout_s,
        patience_s=config.trainer.rollout_transport.timeout_s,
    )


def role_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What roles inherit: not the keys that the environment sets, which their configuration files already hold."""
    return {name: value for name, value in environ.items() if not name.startswith("TRIVET_")}


def has_completed(layout: RunLayout, role: str, *, run: RunIdentity, max_steps: int | None) -> bool:
    """Whether `role` recorded in events.jsonl that this attempt reached the last step."""
    if max_steps is None or not layout.events.exists():
        return False
    try:
        stops = [event for event in read_events(layout.events) if isinstance(event, Stop)]
    except msgspec.DecodeError:
        return False
    mine = [stop for stop in stops if stop.role == role and stop.attempt == run.attempt and stop.reason == "done"]
    return any(stop.step >= max_steps for stop in mine)


if __name__ == "__main__":
    raise SystemExit(main())
