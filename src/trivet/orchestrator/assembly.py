"""Makes the loop of a run from its configuration, its checkpoint and its open connections. Called by `orchestrator.start`.

Every part is made here and nowhere else; none starts to run here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trivet.client.server_pool import ServerPool
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.evaluation.evaluate import Evaluator
from trivet.orchestrator.advantage import make_advantage
from trivet.orchestrator.buffer import BufferState, GroupBuffer
from trivet.orchestrator.change_event import ChangeEvent
from trivet.orchestrator.checkpoint import OrchestratorPart, data_of
from trivet.orchestrator.dispatch_limits import Limits
from trivet.orchestrator.dispatcher import Dispatcher
from trivet.orchestrator.group_runner import group_runner
from trivet.orchestrator.load_watcher import LoadWatcher
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.online_eval import DEFAULT_MAX_CONCURRENT, OnlineEval, schedule_series
from trivet.orchestrator.plans import rollout_filters, sampling_plan
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.prompt_lengths import limits_of
from trivet.orchestrator.replay import UNLIMITED_STEPS, ReplaySource, UnservedPolicy
from trivet.orchestrator.sampler import ExampleSampler
from trivet.orchestrator.teacher import Teacher, is_taught, taught
from trivet.process.loop_lag import LoopLag, lag_metrics
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.port import BatchSender
from trivet.wire.events import Drop
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Holds everything that the parts of one run are made from."""

    config: OrchestratorConfig
    layout: RunLayout
    part: OrchestratorPart
    """The checkpoint part that the run starts from; empty at the start of a new run."""
    environments: EnvironmentPool
    servers: ServerPool
    sender: BatchSender
    telemetry: Telemetry
    teacher: Teacher | None


def make_loop(context: RunContext) -> Loop:
    """Return the loop of the run, with all its parts.

    Raises:
        ConfigError: a custom advantage or an evaluation cannot be used.
    """
    fill_changed = ChangeEvent()
    sampler = _make_sampler(context)
    waiting, left_out = usable_groups(
        context.part.buffer, skip=context.config.ckpt.skip_buffer, has_teacher=context.teacher is not None
    )
    buffer = _make_buffer(context.config, context.telemetry, waiting)
    for group_id, reason in left_out.items():
        context.telemetry.write_event(Drop(group_id=group_id, reason=reason))
    resumed_draws, gone = sampler.locate_draws(waiting.in_flight)
    buffer.gone(gone)
    dispatcher = _make_dispatcher(context, sampler, buffer, fill_changed)
    dispatcher.resume(resumed_draws)
    watcher = _make_watcher(context, dispatcher)
    load_watcher = LoadWatcher(context.config.concurrency, servers=context.servers, dispatcher=dispatcher)
    lag = LoopLag()
    return Loop(
        config=context.config,
        layout=context.layout,
        progress=context.part.progress,
        sampler=sampler,
        buffer=buffer,
        dispatcher=dispatcher,
        watcher=watcher,
        sender=context.sender,
        telemetry=context.telemetry,
        fill_changed=fill_changed,
        evals=_make_evals(context, watcher),
        background_tasks={
            "servers": context.servers.run,
            "load-watcher": load_watcher.run,
            "environments": context.environments.run,
            "loop-lag": lag.run,
        },
        gauges=lambda: _gauges(context, load_watcher, lag),
        data=data_of(context.environments.infos),
        before_send=context.servers.sleep if context.config.sleep_servers else None,
    )


def make_replay_loop(
    part: OrchestratorPart, *, config: OrchestratorConfig, layout: RunLayout, sender: BatchSender, telemetry: Telemetry
) -> Loop:
    """Return the loop of a run that trains on the rollouts in `config.replay`: it has no servers and no environments.

    Raises:
        BatchError: the record cannot be read.
        CheckpointError: `part` is of a replay of another run.
        ConfigError: a custom advantage cannot be used.
    """
    assert config.replay is not None
    fill_changed, lag = ChangeEvent(), LoopLag()
    waiting, left_out = usable_groups(part.buffer, skip=config.ckpt.skip_buffer, has_teacher=False)
    buffer = _make_buffer(config, telemetry, waiting)
    for group_id, reason in left_out.items():
        telemetry.write_event(Drop(group_id=group_id, reason=reason))
    source = ReplaySource(
        config.replay,
        buffer=buffer,
        advantage=make_advantage(config.advantage),
        limits=Limits.of(config),
        groups_per_batch=config.batch_size // config.rollouts_per_example,
        on_group_end=fill_changed.notify,
        state=part.sampler,
    )
    return Loop(
        config=config,
        layout=layout,
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
    """Split the groups of a checkpoint into those that the run goes on with and those left out, by id with the reason.

    Args:
        skip: leave all out (`ckpt.skip_buffer`).
        has_teacher: leave out finished groups that the teacher did not score: they finished before the run had one.
    """
    if skip:
        ids = [*(group.group_id for group in waiting.ready), *waiting.in_flight_ids]
        return BufferState(), dict.fromkeys(ids, "ckpt.skip_buffer")
    untaught = [group.group_id for group in waiting.ready if has_teacher and not is_taught(group)]
    ready = [group for group in waiting.ready if group.group_id not in untaught]
    return BufferState(ready=ready, in_flight=waiting.in_flight), dict.fromkeys(untaught, "no_teacher_logprobs")


def _make_sampler(context: RunContext) -> ExampleSampler:
    config = context.config
    examples = {env.label: context.environments.infos[env.label].example_hashes for env in config.env}
    return ExampleSampler(examples, seed=config.seed, rules=config.buffer, state=context.part.sampler)


def _make_buffer(config: OrchestratorConfig, telemetry: Telemetry, waiting: BufferState) -> GroupBuffer:
    return GroupBuffer(
        write_event=telemetry.write_event,
        online_difficulty_filtering=config.buffer.online_difficulty_filtering,
        max_off_policy_steps=config.max_off_policy_steps if config.replay is None else UNLIMITED_STEPS,
        filters=rollout_filters(config),
        prompt_limits=limits_of(config),
        ready=waiting.ready,
    )


def _make_dispatcher(
    context: RunContext, sampler: ExampleSampler, buffer: GroupBuffer, fill_changed: ChangeEvent
) -> Dispatcher:
    config, teacher = context.config, context.teacher
    run_group = group_runner(
        context.environments, sampling_of=sampling_plan(config), rollouts_per_example=config.rollouts_per_example
    )
    return Dispatcher(
        sampler=sampler,
        buffer=buffer,
        run_group=run_group if teacher is None else taught(run_group, teacher, seq_len=config.seq_len),
        servers=context.servers,
        advantage=make_advantage(config.advantage),
        limits=Limits.of(config),
        on_group_end=fill_changed.notify,
    )


def _make_watcher(context: RunContext, dispatcher: Dispatcher) -> PolicyWatcher:
    config = context.config
    return PolicyWatcher(
        layout=context.layout,
        servers=context.servers,
        max_async_level=config.max_async_level,
        is_strict=config.strict_async_level,
        timeout_s=config.rollout_transport.timeout_s,
        on_policy_served=dispatcher.policy_served,
    )


def _make_evals(context: RunContext, watcher: PolicyWatcher) -> OnlineEval | None:
    config = context.config
    if config.eval is None and config.val is None:
        return None
    resumed_from = PolicyVersion(context.part.progress.step)
    evaluator = Evaluator(
        pool=context.environments,
        servers=context.servers,
        layout=context.layout,
        max_concurrent=config.eval.max_concurrent if config.eval is not None else DEFAULT_MAX_CONCURRENT,
    )
    return OnlineEval(
        schedule_series(config, context.environments, layout=context.layout, resumed_from=resumed_from),
        evaluator=evaluator,
        policy=watcher,
        digest=lambda: watcher.digest,
        telemetry=context.telemetry,
    )


def _gauges(context: RunContext, load_watcher: LoadWatcher, lag: LoopLag) -> Mapping[str, float]:
    return {
        **load_watcher.metrics(),
        **context.servers.probe_metrics(),
        **context.environments.metrics(),
        **(context.teacher.take_metrics() if context.teacher is not None else {}),
        **_lag_gauges(lag),
    }


def _lag_gauges(lag: LoopLag) -> Mapping[str, float]:
    return lag_metrics("event_loop_lag", lag.take(), ("min", "mean", "med", "p90", "max"))
