"""Brings an orchestrator from its configuration to a running loop: environments, servers, resume, self-check."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trivet.algorithms.advantages import ADVANTAGES
from trivet.checkpoints.commit import resolve_resume_step
from trivet.client.inference_client import InferenceClient
from trivet.config.layout import RunLayout
from trivet.config.orchestrator import OrchestratorConfig
from trivet.environments.host import EnvironmentHost
from trivet.environments.load import load_host
from trivet.environments.local_pool import LocalPool
from trivet.environments.model_client import ModelClient, make_model_client
from trivet.environments.port import EnvironmentPool
from trivet.environments.sampling import sampling_arguments
from trivet.environments.settings import host_settings
from trivet.errors import ConfigError, EnvironmentLoadError
from trivet.orchestrator.buffer import BufferState, GroupBuffer
from trivet.orchestrator.checkpoint import OrchestratorHalf, Progress, read_half
from trivet.orchestrator.dispatcher import Dispatcher, Limits, group_runner
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.sampler import Draw, ExampleSampler
from trivet.orchestrator.self_check import make_self_check
from trivet.orchestrator.waker import Waker
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.port import BatchSender
from trivet.transport.zeromq import ZmqSender
from trivet.wire.events import Start, Stop
from trivet.wire.groups import SamplingArguments, Split
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


async def run(config: OrchestratorConfig, pool: EnvironmentPool) -> None:
    """From start to max_steps; every error of a task leaves as an exception group."""
    layout = RunLayout(config.output_dir)
    half = _starting_point(config, layout, _sizes(pool))
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
            loop = _make_loop(config, layout, half, pool, servers, sender, telemetry)
            await _bring_policy(loop, config)
            await _send_self_check(loop, config, pool, clients)
            await loop.run()
            reason = "done"
    except asyncio.CancelledError:
        reason = "interrupted"
        raise
    finally:
        telemetry.write_event(Stop(step=loop.progress.step if loop else half.progress.step, reason=reason))
        telemetry.close()


def load_environments(config: OrchestratorConfig) -> LocalPool:
    """To be called on the main thread, before signal handlers of ours: verifiers installs its own.

    Raises:
        EnvironmentLoadError: one cannot be loaded.
    """
    hosts: dict[str, EnvironmentHost] = {}
    for env in config.env:
        settings = host_settings(
            env, model_name=config.model.name, client=config.client, trajectory_strategy=config.trajectory_strategy
        )
        hosts[env.label] = load_host(settings, environ=os.environ)
    return LocalPool(hosts)


def _sizes(pool: EnvironmentPool) -> dict[str, int]:
    """
    Raises:
        EnvironmentLoadError: an environment has no examples to train on.
    """
    for name, info in pool.infos.items():
        if info.num_examples == 0:
            raise EnvironmentLoadError(
                f"environment {name!r} has no examples to train on; check its args, or take it out of [[orchestrator.env]]"
            )
        logger.info("environment loaded env=%s examples=%s", name, info.num_examples)
    return {name: info.num_examples for name, info in pool.infos.items()}


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
    pool: EnvironmentPool,
    servers: list[InferenceClient],
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
    sampling = {env.label: env.sampling.over(config.sampling) for env in config.env}

    def sampling_of(draw: Draw) -> SamplingArguments:
        mine = sampling[draw.env]
        return sampling_arguments(mine, temperature=mine.temperature_at(dispatcher.step, max_steps=config.max_steps))

    dispatcher = Dispatcher(
        sampler=sampler,
        buffer=buffer,
        run_group=group_runner(
            pool,
            [server.base_url for server in servers],
            sampling_of=sampling_of,
            rollouts_per_example=config.rollouts_per_example,
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


async def _send_self_check(loop: Loop, config: OrchestratorConfig, pool: EnvironmentPool, clients: list[ModelClient]) -> None:
    """Also an empty one: its acknowledgement says that the trainer has cleared away what an earlier attempt left."""
    draws = [loop.sampler.draw(GroupId(index)) for index in range(config.self_check_rollouts)]
    batch = await make_self_check(
        [await pool.prompt(draw.env, split=Split.TRAIN, example_id=draw.example_id) for draw in draws],
        clients=clients,
        model_name=config.model.name,
        sampling=config.sampling,
        temperature=config.sampling.temperature_at(1, max_steps=config.max_steps),
        seq_len=config.seq_len,
        step=Step(loop.progress.step),
    )
    await loop.sender.send(batch)
