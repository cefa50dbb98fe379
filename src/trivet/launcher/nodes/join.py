"""Joins a run as a node that is not the first: finds the head, introduces this node, and is its agent until the run is over."""

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.cluster.addresses import address_towards, interface_of
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.rl import RLConfig
from trivet.dependencies import own_version
from trivet.errors import ConfigError, NodesMissing, TrivetError
from trivet.launcher.logs import RunLog
from trivet.launcher.nodes.agent import NodeAgent
from trivet.launcher.nodes.control import ControlClient
from trivet.launcher.nodes.head_contact import HeadContact
from trivet.launcher.nodes.identity import NodeIdentity
from trivet.launcher.nodes.lease import Lease, read_lease
from trivet.launcher.nodes.messages import Control, Hello, Orders, Refused
from trivet.launcher.processes import LocalHost, role_environment
from trivet.launcher.run_directory import Scratch
from trivet.machine import inspect_machine
from trivet.process.lifetime import adopt_orphans
from trivet.process.lock import holder_of
from trivet.process.signals import Interrupts, show_stacks_on_signal
from trivet.process.sockets import ReservedPorts
from trivet.schedulers.node_variables import NODE_BASE
from trivet.secret import RunSecret, read_secret, secret_file, share_secret
from trivet.storage.durable import DECODE_ERRORS, hash_bytes, is_listed

_POLL_INTERVAL_S = 0.1
_BEAT_INTERVAL_S = 0.5
"""The head learns of an exit at once; anything else may be this late."""
_SEEK_INTERVAL_S = 1.0
"""Between two looks at .control.json while there is no contact."""


def digest_config(config: RLConfig) -> str:
    """Return what all nodes of a run have in common: the configuration without what each node says of itself."""
    deployment = config.deployment.model_copy(update={"node_rank": None, "host": None})
    return hash_bytes(to_toml(config.model_copy(update={"deployment": deployment})).encode()).xxh3_128


def join(config: RLConfig, identity: NodeIdentity) -> int:
    """Be the agent of a node until the run is over; returns 0 then, however the run ended.

    Raises:
        NodesMissing: the head did not come, or was lost.
        ConfigError: the head refuses this node.
    """
    show_stacks_on_signal()
    with ExitStack() as held:
        interrupts = held.enter_context(Interrupts(clock=time.monotonic))
        return _Membership(config, identity, interrupts=interrupts, held=held).run()


@dataclass(frozen=True, slots=True)
class _Head:
    """The head as this node knows it."""

    control: Control
    secret: str
    """The run's secret when .control.json was read, as a token: a new run has a new one."""


class _Membership:
    """This node's part in one run, over as many connections to the head as it takes."""

    def __init__(
        self,
        config: RLConfig,
        identity: NodeIdentity,
        *,
        interrupts: Interrupts,
        held: ExitStack,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._index = identity.index
        self._interrupts = interrupts
        self._held = held
        self._clock = clock
        self._layout = RunLayout(config.output_dir)
        self._agent: NodeAgent | None = None
        self._contact: HeadContact | None = None
        self._give_up_at = clock() + config.deployment.start_timeout_s
        self._last_refusal = ""
        self._lease: Lease | None = None
        """The head's lease, as this node saw it last."""
        self._instance = secrets.token_hex(8)

    def run(self) -> int:
        """Serve one head after another until one says that the run is over."""
        print(f"node {self._index}: waiting for the first node, in {self._layout.root}", file=sys.stderr)
        try:
            while True:
                head = self._await_head()
                if self._serve(head):
                    return 0
        finally:
            if self._agent is not None:
                self._agent.end_processes(timeout_s=self._config.shutdown_timeout_s)
                self._agent.close()

    def _await_head(self) -> _Head:
        while (head := read_control(self._layout)) is None:
            self._check_patience()
            time.sleep(_SEEK_INTERVAL_S)
        return head

    def _check_patience(self) -> None:
        """Raise when this node has to end: no head came, the one it had is gone, or a signal asks for the end."""
        now = self._clock()
        if self._interrupts.first is not None:  # no process of the run is left here
            raise SystemExit(128 + self._interrupts.first)
        lease, before = self._read_lease(), self._lease
        self._lease = lease or before
        if self._contact is not None and before is not None and self._lease != before:
            self._contact.noticed(now=now)
        if self._contact is not None and self._contact.must_end_agent(now=now):
            raise NodesMissing(
                f"node {self._index} has not heard from the first node for {2 * self._contact.lost_after_s:.0f} s "
                "(deployment.lost_after_s): its processes have ended"
            )
        if self._contact is None and now > self._give_up_at:
            reason = f": {self._last_refusal}" if self._last_refusal else ""
            raise NodesMissing(
                f"node {self._index} did not find the first node within {self._config.deployment.start_timeout_s:g} s "
                f"(deployment.start_timeout_s){reason}; all nodes must see {self._layout.root}"
            )

    def _read_lease(self) -> Lease | None:
        try:
            return read_lease(self._layout.lease)
        except OSError:  # the directory cannot be read now
            return None

    def _serve(self, head: _Head) -> bool:
        """Follow the head's orders; returns True when the run is over, False when contact has to be sought anew."""
        try:
            hello = self._introduce(head.control)
        except OSError:  # the name of the head is not known yet
            time.sleep(_SEEK_INTERVAL_S)
            self._check_patience()
            return False
        secret = RunSecret(bytes.fromhex(head.secret))
        with closing(ControlClient(host=head.control.host, port=head.control.port, secret=secret)) as client:
            if not self._is_welcomed(client, hello, head):
                return False
            return self._follow(client)

    def _introduce(self, control: Control) -> Hello:
        machine = inspect_machine()
        address = self._config.deployment.host or address_towards(control.host)
        return Hello(
            index=self._index,
            name=os.uname().nodename,
            host=address,
            interface=interface_of(address),
            gpus=machine.gpus,
            num_cpus=machine.num_cpus,
            instance=self._instance,
            version=own_version(),
            config_digest=digest_config(self._config),
            does_see_lock=_is_held(self._layout.lock),
        )

    def _is_welcomed(self, client: ControlClient, hello: Hello, head: _Head) -> bool:
        """Introduce this node until the head answers; returns False when another head is there, or this one refuses.

        Raises:
            ConfigError: it never will take this node.
            NodesMissing: it may take this node, which is a pod, when that is started again.
        """
        while True:
            sent_at = self._clock()
            client.send(hello)
            for answer in client.receive(timeout_s=_SEEK_INTERVAL_S):
                if isinstance(answer, Orders):
                    self._begin(hello, lost_after_s=answer.lost_after_s, sent_at=sent_at)
                    return True
                if answer.is_final:
                    raise refusal_error(answer, index=self._index, environ=os.environ)
                self._last_refusal = answer.reason
                time.sleep(_SEEK_INTERVAL_S)
            self._check_patience()
            if read_control(self._layout) != head:
                return False

    def _begin(self, hello: Hello, *, lost_after_s: float, sent_at: float) -> None:
        if self._contact is None:
            self._contact = HeadContact(lost_after_s=lost_after_s, now=sent_at)
        self._contact.begin(sent_at=sent_at)
        if self._agent is not None:
            self._agent.forget()
            return
        where = f"node {self._index} ({hello.name}) at {hello.host}, interface {hello.interface or 'unknown'}"
        print(where, file=sys.stderr)
        host = LocalHost(
            python=sys.executable,
            environ=role_environment(os.environ) | share_secret(self._layout, environ=os.environ),
        )
        adopt_orphans()
        self._agent = NodeAgent(
            self._index,
            host=host,
            bind=hello.host,
            ports=self._held.enter_context(ReservedPorts()),
            scratch=self._held.enter_context(Scratch(self._layout.scratch_note_of(self._index))),
            open_log=self._open_log,
        )

    def _open_log(self) -> RunLog:
        self._layout.logs.mkdir(parents=True, exist_ok=True)
        file = self._held.enter_context(self._layout.log_file(f"node_{self._index}.log").open("a"))
        return RunLog(sys.stdout, file, as_json=self._config.log.json_logging)

    def _follow(self, client: ControlClient) -> bool:
        """Say how this node stands and carry out orders, until the run is over, the head refuses, or is missed."""
        agent, contact = self._agent, self._contact
        assert agent is not None
        assert contact is not None
        due, exits = 0.0, agent.exits
        while True:
            now = self._clock()
            if now >= due or agent.exits != exits:
                due, exits = now + _BEAT_INTERVAL_S, agent.exits
                beat = agent.beat()
                contact.sent(beat.number, now=now)
                client.send(beat)
            for answer in client.receive(timeout_s=_POLL_INTERVAL_S):
                if isinstance(answer, Refused):
                    agent.end_processes(timeout_s=contact.stop_timeout_s)
                    return False
                contact.seen(answer.beat)
                agent.carry_out(answer)
            if agent.exit_code is not None:
                client.send(agent.beat())  # so that the head need not wait for it
                time.sleep(_POLL_INTERVAL_S)
                return True
            if contact.must_end_processes(now=self._clock()):
                # First, because the log is in the shared directory, which may be away with the first node.
                agent.end_processes(timeout_s=contact.stop_timeout_s)
                agent.say(
                    f"the first node was missed for {contact.lost_after_s / 2:.0f} s: the processes of this node have ended"
                )
                return False
            self._heed_signals(agent)

    def _heed_signals(self, agent: NodeAgent) -> None:
        """Tell the head of a first signal: it has its processes commit. A second one ends this node."""
        if self._interrupts.first is not None and not agent.is_leaving:
            agent.is_leaving = True
            agent.say("a signal asks for the end: the first node decides; a second signal ends this node now")
        if self._interrupts.first is not None and self._interrupts.is_repeated:
            raise SystemExit(128 + self._interrupts.first)


def refusal_error(refused: Refused, *, index: int, environ: Mapping[str, str]) -> TrivetError:
    """Return the error with which a node ends that the head will not take.

    A pod that reads what an earlier start of the job decided ends with a code for which Kubernetes starts it again.
    """
    is_retried = refused.is_old_start and NODE_BASE in environ
    kind = NodesMissing if is_retried else ConfigError
    return kind(f"node {index} is refused by the first node: {refused.reason}")


def _is_held(lock: Path) -> bool:
    """Return whether this node sees that a process holds the lock."""
    try:
        return holder_of(lock) is not None
    except OSError:  # the file system keeps no locks
        return False


def read_control(layout: RunLayout) -> _Head | None:
    """Return where the head listens; None while no run has said it."""
    try:
        secret = secret_file(layout, environ=os.environ)
        if not (is_listed(layout.control) and is_listed(secret)):
            return None
        return _Head(msgspec.json.decode(layout.control.read_bytes(), type=Control), read_secret(secret).token)
    except (OSError, ConfigError, *DECODE_ERRORS):
        return None
