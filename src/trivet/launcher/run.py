"""Takes a run from its configuration to its end: checks it, locks the output directory, starts the roles and supervises them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trivet.checkpoints.commit import resolve_resume_step, verify_checkpoint
from trivet.checkpoints.resume import choose_fork
from trivet.config.compute_dtype import describe_dtype, record_choice
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import AdvantageConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.environments.packages.interpreters import describe_interpreter, require_environment
from trivet.environments.settings import run_settings
from trivet.environments.workers.pool import require_loadable
from trivet.errors import ConfigError
from trivet.launcher.forecast import describe_forecast, forecast_run
from trivet.launcher.gpu_shares import describe_memory, require_shared_gpu, share_gpus
from trivet.launcher.logs import RunLog
from trivet.launcher.placement import describe_placement, place
from trivet.launcher.plan import Ports, RunPlan, needs_origin, plan, trainer_process
from trivet.launcher.processes import LocalHost, ProcessHost, role_environment
from trivet.launcher.run_directory import RunDirectory, Scratch, wait_of_job
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.supervisor import Supervisor
from trivet.machine import Machine, inspect_machine, total_memory_gib
from trivet.process.lifetime import adopt_orphans, module_command, tied_command
from trivet.process.signals import show_stacks_on_signal
from trivet.process.sockets import ReservedPorts
from trivet.secret import share_secret
from trivet.storage.durable import write_private
from trivet.transport.recording import require_replayable
from trivet.wire.versions import Step

_ADVANTAGE_TIMEOUT_S = 120.0
"""Limit of the trial of a custom advantage function, which includes the imports of the user's module."""


def check(config: RLConfig) -> None:
    """Check that this machine can run `config`. Nothing is written, and every process that is started has ended on return.

    Raises:
        EnvironmentLoadError: an environment is not installed.
        ConfigError: a GPU id does not exist, a server that should sleep shares no GPU with the trainer, a custom advantage function
            does not work, or a record cannot be replayed.
    """
    if config.trainer.bench is not None:
        share_gpus(config, inspect_machine().gpus)
        return
    for name, env in config.orchestrator.environments.items():
        require_environment(env)
        print(f"environment {name}: runs in {describe_interpreter(env)}", file=sys.stderr)
    if config.deployment.is_multi_node:
        for line in describe_placement(place(config)):
            print(line, file=sys.stderr)
    else:
        shares = share_gpus(config, inspect_machine().gpus)
        require_shared_gpu(config, shares)
        for line in describe_memory(config, shares):
            print(line, file=sys.stderr)
    require_advantage(config.orchestrator.advantage)
    require_replayable(config.orchestrator)
    if config.orchestrator.replay is not None:
        print(
            f"replay: trains on the rollouts in {config.orchestrator.replay}; no inference server is started", file=sys.stderr
        )


def check_resume(config: RLConfig) -> None:
    """Check that the checkpoint that `config` resumes from exists and is whole. Nothing is written.

    Raises:
        ConfigError: there is no such checkpoint.
        CheckpointError: a file of it is missing or altered.
    """
    ckpt, layout = config.trainer.ckpt, RunLayout(config.output_dir)
    if ckpt.resume_from is not None:
        choose_fork(layout, source=ckpt.resume_from, resume_step=ckpt.resume_step)
    elif ckpt.resume_step is not None:
        verify_checkpoint(layout, resolve_resume_step(layout, ckpt.resume_step))


def require_advantage(config: AdvantageConfig) -> None:
    """Try the user's custom advantage function on a few rewards, in a process of its own. Built-in functions are not tried.

    Raises:
        ConfigError: the function cannot be imported, or returns values that cannot be trained on.
    """
    if config.type != "custom":
        return
    try:
        done = subprocess.run(
            tied_command(module_command("trivet.orchestrator.advantage")),
            input=config.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=_ADVANTAGE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(
            f'orchestrator.advantage.import_path "{config.import_path}" was tried and did not end within '
            f"{_ADVANTAGE_TIMEOUT_S:.0f} s; does its module wait for something?"
        ) from exc
    if done.returncode:
        raise ConfigError(done.stderr.strip())


def check_environments(config: RLConfig) -> None:
    """Load the environments of a run once, as a check. It takes seconds, nearly all of them for imports.

    Raises:
        EnvironmentLoadError: an environment cannot be loaded, or has no data.
    """
    if config.trainer.bench is None:
        settings, trained = list(run_settings(config.orchestrator).values()), [env.label for env in config.orchestrator.env]
        require_loadable(settings, trained=trained, timeout_s=config.orchestrator.env_start_timeout_s)


def print_forecast(config: RLConfig) -> None:
    """Print what the run is expected to take, if the model's files are on this machine."""
    machine = inspect_machine()
    if (found := forecast_run(config, machine)) is not None:
        for line in describe_forecast(found, available_gib=None if machine.gpus else total_memory_gib()):
            print(line, file=sys.stderr)


def start(config: RLConfig) -> int:
    """Run `config`, which is resolved and checked, to its end and return the exit code of the command."""
    if config.trainer.bench is not None:  # a benchmark runs the trainer's ranks alone, on the devices of the run's trainer
        machine = inspect_machine()
        with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
            file = Path(scratch) / "trainer.toml"
            write_private(file, to_toml(config.trainer))
            spec = trainer_process(config, sys.executable, file, share_gpus(config, machine.gpus), machine)
            return subprocess.run(spec.argv, env={**spec.env_defaults, **os.environ, **spec.env}, check=False).returncode
    show_stacks_on_signal()
    layout, ckpt, machine = RunLayout(config.output_dir), config.trainer.ckpt, inspect_machine()
    with ExitStack() as held:
        directory = held.enter_context(RunDirectory(layout, wait=wait_of_job(os.environ)))
        scratch = held.enter_context(Scratch(layout.scratch_note))
        step = directory.choose_start(resume_step=ckpt.resume_step, resume_from=ckpt.resume_from, does_clean=config.clean)
        if config.clean:
            check_environments(config)  # before earlier results are removed: if it fails, they are still there
        is_resumed = step is not None and ckpt.resume_from is None
        run = directory.identify(is_resumed=is_resumed)
        if not is_resumed:
            directory.renew_secret()  # before `begin`, because the actors of nodes read it when they start
        host, make_plan = _open_host(config, directory, run, machine, held)
        attempts = Attempts(
            config=config,
            directory=directory,
            run=run,
            from_step=step,
            make_plan=make_plan,
            scratch=None if config.deployment.is_multi_node else scratch,
        )
        attempts.begin()
        record_choice(layout, config)
        log = held.enter_context(_open_log(attempts, machine))
        adopt_orphans()
        exit_code = Supervisor(attempts, host=host, log=log).run()
        if exit_code == 0:
            log.say(f"weights: {layout.weights}  metrics: {layout.metrics}  rollouts: {layout.root / 'rollouts'}")
        return exit_code


def _open_host(
    config: RLConfig, directory: RunDirectory, run: RunIdentity, machine: Machine, held: ExitStack
) -> tuple[ProcessHost, Callable[[RLConfig, RunIdentity, Step | None], RunPlan]]:
    """Return what starts the run's processes, and the function that plans an attempt on it, until `held` closes."""
    layout = directory.layout
    if config.deployment.is_multi_node:
        from trivet.cluster.driver import lead  # imported here because a run on one machine needs no Ray

        driver = held.enter_context(
            lead(config, layout=layout, run=run, python=sys.executable, touch_lock=directory.lock.touch)
        )
        return driver.host, driver.plan
    environ = role_environment(os.environ) | share_secret(layout, environ=os.environ)
    ports = _reserve_ports(config, held.enter_context(ReservedPorts()))

    def make_plan(config: RLConfig, run: RunIdentity, resume_step: Step | None) -> RunPlan:
        return plan(config, machine=machine, python=sys.executable, run=run, ports=ports, resume_step=resume_step)

    return LocalHost(python=sys.executable, environ=environ), make_plan


@contextmanager
def _open_log(attempts: Attempts, machine: Machine) -> Generator[RunLog, None, None]:
    """Open the launcher's log, with lines about the start of the run."""
    config, layout, run, step = attempts.config, attempts.layout, attempts.run, attempts.from_step
    layout.logs.mkdir(parents=True, exist_ok=True)
    with layout.log_file("rl.log").open("a") as file:
        log = RunLog(sys.stdout, file, as_json=config.log.json_logging)
        origin = "from the start model" if step is None else f"from the checkpoint of step {step}"
        log.say(f"run {run.id} attempt {run.attempt} {origin}, output in {layout.root}, logs in {layout.logs}")
        is_on_gpu = bool(machine.gpus) and config.trainer.device != "cpu"
        log.say(f"computes in {describe_dtype(config.trainer.model.compute_dtype, machine, is_on_gpu=is_on_gpu)}")
        for notice in (*attempts.planned.notices, *attempts.notices):
            log.say(f"notice: {notice}")
        yield log


def _reserve_ports(config: RLConfig, reserved: ReservedPorts) -> Ports:
    """Reserve a port for each process of the run that listens; 0 for a server that the run does not start."""

    def reserve(server: InferenceConfig | None) -> int:
        return reserved.reserve(server.server.host, preferred=server.server.port) if server is not None else 0

    transport, origin = config.trainer.rollout_transport, config.trainer.weights.origin
    return Ports(
        inference=reserve(config.inference),
        transport=reserved.reserve(transport.host, preferred=transport.port),
        teacher=reserve(config.teacher_inference),
        origin=reserved.reserve(origin.host, preferred=origin.port) if needs_origin(config) else 0,
    )
