"""Runs a whole orchestrator in virtual time. Only servers, environments and the trainer are stand-ins.

Servers crash, come back empty, freeze and load slowly; environments fail and lose their worker; the trainer takes its time. All
of it follows one seed. The events are those of a real run, so the history checker can judge them.
"""

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.groups import make_sample
from trivet.algorithms.advantages import mean_baseline
from trivet.client.server_load import ServerLoad
from trivet.client.server_pool import ServerPool
from trivet.config.layout import RunLayout
from trivet.config.schema.inference import ClientConfig, ConcurrencyConfig, ElasticConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import CkptConfig
from trivet.errors import InferenceError, InferenceTimeout, RolloutFailed, ServerGone, WorkerLost
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.checkpoint import RunTotals
from trivet.orchestrator.dispatcher import ChangeEvent, Dispatcher
from trivet.orchestrator.load_watcher import LoadWatcher
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.sampler import Draw, ExampleSampler
from trivet.storage.durable import write_atomically
from trivet.weights.manifest import read_manifest
from trivet.weights.publish import publish
from trivet.wire.batches import Batch
from trivet.wire.events import Event, Publish, Start, Train
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import FetchablePolicy, PolicyStatus, PolicyVersion, Step, TransferRound

EXAMPLES = {"toy": [f"hash-{index}" for index in range(13)]}
START_DIGEST = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The events of one simulated run, planned before it starts."""

    seed: int
    num_servers: int = 1
    max_steps: int = 5
    batch_size: int = 8
    rollouts_per_example: int = 2
    max_async_level: int = 1
    is_strict: bool = False
    max_off_policy_steps: int = 8
    oversampling_factor: float = 1.0
    crash_every_s: float | None = None
    """Mean time between crashes of a server, or None for none."""
    freeze_every_s: float | None = None
    """Mean time between two moments at which a server stops answering."""
    trouble_ends_s: float = 150.0
    """Time after which nothing breaks any more, so that the run can end."""
    failed_share: float = 0.0
    """Share of groups whose environment raises."""
    lost_share: float = 0.0
    """Share of groups whose worker dies."""
    slow_share: float = 0.0
    """Share of groups that take a hundred times as long."""
    pin_every_s: float | None = None
    """Mean time between two holders that pin the policy."""
    train_s: float = 3.0
    group_s: float = 2.0
    is_even: bool = False
    """Whether trainer, groups and loads take exactly their time, instead of a random one around it."""
    do_groups_vary: bool = False
    """Whether groups take a random time in an even run too, from a fifth of theirs to twice as long."""
    load_s: float | None = None
    """Time in which a server loads a policy; unset: a random one, or a tenth of a second in an even run."""
    are_servers_named: bool = False
    """Whether a file names the servers (`SimulatedRun.name_servers`), as a launcher's does."""
    poll_factor: float = 10.0
    """Factor by which the watcher polls less often. A poll takes no virtual time, but real time."""


class SimulatedServer:
    """A stand-in for an `InferenceClient` and for the server behind it."""

    def __init__(self, base_url: str, rng: random.Random, *, load_s: float | None = None) -> None:
        """
        Args:
            load_s: time to load a policy; unset: a random one.
        """
        self.base_url = base_url
        self._rng = rng
        self.load_s = load_s
        self.status = PolicyStatus(version=PolicyVersion(0), digest=START_DIGEST)
        self.life = 0
        """Counts the server's starts."""
        self.is_down = False
        self.is_frozen = False
        self.num_running = 0
        self.kv_usage = 0.5

    async def wait_ready(self, timeout_s: float) -> None:
        await self.check_health(timeout_s=timeout_s)

    async def check_health(self, *, timeout_s: float) -> None:
        await self._answer(timeout_s)

    async def served_policy(self, *, timeout_s: float | None = None) -> PolicyStatus:
        await self._answer(timeout_s or 300.0)
        return self.status

    async def update_weights(self, directory: Path, *, transfer: TransferRound | None = None) -> PolicyStatus:
        await self._answer(300.0)
        manifest = read_manifest(directory)
        await self._work(self._rng.uniform(0.1, 3.0) if self.load_s is None else self.load_s)
        self.status = PolicyStatus(version=manifest.version, digest=manifest.digest)
        await self._answer(300.0)
        return self.status

    async def fetch_weights(self, policy: FetchablePolicy) -> PolicyStatus:
        await self._answer(300.0)
        await self._work(self.load_s or 1.0)
        self.status = PolicyStatus(version=policy.version, digest=policy.digest)
        return self.status

    async def sleep(self) -> None:
        await self._answer(300.0)
        self.status = PolicyStatus(version=self.status.version, digest=self.status.digest, asleep=True)

    async def reload_weights(self) -> PolicyStatus:
        await self._answer(300.0)
        self.status = PolicyStatus(version=PolicyVersion(0), digest=START_DIGEST)
        return self.status

    async def server_load(self) -> ServerLoad:
        await self._answer(30.0)
        return ServerLoad(num_running=min(self.num_running, 4), num_waiting=0, num_preemptions=0, kv_usage=self.kv_usage)

    async def aclose(self) -> None:
        pass

    async def generate(self, seconds: float) -> list[PolicyVersion]:
        """Return the policy of each of a few tokens sampled over `seconds`."""
        self.num_running += 1
        try:
            versions: list[PolicyVersion] = []
            for _ in range(4):
                await self._work(seconds / 4)
                while self.is_frozen:
                    await self._work(1.0)
                versions.append(self.status.version)
            return versions
        finally:
            self.num_running -= 1

    async def crash(self, down_s: float) -> None:
        """Lose all work in progress. After `down_s` the server is back with the start model."""
        self.is_down, self.life = True, self.life + 1
        self.status = PolicyStatus(version=PolicyVersion(0), digest=START_DIGEST)
        await asyncio.sleep(down_s)
        self.is_down = False

    async def _work(self, seconds: float) -> None:
        life = self.life
        await asyncio.sleep(seconds)
        if self.is_down or self.life != life:
            raise ServerGone(f"{self.base_url} failed: ConnectError")

    async def _answer(self, timeout_s: float) -> None:
        await self._work(0.01)
        waited = 0.0
        while self.is_frozen:
            await self._work(1.0)
            waited += 1.0
            if waited > timeout_s:
                raise InferenceTimeout(f"{self.base_url} was not answered within {timeout_s:.0f} s")


class Recorder:
    """A stand-in for the loop's Telemetry that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[dict[str, float]] = []

    def write(self, event: Event, *, role: str) -> None:
        event.role, event.time = role, asyncio.get_running_loop().time()
        self.events.append(event)

    def write_event(self, event: Event) -> None:
        self.write(event, role="orchestrator")

    def write_step(self, step: int, values: dict[str, float]) -> None:
        self.steps.append(values)

    def show_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        pass


@dataclass(slots=True)
class SimulatedTrainer:
    """Acknowledges each batch at once, trains in its own time, and publishes."""

    plan: Plan
    layout: RunLayout
    published: Path
    """A directory with every policy, published beforehand."""
    recorder: Recorder
    rng: random.Random
    queue: asyncio.Queue[Batch] = field(default_factory=asyncio.Queue)

    async def say_alive(self, *, transfer: TransferRound | None = None) -> None:
        pass

    async def send(self, batch: Batch) -> None:
        await asyncio.sleep(0.05)
        self.queue.put_nowait(batch)

    async def run(self) -> None:
        while True:
            batch = await self.queue.get()
            await asyncio.sleep(self.plan.train_s * (1.0 if self.plan.is_even else self.rng.uniform(0.5, 1.5)))
            self.recorder.write(Train(step=batch.step, group_ids=batch.group_ids), role="trainer")
            ready = RunLayout(self.published).weights_step(batch.step)
            self.layout.weights_step(batch.step).symlink_to(ready)
            version = PolicyVersion(batch.step)
            manifest = read_manifest(ready)
            event = Publish(version=version, digest=manifest.digest, manifest_sha256=manifest.sha256)
            self.recorder.write(event, role="trainer")


def publish_policies(directory: Path, *, count: int) -> Path:
    """Publish policies 1 to `count`, to which simulated trainers make links."""
    for version in range(1, count + 1):
        publish(
            RunLayout(directory),
            version=PolicyVersion(version),
            run_id="simulated",
            write=lambda staging, version=version: (staging / "model.safetensors").write_bytes(bytes([version])) and None,
        )
    return directory


class SimulatedRun:
    def __init__(self, plan: Plan, *, directory: Path, published: Path) -> None:
        self.plan = plan
        self.recorder = Recorder()
        self._rng = random.Random(plan.seed)
        self._layout = RunLayout(directory)
        self._layout.weights.mkdir(parents=True)
        self._trainer = SimulatedTrainer(plan, self._layout, published, self.recorder, self._rng)
        urls = [f"http://server-{index}" for index in range(plan.num_servers)]
        self._servers_file = directory / "servers"
        self.name_servers(urls)
        load_s = plan.load_s or (0.1 if plan.is_even else None)
        self.servers = {url: SimulatedServer(url, self._rng, load_s=load_s) for url in urls}
        self.config = OrchestratorConfig(
            output_dir=directory,
            max_steps=plan.max_steps,
            batch_size=plan.batch_size,
            rollouts_per_example=plan.rollouts_per_example,
            oversampling_factor=plan.oversampling_factor,
            max_async_level=plan.max_async_level,
            strict_async_level=plan.is_strict,
            max_off_policy_steps=plan.max_off_policy_steps,
            max_fruitless_batches=10_000,
            client=ClientConfig(
                base_url=urls, elastic=ElasticConfig(servers_file=self._servers_file) if plan.are_servers_named else None
            ),
            ckpt=CkptConfig(),
            concurrency=ConcurrencyConfig(min_inflight=2),
        )
        self.loop = self._make_loop()

    @property
    def events(self) -> list[Event]:
        return self.recorder.events

    def name_servers(self, urls: Iterable[str]) -> None:
        """Tell an orchestrator with `are_servers_named` which servers there are."""
        write_atomically(self._servers_file, "\n".join(urls).encode())

    async def run(self) -> None:
        """Run with all troubles, to the last batch."""
        for role in ("trainer", "orchestrator"):
            self.recorder.write(Start(run_id="simulated", from_step=Step(0)), role=role)
        await self.pool.start()
        await self.loop.watcher.start_from_base(reload=True)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._trainer.run())]
            background += [tasks.create_task(trouble) for trouble in self._troubles()]
            await self.loop.run()
            for task in background:
                task.cancel()

    async def run_group(self, draw: Draw, base_url: str) -> list[Rollout]:
        plan, fate = self.plan, self._rng.random()
        seconds = plan.group_s * (self._rng.uniform(0.2, 2.0) if plan.do_groups_vary or not plan.is_even else 1.0)
        if self._rng.random() < plan.slow_share:
            seconds *= 100
        try:
            runs = [await self.servers[base_url].generate(seconds / 2) for _ in range(2)]
        except InferenceError as exc:
            await asyncio.sleep(self._rng.uniform(0.0, 3.0))  # an environment tries again before it gives up
            raise RolloutFailed(str(exc)) from exc
        if fate < plan.lost_share:
            raise WorkerLost("the worker of environment 'toy' ended with SIGKILL")
        if fate < plan.lost_share + plan.failed_share:
            raise RolloutFailed("ValueError: the judge is down")
        return [
            Rollout(index=index, reward=float(index), samples=[make_sample(version=versions[0], newest=versions[-1])])
            for index, versions in enumerate(runs)
        ]

    def _make_loop(self) -> Loop:
        config, recorder, fill_changed = self.config, self.recorder, ChangeEvent()
        clock = asyncio.get_running_loop().time
        self.pool = ServerPool(
            config.client,
            make_client=lambda url: self.servers[url],  # type: ignore[arg-type, return-value]  # acts as one
            write_event=recorder.write_event,
            clock=clock,
        )
        buffer = GroupBuffer(
            write_event=recorder.write_event,
            online_difficulty_filtering=False,
            max_off_policy_steps=config.max_off_policy_steps,
        )
        sampler = ExampleSampler(EXAMPLES, seed=1)
        dispatcher = Dispatcher(
            config,
            sampler=sampler,
            buffer=buffer,
            run_group=self.run_group,
            servers=self.pool,
            advantage=mean_baseline,
            on_group_end=fill_changed.notify,
            clock=clock,
        )

        watcher = PolicyWatcher(
            layout=self._layout,
            servers=self.pool,
            max_async_level=config.max_async_level,
            is_strict=config.strict_async_level,
            timeout_s=1800.0,
            on_policy_served=dispatcher.policy_served,
            clock=clock,
            sleep=lambda seconds: asyncio.sleep(seconds * self.plan.poll_factor),
        )
        load_watcher = LoadWatcher(config.concurrency, servers=self.pool, dispatcher=dispatcher)
        return Loop(
            config=config,
            layout=self._layout,
            progress=RunTotals(),
            sampler=sampler,
            buffer=buffer,
            dispatcher=dispatcher,
            watcher=watcher,
            sender=self._trainer,  # type: ignore[arg-type]  # closed with the loop
            telemetry=recorder,  # type: ignore[arg-type]  # acts as one
            fill_changed=fill_changed,
            background_tasks={"servers": self.pool.run, "load-watcher": load_watcher.run},
        )

    def _troubles(self) -> Iterator["asyncio._CoroutineLike[None]"]:
        plan = self.plan
        for server in self.servers.values():
            if plan.crash_every_s is not None:
                yield self._crash_often(server, plan.crash_every_s)
            if plan.freeze_every_s is not None:
                yield self._freeze_often(server, plan.freeze_every_s)
        if plan.pin_every_s is not None:
            for _ in range(2):
                yield self._pin_often(plan.pin_every_s)

    async def _pause(self, mean_s: float) -> bool:
        """Wait a random time. Return whether trouble may still happen."""
        await asyncio.sleep(self._rng.expovariate(1 / mean_s))
        return asyncio.get_running_loop().time() < self.plan.trouble_ends_s

    async def _crash_often(self, server: SimulatedServer, mean_s: float) -> None:
        while await self._pause(mean_s):
            await server.crash(self._rng.uniform(0.5, 40.0))

    async def _freeze_often(self, server: SimulatedServer, mean_s: float) -> None:
        while await self._pause(mean_s):
            server.is_frozen = True
            await asyncio.sleep(self._rng.choice([3.0, 60.0, 200.0]))
            server.is_frozen = False

    async def _pin_often(self, mean_s: float) -> None:
        while await self._pause(mean_s):
            async with self.loop.watcher.pinned() as version:
                await asyncio.sleep(self._rng.uniform(1.0, 30.0))
                assert self.loop.watcher.version == version
