"""Makes the loop of a run and its connections from the configuration and the checkpoint. Called by `orchestrator.start`.

Every part of the loop is made here and nowhere else. No part starts to run here.
"""

import logging
import os
from collections.abc import Mapping

from trivet.client.inference_client import InferenceClient
from trivet.client.server_pool import ServerPool
from trivet.client.transfer_rounds import TransferRounds
from trivet.config.layout import RunLayout
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import IN_MEMORY
from trivet.environments.port import EnvironmentPool
from trivet.evaluation.evaluate import Evaluator
from trivet.orchestrator.advantage import make_advantage
from trivet.orchestrator.buffer import BufferState, GroupBuffer
from trivet.orchestrator.checkpoint import OrchestratorPart, data_of
from trivet.orchestrator.dispatcher import ChangeEvent, Dispatcher, group_runner
from trivet.orchestrator.load_watcher import LoadWatcher
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.online_eval import DEFAULT_MAX_CONCURRENT, OnlineEval, schedule_series
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.prompts import limits_of
from trivet.orchestrator.replay import UNLIMITED_STEPS, ReplaySource, UnservedPolicy
from trivet.orchestrator.sampler import ExampleSampler
from trivet.orchestrator.teacher import Teacher, is_scored
from trivet.process.event_loop import LoopLag, lag_metrics
from trivet.secret import RunSecret, find_secret
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.messages import BatchSender
from trivet.transport.zeromq import ZmqSender
from trivet.weights.catalog import latest_version
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.events import Drop
from trivet.wire.versions import START_VERSION, GroupId, PolicyVersion

logger = logging.getLogger(__name__)


def make_loop(
    config: OrchestratorConfig,
    part: OrchestratorPart,
    *,
    environments: EnvironmentPool,
    servers: ServerPool,
    sender: BatchSender,
    telemetry: Telemetry,
    teacher: Teacher | None,
) -> Loop:
    """Return the loop of the run, with all its parts.

    Args:
        part: the checkpoint part that the run starts from; empty at the start of a new run.
    """
    layout, fill_changed, lag = RunLayout(config.output_dir), ChangeEvent(), LoopLag()
    examples = {env.label: environments.infos[env.label].example_hashes for env in config.env}
    sampler = ExampleSampler(examples, seed=config.seed, rules=config.buffer, state=part.sampler)
    buffer, waiting = _make_buffer(config, part, telemetry, has_teacher=teacher is not None)
    resumed_draws, draws_without_example = sampler.locate_draws(waiting.in_flight)
    buffer.drop_without_example(draws_without_example)
    dispatcher = Dispatcher(
        config,
        sampler=sampler,
        buffer=buffer,
        run_group=group_runner(environments, config, teacher),
        servers=servers,
        advantage=make_advantage(config.advantage),
        on_group_end=fill_changed.notify,
    )
    dispatcher.resume(resumed_draws)
    watcher = PolicyWatcher(
        layout=layout,
        servers=servers,
        max_async_level=config.max_async_level,
        is_strict=config.strict_async_level,
        timeout_s=config.rollout_transport.timeout_s,
        on_policy_served=dispatcher.policy_served,
    )
    evals = None
    if config.eval is not None or config.val is not None:
        evals = OnlineEval(
            schedule_series(config, environments, layout=layout, resumed_from=PolicyVersion(part.progress.step)),
            evaluator=Evaluator(
                pool=environments,
                servers=servers,
                layout=layout,
                max_concurrent=config.eval.max_concurrent if config.eval is not None else DEFAULT_MAX_CONCURRENT,
            ),
            policy=watcher,
            telemetry=telemetry,
        )
    load_watcher = LoadWatcher(config.concurrency, servers=servers, dispatcher=dispatcher)

    def read_gauges() -> Mapping[str, float]:
        return {
            **load_watcher.metrics(),
            **servers.probe_metrics(),
            **environments.metrics(),
            **(teacher.take_metrics() if teacher is not None else {}),
            **_lag_gauges(lag),
        }

    return Loop(
        config=config,
        layout=layout,
        progress=part.progress,
        sampler=sampler,
        buffer=buffer,
        dispatcher=dispatcher,
        watcher=watcher,
        sender=sender,
        telemetry=telemetry,
        fill_changed=fill_changed,
        evals=evals,
        background_tasks={
            "servers": servers.run,
            "load-watcher": load_watcher.run,
            "environments": environments.run,
            "loop-lag": lag.run,
        },
        gauges=read_gauges,
        data=data_of(environments.infos),
        before_send=servers.sleep if config.sleep_servers else None,
    )


def make_replay_loop(config: OrchestratorConfig, part: OrchestratorPart, *, sender: BatchSender, telemetry: Telemetry) -> Loop:
    """Return the loop of a run that trains on the rollouts in `config.replay`, without servers and environments."""
    fill_changed, lag = ChangeEvent(), LoopLag()
    buffer, _ = _make_buffer(config, part, telemetry, has_teacher=False)
    source = ReplaySource(
        config,
        buffer=buffer,
        advantage=make_advantage(config.advantage),
        on_group_end=fill_changed.notify,
        state=part.sampler,
    )
    return Loop(
        config=config,
        layout=RunLayout(config.output_dir),
        progress=part.progress,
        sampler=source,
        buffer=buffer,
        dispatcher=source,
        watcher=UnservedPolicy(),
        sender=sender,
        telemetry=telemetry,
        fill_changed=fill_changed,
        background_tasks={"loop-lag": lag.run},
        gauges=lambda: _lag_gauges(lag),
    )


def usable_groups(waiting: BufferState, *, skip: bool, has_teacher: bool) -> tuple[BufferState, dict[GroupId, str]]:
    """Split the groups of a checkpoint into those that the run keeps and those that it leaves out.

    Args:
        skip: leave out every group (`ckpt.skip_buffer`).
        has_teacher: leave out finished groups without the teacher's scores: they finished before the run had a teacher.

    Returns:
        The groups that are kept, and the reason for each one left out, by its id.
    """
    if skip:
        ids = [group.group_id for group in (*waiting.ready, *waiting.in_flight)]
        return BufferState(), dict.fromkeys(ids, "ckpt.skip_buffer")
    unscored = [group.group_id for group in waiting.ready if has_teacher and not is_scored(group)]
    ready = [group for group in waiting.ready if group.group_id not in unscored]
    return BufferState(ready=ready, in_flight=waiting.in_flight), dict.fromkeys(unscored, "no_teacher_logprobs")


def _make_buffer(
    config: OrchestratorConfig, part: OrchestratorPart, telemetry: Telemetry, *, has_teacher: bool
) -> tuple[GroupBuffer, BufferState]:
    """Return the buffer, which holds the checkpoint's ready groups, and the state whose `in_flight` is to be started again."""
    waiting, left_out = usable_groups(part.buffer, skip=config.ckpt.skip_buffer, has_teacher=has_teacher)
    for group_id, reason in left_out.items():
        telemetry.write_event(Drop(group_id=group_id, reason=reason))
    buffer = GroupBuffer(
        write_event=telemetry.write_event,
        online_difficulty_filtering=config.buffer.online_difficulty_filtering,
        max_off_policy_steps=config.max_off_policy_steps if config.replay is None else UNLIMITED_STEPS,
        filters=config.filters,
        masks_truncated=config.mask_truncated_completions,
        prompt_limits=limits_of(config),
        ready=waiting.ready,
    )
    return buffer, waiting


def _lag_gauges(lag: LoopLag) -> Mapping[str, float]:
    return lag_metrics("event_loop_lag", lag.take(), ("min", "mean", "med", "p90", "max"))


def make_servers(config: OrchestratorConfig, telemetry: Telemetry, sender: BatchSender) -> ServerPool:
    """Return the pool of the run's inference servers, with clients that may load policies on them. No request is sent yet.

    Args:
        sender: announces to the trainer which policies it should send to servers.
    """
    client, secret = config.client, find_secret(RunLayout(config.output_dir), environ=os.environ)
    weights = config.weights
    transfers = TransferRounds(lambda transfer: sender.say_alive(transfer=transfer), timeout_s=weights.transfer_timeout)
    return ServerPool(
        client,
        make_client=lambda url: inference_client(client, url, timeout_s=client.admin_timeout, secret=secret),
        write_event=telemetry.write_event,
        origin=config.weights.origin_url,
        transfers=transfers if weights.transport in IN_MEMORY else None,
    )


def make_teacher(config: OrchestratorConfig) -> Teacher | None:
    """Return the teacher of the run, or None when none is configured."""
    if config.teacher_model is None:
        return None
    client = config.teacher_model.client
    return Teacher(config.teacher_model, [inference_client(client, url) for url in client.base_url])


def inference_client(
    config: ClientConfig, url: str, *, timeout_s: float | None = None, secret: RunSecret | None = None
) -> InferenceClient:
    """Return a client for the server at `url`.

    Args:
        secret: the run's secret, for a client that changes the server (loads a policy, puts it to sleep); None for any other.
    """
    return InferenceClient(
        url,
        timeout_s=timeout_s or config.timeout,
        find_token=lambda: secret.token if secret else None,
        headers=config.request_headers(url, os.environ),
    )


def make_sender(config: OrchestratorConfig) -> BatchSender:
    """Return the connection that sends batches to the trainer."""
    layout = RunLayout(config.output_dir)
    return ZmqSender(
        config.rollout_transport,
        secret=find_secret(layout, environ=os.environ),
        run=config.run,
        has_arrived=lambda batch: is_trained(batch, layout),
    )


def is_trained(batch: Batch, layout: RunLayout) -> bool:
    """Return whether a published policy shows that the trainer received `batch`: policy n exists only after batch n.

    Policies of an earlier attempt cannot be mistaken for it: the trainer removes them before it answers any batch.
    """
    try:
        return batch.purpose is BatchPurpose.TRAIN and (latest_version(layout) or START_VERSION) >= batch.step
    except OSError as exc:
        logger.warning("%s cannot be read to see whether batch %s was trained: %s", layout.weights, batch.step, exc)
        return False
