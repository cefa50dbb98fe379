"""Leads a run of several nodes: waits for the others, and plans what each of them starts."""

import os
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from trivet.cluster.addresses import interface_of, own_address
from trivet.config.layout import RunLayout
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.dependencies import own_version
from trivet.errors import ConfigError, NodesMissing
from trivet.launcher.node_plan import Node, plan_over_nodes
from trivet.launcher.nodes.control import ControlServer
from trivet.launcher.nodes.host import NodeHost
from trivet.launcher.nodes.identity import NodeIdentity
from trivet.launcher.nodes.join import digest_config, read_control
from trivet.launcher.nodes.lease import HeadLease
from trivet.launcher.nodes.messages import Control
from trivet.launcher.nodes.registry import NodeRegistry
from trivet.launcher.placement import HEAD, place
from trivet.launcher.plan import RunPlan
from trivet.launcher.processes import LocalHost
from trivet.machine import Machine
from trivet.process.signals import Interrupts
from trivet.process.sockets import ReservedPorts
from trivet.secret import RunSecret
from trivet.storage.durable import write_json_atomically
from trivet.wire.versions import Step

_POLL_INTERVAL_S = 0.2


@dataclass(slots=True, kw_only=True)
class Lead:
    """The nodes of a run, as the first of them sees them."""

    host: NodeHost
    own: Node
    python: str
    known: dict[int, Node]
    """Every node as it was when it was connected last."""
    exit_code: int = 1
    """What the other nodes are told at the end; 1 for a run that does not come to set it."""

    def plan(self, config: RLConfig, run: RunIdentity, resume_step: Step | None) -> RunPlan:
        """Plan an attempt on the nodes that are there.

        Raises:
            ConfigError: as `plan_over_nodes`.
        """
        self.known |= {HEAD: self.own, **self.host.nodes()}
        lost = self.host.lost_nodes() if config.deployment.min_train_nodes is not None else frozenset[int]()
        return plan_over_nodes(
            config,
            placement=place(config, lost=lost),
            nodes=self.known,
            python=self.python,
            run=run,
            resume_step=resume_step,
        )


@contextmanager
def lead(
    config: RLConfig,
    *,
    layout: RunLayout,
    identity: NodeIdentity,
    run: RunIdentity,
    secret: RunSecret,
    local: LocalHost,
    machine: Machine,
    lease: HeadLease,
) -> Generator[Lead, None, None]:
    """Listen for the other nodes, and wait until all are there and hold their ports.

    Raises:
        NodesMissing: some did not come within `deployment.start_timeout_s`.
        ConfigError: this node's address cannot be told, its ports cannot be held, or another node leads the run.
    """
    deployment, placement = config.deployment, place(config)
    address = deployment.host or own_address(identity.head)
    with ExitStack() as held:
        ports = held.enter_context(ReservedPorts())
        own = Node(
            index=HEAD,
            name=os.uname().nodename,
            host=address,
            interface=interface_of(address),
            machine=machine,
            ports={name: ports.reserve(address, preferred=0) for name in placement.listeners_on(HEAD)},
        )
        wanted = {node: placement.listeners_on(node) for node in range(placement.num_nodes) if node != HEAD}
        registry = NodeRegistry(
            {node: deployment.gpus_per_node if placement.roles_on(node) else 0 for node in wanted},
            config_digest=digest_config(config),
            version=own_version(),
            lost_after_s=deployment.lost_after_s,
        )
        port = ports.reserve(address, preferred=deployment.port)
        if deployment.port not in (0, port):
            raise ConfigError(
                f"port {deployment.port} of {address} is in use: end the program that uses it, or change deployment.port"
            )
        held.enter_context(ControlServer(registry, host=address, port=port, secret=secret, may_answer=lambda: lease.may_answer))
        control = Control(run=run.id, attempt=run.attempt, host=address, port=port)
        held.callback(_remove_control, layout, control)
        write_json_atomically(layout.control, control)
        host = NodeHost(local, registry, wanted=wanted, check=lease.check)
        print(f"node 0 at {address}:{port} waits for {len(wanted)} more", file=sys.stderr)
        leader = Lead(host=host, own=own, python=local.python, known={})
        # Whoever leads in this node's place needs the other nodes: they find it when they miss this one.
        held.callback(lambda: None if lease.is_lost or lease.has_expired else host.end_run(leader.exit_code))
        _await_nodes(host, registry, config, where=f"{address}:{port}")
        leader.known = {HEAD: own, **host.nodes()}
        yield leader


def _await_nodes(host: NodeHost, registry: NodeRegistry, config: RLConfig, *, where: str) -> None:
    timeout_s = config.deployment.start_timeout_s
    deadline = time.monotonic() + timeout_s
    said = set[str]()
    with Interrupts(clock=time.monotonic) as interrupts:
        while missing := host.lost_nodes():
            if interrupts.first is not None:
                raise SystemExit(128 + interrupts.first)
            problems = registry.problems(now=time.monotonic())
            for problem in sorted(set(problems) - said):
                print(f"node 0: {problem}", file=sys.stderr)
            said |= set(problems)
            if time.monotonic() > deadline:
                reason = f": {'; '.join(problems)}" if problems else ""
                raise NodesMissing(
                    f"node {', '.join(map(str, sorted(missing)))} did not come within {timeout_s:g} s "
                    f"(deployment.start_timeout_s){reason}; each node runs the same command, sees "
                    f"{config.output_dir} and reaches {where}"
                )
            time.sleep(_POLL_INTERVAL_S)


def _remove_control(layout: RunLayout, control: Control) -> None:
    """Remove what `lead` wrote, and nothing that another first node wrote since."""
    found = read_control(layout)
    if found is not None and found.control == control:
        layout.control.unlink(missing_ok=True)
