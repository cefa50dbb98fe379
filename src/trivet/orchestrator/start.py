"""Brings an orchestrator from its configuration to a running loop: environments, servers, resume, self-check."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from trivet.algorithms.advantages import ADVANTAGES
from trivet.checkpoints.commit import resolve_resume_step
from trivet.client.inference_client import InferenceClient
from trivet.config.layout import RunLayout
from trivet.config.orchestrator import OrchestratorConfig
from trivet.environments.load import load_environment
from trivet.environments.model_client import ModelClient, make_model_client
from trivet.environments.runner import GroupRunner
from trivet.errors import ConfigError, EnvironmentLoadError
from trivet.orchestrator.buffer import BufferState, GroupBuffer
from trivet.orchestrator.checkpoint import OrchestratorHalf, Progress, read_half
from trivet.orchestrator.dispatcher import Dispatcher, Limits, group_runner
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.sampler import ExampleSampler
from trivet.orchestrator.self_check import make_self_check
from trivet.orchestrator.waker import Waker
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.port import BatchSender
from trivet.transport.zeromq import ZmqSender
from trivet.wire.events import Start, Stop
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """What is trained on, by environment name."""

    runners: dict[str, GroupRunner]
    datasets: dict[str, Any]


async def run(config: OrchestratorConfig, environments: Environments) -> None:
    """From start to max_steps; every error of a task leaves as an exception group."""
    layout = RunLayout(config.output_dir)
    half = _starting_point(config, layout, {name: len(rows) for name, rows in environments.datasets.items()})
    telemetry = Telemetry(
        "orchestrator",
        layout=layout,
        run=config.run,
        wandb=config.wandb,
        heartbeat=config.heartbeat,
        detectors=config.detectors,
        shown_samples=config.shown_samples,
        resume_step=half.progress.step,
    )
    telemetry.write_event(Start(run_id=config.run.id, from_step=half.progress.step))
    reason = "failed"
    loop: Loop | None = None
    try:
        async with _servers(config) as (servers, clients), _sender(config) as sender:
            loop = _make_loop(config, layout, half, environments, servers, clients, sender, telemetry)
            await _bring_policy(loop, config)
            await _send_self_check(loop, config, environments.datasets, clients)
            await loop.run()
            reason = "done"
    except asyncio.CancelledError:
        reason = "interrupted"
        raise
    finally:
        telemetry.write_event(Stop(step=loop.progress.step if loop else half.progress.step, reason=reason))
        telemetry.close()


def load_environments(config: OrchestratorConfig) -> Environments:
    """To be called on the main thread, before signal handlers of ours: verifiers installs its own.

    Raises:
        EnvironmentLoadError: one cannot be loaded, or has no examples.
    """
    runners: dict[str, GroupRunner] = {}
    datasets: dict[str, Any] = {}
    for env in config.env:
        loaded = load_environment(env)
        dataset = loaded.get_dataset()
        if len(dataset) == 0:
            raise EnvironmentLoadError(f"environment {env.label!r} has an empty data set with args {env.args}")
        datasets[env.label] = dataset
        runners[env.label] = GroupRunner(
            env=loaded,
            label=env.label,
            model_name=config.model.name,
            sampling=config.sampling,
            trajectory_strategy=config.trajectory_strategy,
        )
        logger.info("environment loaded env=%s examples=%s", env.label, len(dataset))
    return Environments(runners=runners, datasets=datasets)


def _starting_point(config: OrchestratorConfig, layout: RunLayout, sizes: dict[str, int]) -> OrchestratorHalf:
    if config.ckpt.resume_step is None:
        return OrchestratorHalf(
            progress=Progress(),
            next_group_id=GroupId(0),
            buffer=BufferState(),
            seed=config.seed,
            rollouts_per_example=config.rollouts_per_example,
            sizes=sizes,
        )
    step = resolve_resume_step(layout, config.ckpt.resume_step)
    half = read_half(layout, step, seed=config.seed, rollouts_per_example=config.rollouts_per_example, sizes=sizes)
    if config.max_steps is not None and config.max_steps <= step:
        raise ConfigError(
            f"max_steps ({config.max_steps}) is not above the step resumed from ({step}): nothing is left to do; raise it"
        )
    logger.info(
        "resumed step=%s ready_groups=%s groups_dispatched_again=%s", step, len(half.buffer.ready), len(half.buffer.in_flight)
    )
    return half


@asynccontextmanager
async def _servers(config: OrchestratorConfig) -> AsyncIterator[tuple[list[InferenceClient], list[ModelClient]]]:
    keys = {url: config.client.api_key(url, os.environ) for url in config.client.base_url}
    timeout_s = config.client.timeout
    servers = [InferenceClient(url, timeout_s=timeout_s, api_key=key) for url, key in keys.items()]
    clients = [make_model_client(url, api_key=key, timeout_s=timeout_s) for url, key in keys.items()]
    try:
        for server in servers:
            await server.wait_ready(config.client.wait_for_ready_timeout)
            logger.info("inference ready url=%s", server.base_url)
        yield servers, clients
    finally:
        for closing in (*(server.aclose() for server in servers), *(client.close() for client in clients)):
            await closing


@asynccontextmanager
async def _sender(config: OrchestratorConfig) -> AsyncIterator[BatchSender]:
    sender = ZmqSender(config.rollout_transport, run_id=config.run.id, attempt=config.run.attempt)
    try:
        yield sender
    finally:
        await sender.aclose()


def _make_loop(
    config: OrchestratorConfig,
    layout: RunLayout,
    half: OrchestratorHalf,
    environments: Environments,
    servers: list[InferenceClient],
    clients: list[ModelClient],
    sender: BatchSender,
    telemetry: Telemetry,
) -> Loop:
    changed = Waker()
    sampler = ExampleSampler(half.sizes, seed=config.seed, next_group_id=half.next_group_id)
    buffer = GroupBuffer(
        write_event=telemetry.write_event,
        online_difficulty_filtering=config.buffer.online_difficulty_filtering,
        max_off_policy_steps=config.max_off_policy_steps,
        ready=half.buffer.ready,
    )
    dispatcher = Dispatcher(
        sampler=sampler,
        buffer=buffer,
        run_group=group_runner(
            environments.runners, environments.datasets, clients, rollouts_per_example=config.rollouts_per_example
        ),
        advantage=ADVANTAGES[config.advantage.type],
        limits=Limits.of(config),
        on_change=changed.ring,
        again=half.buffer.in_flight,
    )

    def on_load(version: PolicyVersion) -> None:
        dispatcher.version = version
        dispatcher.waker.ring()

    watcher = PolicyWatcher(
        layout=layout,
        servers=servers,
        max_async_level=config.max_async_level,
        is_strict=config.strict_async_level,
        timeout_s=config.rollout_transport.timeout_s,
        write_event=telemetry.write_event,
        on_load=on_load,
    )
    return Loop(
        config=config,
        layout=layout,
        progress=half.progress,
        sizes=half.sizes,
        sampler=sampler,
        buffer=buffer,
        dispatcher=dispatcher,
        watcher=watcher,
        sender=sender,
        telemetry=telemetry,
        changed=changed,
    )


async def _bring_policy(loop: Loop, config: OrchestratorConfig) -> None:
    """Before the first rollout the servers hold the policy of the step that the run starts from."""
    if loop.progress.step:
        await loop.watcher.await_policy(PolicyVersion(loop.progress.step))
    else:
        await loop.watcher.start_from_base(reload=config.reload_weights_on_start)


async def _send_self_check(
    loop: Loop, config: OrchestratorConfig, datasets: dict[str, Any], clients: list[ModelClient]
) -> None:
    """Also an empty one: its acknowledgement says that the trainer has cleared away what an earlier attempt left."""
    draws = [loop.sampler.draw(GroupId(index)) for index in range(config.self_check_rollouts)]
    batch = await make_self_check(
        [datasets[draw.env][draw.example_id] for draw in draws],
        clients=clients,
        model_name=config.model.name,
        sampling=config.sampling,
        seq_len=config.seq_len,
        step=Step(loop.progress.step),
    )
    await loop.sender.send(batch)
