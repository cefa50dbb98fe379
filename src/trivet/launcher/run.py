"""Takes a run from its configuration to its end: checks it, locks the output directory, starts the roles and supervises them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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
from trivet.errors import ConfigError, NodesMissing
from trivet.launcher.gpu_shares import describe_memory, require_shared_gpu, share_gpus
from trivet.launcher.logs import RunLog
from trivet.launcher.placement import HEAD, describe_placement, place
from trivet.launcher.plan import Ports, RunPlan, plan, trainer_process
from trivet.launcher.processes import LocalHost, ProcessHost, role_environment
from trivet.launcher.run_directory import RunDirectory, Scratch, wait_of_job
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.supervisor import Supervisor
from trivet.machine import Machine, inspect_machine
from trivet.process.lifetime import adopt_orphans, module_command, tied_command
from trivet.process.lock import DEAD_MACHINE_S, LockWait
from trivet.process.signals import show_stacks_on_signal
from trivet.process.sockets import ReservedPorts
from trivet.schedulers.node_variables import is_restarted_job
from trivet.secret import find_secret, share_secret
from trivet.storage.durable import write_private
from trivet.transport.recording import require_replayable
from trivet.wire.versions import Step

if TYPE_CHECKING:
    from trivet.launcher.nodes.identity import NodeIdentity
    from trivet.launcher.nodes.lease import HeadLease

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


def start(config: RLConfig) -> int:
    """Run `config`, which is resolved and checked, to its end. On a node other than the first, take part in the run.

    Returns:
        The exit code of the command.
    """
    if config.trainer.bench is not None:  # a benchmark runs the trainer's ranks alone, on the devices of the run's trainer
        machine = inspect_machine()
        with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
            file = Path(scratch) / "trainer.toml"
            write_private(file, to_toml(config.trainer))
            spec = trainer_process(config, sys.executable, file, share_gpus(config, machine.gpus), machine)
            return subprocess.run(spec.argv, env={**spec.env_defaults, **os.environ, **spec.env}, check=False).returncode
    if not config.deployment.is_multi_node or config.deployment.engine == "ray":
        return _run(config, identity=None)
    from trivet.launcher.nodes import identity, join  # imported here because a run of one node needs no sockets

    node = identity.identify_node(config.deployment, os.environ)
    return _run(config, identity=node) if node.index == HEAD else join.join(config, node)


def _run(config: RLConfig, *, identity: "NodeIdentity | None") -> int:
    """Run as the only node (`identity` is None) or as the first of several; return the exit code."""
    show_stacks_on_signal()
    is_on_ray = config.deployment.is_multi_node and config.deployment.engine == "ray"
    layout, ckpt, machine = RunLayout(config.output_dir), config.trainer.ckpt, inspect_machine()
    with ExitStack() as held:
        lease = _open_lease(config, layout, held) if identity is not None else None
        directory = held.enter_context(RunDirectory(layout, wait=lock_wait(config, lease, environ=os.environ)))
        scratch = held.enter_context(Scratch(layout.scratch_note))
        if lease is not None:
            held.enter_context(lease)
        step = directory.choose_start(resume_step=ckpt.resume_step, resume_from=ckpt.resume_from, does_clean=config.clean)
        if config.clean:
            check_environments(config)  # before earlier results are removed: if it fails, they are still there
        is_resumed = step is not None and ckpt.resume_from is None
        run = directory.identify(is_resumed=is_resumed)
        if not is_resumed and (identity is not None or is_on_ray):
            directory.renew_secret()  # now and not in `begin`, because the other nodes need the new run's secret to join
        local = LocalHost(
            python=sys.executable, environ=role_environment(os.environ) | share_secret(layout, environ=os.environ)
        )
        leader = head = None
        if is_on_ray:
            from trivet.cluster import driver  # imported here for the reason given in `start`

            leader = held.enter_context(
                driver.lead(config, layout=layout, run=run, python=sys.executable, touch_lock=directory.touch_lock)
            )
        elif identity is not None and lease is not None:
            from trivet.launcher.nodes.lead import lead  # imported here for the reason given in `start`

            secret = find_secret(layout, environ=os.environ)
            leader = head = held.enter_context(
                lead(
                    config, layout=layout, identity=identity, run=run, secret=secret, local=local, machine=machine, lease=lease
                )
            )
        ports = _reserve_ports(config, held.enter_context(ReservedPorts())) if leader is None else None

        def make_plan(config: RLConfig, run: RunIdentity, resume_step: Step | None) -> RunPlan:
            if leader is not None:
                return leader.plan(config, run, resume_step)
            assert ports is not None
            return plan(config, machine=machine, python=local.python, run=run, ports=ports, resume_step=resume_step)

        attempts = Attempts(
            config=config,
            directory=directory,
            run=run,
            from_step=step,
            make_plan=make_plan,
            scratch=None if is_on_ray else scratch,
        )
        attempts.begin()
        record_choice(layout, config)
        log = held.enter_context(_open_log(attempts, machine))
        adopt_orphans()
        host: ProcessHost = leader.host if leader is not None else local
        exit_code = Supervisor(attempts, host=host, log=log).run()
        if head is not None:
            head.exit_code = exit_code
        if exit_code == 0:
            log.say(f"weights: {layout.weights}  metrics: {layout.metrics}  rollouts: {layout.root / 'rollouts'}")
        return exit_code


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


def _open_lease(config: RLConfig, layout: RunLayout, held: ExitStack) -> "HeadLease":
    """Return the lease with which a node leads the run. The node has not taken it yet; a guard watches it until `held` closes."""
    from trivet.launcher.nodes.lease import HeadLease  # imported here for the reason given in `start`
    from trivet.launcher.nodes.lease_guard import LeaseGuard

    lost_after_s = config.deployment.lost_after_s
    lease = HeadLease(layout.lease, lost_after_s=lost_after_s, is_retried=is_restarted_job(os.environ))
    held.enter_context(LeaseGuard(lease, lost_after_s=lost_after_s))
    return lease


def lock_wait(config: RLConfig, lease: "HeadLease | None", *, environ: Mapping[str, str]) -> LockWait:
    """Return how long to wait while another process holds the output directory, and the error after that time.

    In a run over several nodes, the holder may be a first node whose machine died. Then the file system keeps the lock for a while,
    and the lease shows whether that node still leads.
    """
    if lease is None:
        return wait_of_job(environ)
    timeout_s = max(config.deployment.lost_after_s, DEAD_MACHINE_S)

    def make_error(holder: str) -> NodesMissing:
        return NodesMissing(
            f"{holder}; no other first node has renewed its lease for {timeout_s:g} s, so the file system may have kept the lock"
            " of a machine that died: in that case start the run again"
        )

    return LockWait(timeout_s=timeout_s, error=make_error, on_wait=lease.look)


def _reserve_ports(config: RLConfig, reserved: ReservedPorts) -> Ports:
    """Reserve a port for each process of the run that listens; 0 for a server that the run does not start."""

    def reserve(server: InferenceConfig | None) -> int:
        return reserved.reserve(server.server.host, preferred=server.server.port) if server is not None else 0

    transport = config.trainer.rollout_transport
    return Ports(
        inference=reserve(config.inference),
        transport=reserved.reserve(transport.host, preferred=transport.port),
        teacher=reserve(config.teacher_inference),
    )
