"""The Ray actor of one node: runs the node's processes, and ends them when it misses the driver.

Ray places it, and Ray ends it with the driver. It never restarts it: two copies of a node must not run at once. Driver and actor
pass nothing but bytes, so neither unpickles what the other sends.
"""

import os
import sys
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import psutil
import ray

from trivet.cluster.addresses import interface_of
from trivet.cluster.fence import Fence, is_missed
from trivet.cluster.messages import LEAVING_FILE, ActorSettings, Desired, NodeFacts, Observed, decode, encode
from trivet.cluster.node_processes import NodeProcesses
from trivet.cluster.own_directory import OwnDirectory, scratch_note_of
from trivet.config.layout import SECRET_FILE, RunLayout
from trivet.dependencies import own_version
from trivet.launcher.logs import RunLog
from trivet.launcher.processes import LocalHost, role_environment
from trivet.launcher.run_directory import Scratch
from trivet.machine import inspect_machine
from trivet.process.lifetime import adopt_orphans, die_with_parent
from trivet.process.lock import holder_of
from trivet.process.sockets import ReservedPorts, address_towards
from trivet.secret import share_secret

_OBSERVE_INTERVAL_S = 0.5
"""The driver learns of an exit at once; anything else may be this late."""
_POLL_INTERVAL_S = 0.1
_ANSWER_WITHIN_S = 2.0
"""A call is answered by then, even if there is nothing new."""


class NodeActor:
    """One node of a run."""

    def __init__(self, settings: bytes) -> None:
        """Start the threads.

        Args:
            settings: an `ActorSettings`, as MessagePack.
        """
        self._settings = decode(settings, ActorSettings)
        with suppress(OSError):  # the driver refuses this machine
            os.chdir(self._settings.working_dir)
        self._layout = RunLayout(self._settings.output_dir)
        self._facts = self._find_facts()
        self._changed = threading.Condition()
        self._desired: Desired | None = None
        self._has_news = False
        """Whether `_keep` has not looked at `_desired` yet."""
        self._observed = (0.0, b"")
        """Time and bytes of the newest observed state."""
        self._contact_at: float | None = None
        """When the newest state was observed that the driver has received. None before the driver needs this node: it may have made
        the actor ahead of time."""
        die_with_parent()  # the raylet: nothing else ends the actor if all of Ray on this machine is killed
        adopt_orphans()
        threading.Thread(target=self._run, name="node-processes", daemon=True).start()
        lost_after_s = self._settings.lost_after_s
        Fence(self._is_driver_missed, lost_after_s=lost_after_s, on_end=self._note_fence)

    def _find_facts(self) -> NodeFacts:
        context, address = ray.get_runtime_context(), address_towards(self._settings.driver_host)
        return NodeFacts(
            name=os.uname().nodename,
            host=address,
            interface=interface_of(address),
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
            num_cpus=inspect_machine().num_cpus,
            version=own_version(),
            has_working_dir=Path.cwd() == self._settings.working_dir,
            does_see_lock=_is_held(self._layout.lock),
            ray_node=context.get_node_id(),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
        )

    def exchange(self, desired: bytes) -> bytes:
        """Take a `Desired`; return an `Observed` that is newer than the one that the driver has, once there is one.

        The answer is empty when there is none in time.
        """
        message = decode(desired, Desired)
        with self._changed:
            self._contact_at = max(self._contact_at or time.monotonic(), message.seen)
            if self._desired is None or message.number > self._desired.number:
                self._desired, self._has_news = message, True
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._observed[0] > message.seen, timeout=_ANSWER_WITHIN_S)
            observed_at, observed = self._observed
            return observed if observed_at > message.seen else b""

    def _run(self) -> None:
        """Keep the node as desired, to the end of the run. An error ends the actor: the driver makes another in its place."""
        try:
            with ExitStack() as held:
                processes = self._make_processes(held)
                self._keep(processes)
            self._publish(msgspec.structs.replace(processes.observe(), is_over=True))
        except BaseException:  # noqa: BLE001  # the process ends
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _make_processes(self, held: ExitStack) -> NodeProcesses:
        # The environment with which Ray was started. It changes variables of its workers, such as OMP_NUM_THREADS, which the
        # processes of a run must not inherit.
        self._environ = psutil.Process(os.getppid()).environ()
        environ = role_environment({name: value for name, value in self._environ.items() if not name.startswith("RAY_")})
        node, output_dir, own = self._settings.node, self._settings.output_dir, None
        if node in self._settings.own_directories:
            scratch = held.enter_context(Scratch(scratch_note_of(output_dir, node=node)))
            own = OwnDirectory(scratch.directory / "run", output_dir=output_dir)
            self._layout = own.layout
            environ[SECRET_FILE] = str(own.layout.secret)
        else:
            scratch = held.enter_context(Scratch(self._layout.scratch_note_of(node)))
            environ |= share_secret(self._layout, environ=self._environ)
        return NodeProcesses(
            host=LocalHost(python=sys.executable, environ=environ),
            facts=self._facts,
            ports=held.enter_context(ReservedPorts()),
            scratch=scratch,
            say=self._say,
            own=own,
        )

    def _keep(self, processes: NodeProcesses) -> None:
        exit_codes, due = processes.exit_codes, 0.0
        leaving_file = self._environ.get(LEAVING_FILE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news, timeout=_POLL_INTERVAL_S)
                desired, self._has_news = self._desired, False
            if desired is not None:
                due = 0.0 if processes.apply(desired) else due
                if desired.is_over:
                    processes.end_processes()
                    return
            if time.monotonic() < due and processes.exit_codes == exit_codes:
                continue
            processes.is_leaving = leaving_file is not None and Path(leaving_file).exists()
            exit_codes, due = processes.exit_codes, time.monotonic() + _OBSERVE_INTERVAL_S
            self._publish(processes.observe())

    def _publish(self, observed: Observed) -> None:
        with self._changed:
            self._observed = observed.observed_at, encode(observed)
            self._changed.notify_all()

    def _is_driver_missed(self) -> bool:
        contact_at, lost_after_s = self._contact_at, self._settings.lost_after_s
        return contact_at is not None and is_missed(contact_at, lost_after_s=lost_after_s, now=time.monotonic())

    def _note_fence(self) -> None:
        seconds = self._settings.lost_after_s / 2
        self._say(
            f"the driver was missed for {seconds:g} s (deployment.lost_after_s / 2): the processes of this node have ended"
        )

    def _say(self, message: str) -> None:
        """Write a line into the log of this node. The file is opened now, because the driver empties the directory at the start."""
        path = self._layout.log_file(f"node_{self._settings.node}.log")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            RunLog(sys.stdout, file, as_json=self._settings.does_log_json).say(message)


def _is_held(lock: Path) -> bool:
    """Return whether this node sees that a process holds the lock."""
    try:
        return holder_of(lock) is not None
    except OSError:  # the file system keeps no locks
        return False
