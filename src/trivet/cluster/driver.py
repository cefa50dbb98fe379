"""Leads a run over several nodes: places them on a Ray cluster, waits until they are there, and plans what each of them starts."""

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trivet.cluster.bundles import BundleGroup, group_bundles
from trivet.cluster.guard import DriverGuard
from trivet.cluster.host import ClusterHost
from trivet.cluster.messages import ActorSettings, NodeFacts
from trivet.cluster.own_directory import read_files
from trivet.cluster.table import NodeTable
from trivet.config.layout import RunLayout
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.dependencies import own_version
from trivet.errors import ConfigError, NodesMissing
from trivet.launcher.node_plan import Node, plan_over_nodes
from trivet.launcher.placement import nodes_with_own_directory, place, required_nodes
from trivet.launcher.plan import RunPlan
from trivet.process.signals import Interrupts
from trivet.wire.versions import Step

_POLL_INTERVAL_S = 0.2


@dataclass(slots=True, kw_only=True)
class Driver:
    """The nodes of a run, as its driver sees them."""

    host: ClusterHost
    python: str
    known: dict[int, Node] = field(default_factory=dict[int, Node])
    """Every node as it was when it was there last."""

    def plan(self, config: RLConfig, run: RunIdentity, resume_step: Step | None) -> RunPlan:
        """Plan an attempt on the nodes that are there.

        Raises:
            ConfigError: as `plan_over_nodes`.
        """
        self.known |= self.host.nodes()
        lost = self.host.lost_nodes() if config.deployment.min_train_nodes is not None else frozenset[int]()
        placement = place(config, lost=lost, known=self.known)
        return plan_over_nodes(
            config, placement=placement, nodes=self.known, python=self.python, run=run, resume_step=resume_step
        )


@contextmanager
def lead(
    config: RLConfig, *, layout: RunLayout, run: RunIdentity, python: str, touch_lock: Callable[[], None]
) -> Generator[Driver, None, None]:
    """Place the nodes of a run on the Ray cluster, and wait until all are there and hold their ports.

    Args:
        touch_lock: shows that the output directory answers, and that this process still holds its lock.

    Raises:
        NodesMissing: some did not come within `deployment.start_timeout_s`.
        ConfigError: there is no cluster, it is open to strangers, or a machine does not fit the run.
    """
    # imported here, because Ray reads variables that `connect` sets when it is imported
    from trivet.cluster.ray_cluster import connect, describe_resources, draining_machines, place_groups, resources_of

    deployment, placement = config.deployment, place(config)
    with ExitStack() as held:
        lost_after_s = deployment.lost_after_s
        address = held.enter_context(connect(deployment.ray, namespace=run.id, lost_after_s=lost_after_s))
        from trivet.cluster.exchange import Exchange

        table = NodeTable(
            {node: placement.possible_listeners_on(node) for node in range(placement.num_nodes)}, lost_after_s=lost_after_s
        )
        asked = {"the Ray cluster": lambda: table.note_draining(draining_machines()), "output_dir": touch_lock}
        guard = held.enter_context(DriverGuard(asked, lost_after_s=lost_after_s))
        own_directories = nodes_with_own_directory(config)
        machine = resources_of(address) if own_directories else {}
        groups = list(group_bundles(deployment, placement, address=address, machine=machine))
        placed = place_groups(groups)
        settings = ActorSettings(
            node=0,
            working_dir=Path.cwd(),
            output_dir=layout.root,
            driver_host=address,
            lost_after_s=lost_after_s,
            does_log_json=config.log.json_logging,
            own_directories=own_directories,
        )
        host = ClusterHost(table, check=guard.check, read_files=partial(read_files, layout=layout, nodes=own_directories))
        check = partial(check_machine, settings=settings)
        held.enter_context(Exchange(table, placed, settings, check=check, fail=guard.fail, say=_say))
        _await_nodes(host, table, config, groups=groups, describe=describe_resources)
        host.joined_nodes()
        yield Driver(host=host, python=python)


def _await_nodes(
    host: ClusterHost,
    table: NodeTable,
    config: RLConfig,
    *,
    groups: Sequence[BundleGroup],
    describe: Callable[[], str],
) -> None:
    timeout_s = config.deployment.start_timeout_s
    deadline = time.monotonic() + timeout_s
    required = required_nodes(config)
    _say(f"waiting for {len(required)} nodes on the Ray cluster")
    with Interrupts(clock=time.monotonic) as interrupts:
        while missing := required & host.lost_nodes():
            if interrupts.first is not None:
                raise SystemExit(128 + interrupts.first)
            if time.monotonic() > deadline:
                wanted = "; ".join(group.describe() for group in groups if not missing.isdisjoint(group.nodes))
                reasons = "".join(f"; node {node}: {problem}" for node, problem in table.problems().items())
                raise NodesMissing(
                    f"no place for node {', '.join(map(str, sorted(missing)))} within {timeout_s:g} s "
                    f"(deployment.start_timeout_s): the run wants {wanted}; free in the cluster: {describe()}{reasons}"
                )
            time.sleep(_POLL_INTERVAL_S)


def check_machine(node: int, facts: NodeFacts, *, settings: ActorSettings) -> None:
    """Refuse a machine that does not fit the run, and warn of one that would slow it down.

    Raises:
        ConfigError: it has another version, or does not share the working or the output directory, and has none of its own.
    """
    if facts.version != own_version():
        raise ConfigError(
            f"node {node} ({facts.name}) has trivet {facts.version}, this machine {own_version()}: install one version on all"
        )
    is_sharing = node not in settings.own_directories
    if is_sharing and not facts.has_working_dir:
        raise ConfigError(
            f"node {node} ({facts.name}) has no directory {str(Path.cwd())!r}: start the command in a directory that is on every"
            " machine"
        )
    if is_sharing and not facts.does_see_lock:
        raise ConfigError(
            f"node {node} ({facts.name}) does not see that this process has locked {str(settings.output_dir)!r}: mount the shared"
            " file system so that locks hold between machines, or choose an output_dir where they do"
        )
    if facts.niceness > 0:
        _say(f"WARNING node {node} ({facts.name}) has niceness {facts.niceness}: start Ray with RAY_worker_niceness=0")


def _say(message: str) -> None:
    print(f"rl: {message}", file=sys.stderr)
