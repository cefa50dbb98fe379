"""Takes a run from its configuration to its end: checks, takes the output directory, starts the three roles, watches them."""

import os
import sys
from contextlib import ExitStack

from trivet.config.compute_dtype import describe_dtype, record_choice
from trivet.config.layout import RunLayout
from trivet.config.sections.rl import RLConfig
from trivet.environments.packages.interpreters import describe_interpreter, require_environment
from trivet.environments.packages.probe import EnvironmentProbe
from trivet.environments.packages.probe_program import ProbeTarget
from trivet.environments.settings import run_settings
from trivet.launcher.commands.bench import measure_trainer
from trivet.launcher.custom_advantage import require_advantage
from trivet.launcher.logs import RunLog
from trivet.launcher.plan import share_gpus
from trivet.launcher.ports import ReservedPorts
from trivet.launcher.processes import LocalHost
from trivet.launcher.role_configs import Ports
from trivet.launcher.run_directory import RunDirectory
from trivet.launcher.scratch import Scratch
from trivet.launcher.supervision.attempts import Attempts, role_environment
from trivet.launcher.supervision.start_order import StartOrder
from trivet.launcher.supervision.supervisor import Supervisor
from trivet.machine import inspect_machine
from trivet.process.stacks import show_stacks_on_signal
from trivet.secret import share_secret
from trivet.transport.recorded_groups import require_replayable


def check(config: RLConfig) -> None:
    """Refuse what this machine cannot run; writes nothing, and starts nothing that lasts.

    Raises:
        EnvironmentLoadError: an environment is not installed.
        ConfigError: GPU ids that do not exist, a custom advantage that does not work, or a record that cannot be replayed.
    """
    if config.trainer.bench is not None:
        share_gpus(config, inspect_machine().gpus)
        return
    for name, env in config.orchestrator.environments.items():
        require_environment(env)
        print(f"environment {name}: runs in {describe_interpreter(env)}", file=sys.stderr)
    share_gpus(config, inspect_machine().gpus)
    require_advantage(config.orchestrator.advantage)
    require_replayable(config.orchestrator)
    if config.orchestrator.replay is not None:
        print(
            f"replay: trains on the rollouts in {config.orchestrator.replay}; no inference server is started", file=sys.stderr
        )


def check_environments(config: RLConfig) -> None:
    """Load the environments of a run once; takes seconds, nearly all of them imports.

    Raises:
        EnvironmentLoadError: one cannot be loaded, or has no data.
    """
    if config.trainer.bench is None:
        with _loading_environments(config) as probe:
            probe.wait()


def _loading_environments(config: RLConfig) -> EnvironmentProbe:
    trained = {env.label for env in config.orchestrator.env}
    wanted = [
        ProbeTarget(settings=settings, is_trained=name in trained)
        for name, settings in run_settings(config.orchestrator).items()
    ]
    return EnvironmentProbe(wanted, timeout_s=config.orchestrator.env_start_timeout_s)


def start(config: RLConfig) -> int:
    """Run `config`, resolved and checked, to its end; returns the exit code."""
    if config.trainer.bench is not None:
        return measure_trainer(config)
    show_stacks_on_signal()
    layout = RunLayout(config.output_dir)
    with ExitStack() as held:
        directory = held.enter_context(RunDirectory(layout))
        scratch = held.enter_context(Scratch(layout))
        ckpt = config.trainer.ckpt
        environments = held.enter_context(_loading_environments(config))
        step = directory.choose_start(resume_step=ckpt.resume_step, resume_from=ckpt.resume_from, does_clean=config.clean)
        if config.clean:
            environments.wait()  # first: what it removes would be missed if they cannot be loaded
        attempts = Attempts(
            config=config,
            directory=directory,
            run=directory.identify(is_resumed=step is not None and ckpt.resume_from is None),
            from_step=step,
            machine=inspect_machine(),
            python=sys.executable,
            ports=_reserve_ports(config, held.enter_context(ReservedPorts())),
            scratch=scratch,
        )
        attempts.begin()
        record_choice(layout, config)
        layout.logs.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(layout.log_file("rl.log").open("a"))
        log = RunLog(sys.stdout, file, as_json=config.log.json_logging)
        _introduce(attempts, log)
        environ = role_environment(os.environ) | share_secret(layout, environ=os.environ)
        supervisor = Supervisor(
            attempts,
            order=StartOrder(environments, num_cpus=attempts.machine.num_cpus),
            host=LocalHost(python=sys.executable, environ=environ),
            config=config.recovery,
            log=log,
            shutdown_timeout_s=config.shutdown_timeout_s,
            patience_s=config.trainer.rollout_transport.timeout_s,
        )
        exit_code = supervisor.run()
        if exit_code == 0:
            log.say(f"weights: {layout.weights}  metrics: {layout.metrics}  rollouts: {layout.root / 'rollouts'}")
        return exit_code


def _reserve_ports(config: RLConfig, held: ReservedPorts) -> Ports:
    transport = config.trainer.rollout_transport
    inference = 0
    if config.inference is not None:
        inference = held.reserve(config.inference.server.host, preferred=config.inference.server.port)
    taught = config.teacher_inference
    return Ports(
        inference=inference,
        transport=held.reserve(transport.host, preferred=transport.port),
        teacher=held.reserve(taught.server.host, preferred=taught.server.port) if taught is not None else 0,
    )


def _introduce(attempts: Attempts, log: RunLog) -> None:
    run, step, layout, trainer = attempts.run, attempts.from_step, attempts.layout, attempts.config.trainer
    origin = "from the start model" if step is None else f"from the checkpoint of step {step}"
    log.say(f"run {run.id} attempt {run.attempt} {origin}, output in {layout.root}, logs in {layout.logs}")
    is_on_gpu = bool(attempts.machine.gpus) and trainer.device != "cpu"
    log.say(f"computes in {describe_dtype(trainer.model.compute_dtype, attempts.machine, is_on_gpu=is_on_gpu)}")
    for notice in attempts.planned.notices:
        log.say(f"notice: {notice}")
