"""Brings an orchestrator from its configuration to a running loop: environments, servers, resume, self-check."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from trivet.algorithms.staleness import required_version
from trivet.checkpoints.commit import resolve_resume_step
from trivet.checkpoints.data_record import compare_data
from trivet.checkpoints.parts import ORCHESTRATOR
from trivet.checkpoints.resume import settle_schedules
from trivet.checkpoints.run_record import AttemptGuard
from trivet.client.server_pool import ServerPool
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.examples import training_problem
from trivet.environments.port import EnvironmentPool
from trivet.errors import CheckpointError, EnvironmentLoadError
from trivet.orchestrator.assembly import RunContext, make_loop, make_replay_loop
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.checkpoint import OrchestratorPart, RunTotals, data_of, read_part
from trivet.orchestrator.connections import inference_client, open_sender, open_servers, open_teacher
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.online_eval import discard_evals_after
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.probe import NUM_PROMPTS, make_probe
from trivet.orchestrator.prompt_lengths import NUM_CHECKED, check_prompts
from trivet.orchestrator.rollout_log import discard_rollouts_after
from trivet.orchestrator.sampler import ExampleSampler, SamplerState
from trivet.orchestrator.teacher import Teacher
from trivet.telemetry import process_report
from trivet.telemetry.telemetry import Telemetry, TelemetryOutputs
from trivet.transport.recorded_groups import read_groups, recorded_files
from trivet.weights.manifest import read_manifest
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.events import Start, Stop
from trivet.wire.groups import Split
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


async def run(config: OrchestratorConfig, pool: EnvironmentPool, *, on_loop: Callable[[Loop], None] = lambda _: None) -> None:
    """Run the orchestrator to max_steps. Every error of a task leaves as an exception group.

    Args:
        on_loop: gets the loop when it begins to fill batches, to preempt it.
    """
    layout = RunLayout(config.output_dir)
    if config.replay is None:
        _require_examples(config, pool)
    part = _starting_point(config, layout)
    step = Step(part.progress.step)
    config = settle_schedules(config, step=step)
    if step:
        strict_key = "orchestrator.strict_data" if config.strict_data else None
        compare_data(layout.checkpoint_step(step) / ORCHESTRATOR, data_of(pool.infos), step=step, strict_key=strict_key)
    telemetry = Telemetry(
        "orchestrator",
        layout=layout,
        run=config.run,
        detectors=config.detectors,
        outputs=TelemetryOutputs(wandb=config.wandb, heartbeat=config.heartbeat, shown_samples=config.shown_samples),
        resume_step=part.progress.step,
        check=AttemptGuard(layout, config.run).check,
    )
    replayed = read_groups(recorded_files(config.replay)[0]).run_id if config.replay is not None else ""
    telemetry.write_event(Start(run_id=config.run.id, from_step=part.progress.step, replayed_run=replayed))
    discard_rollouts_after(layout, part.progress.step)
    if part.progress.step:
        discard_evals_after(layout, PolicyVersion(part.progress.step))
    pool.report_to(telemetry.write_event)
    process_report.set_worker_source(pool.status)
    reason = "failed"
    loop: Loop | None = None
    try:
        async with AsyncExitStack() as opened:
            if config.replay is not None:
                loop = await _begin_replay(opened, config, part, telemetry)
            else:
                loop = await _begin_sampling(opened, config, part, pool, telemetry)
            on_loop(loop)
            await loop.run()
            reason = "preempted" if loop.preempt_requested else "exhausted" if loop.is_exhausted else "done"
    except asyncio.CancelledError:
        reason = "interrupted"
        raise
    finally:
        telemetry.write_event(Stop(step=loop.progress.step if loop else part.progress.step, reason=reason))
        telemetry.close()


async def _begin_sampling(
    opened: AsyncExitStack, config: OrchestratorConfig, part: OrchestratorPart, pool: EnvironmentPool, telemetry: Telemetry
) -> Loop:
    """Return the loop of a run that samples, once the servers serve its first policy and the trainer has the probe."""
    process_report.begin_waiting("servers that answer", on="inference")
    servers = await opened.enter_async_context(open_servers(config, telemetry))
    teacher = await opened.enter_async_context(open_teacher(config))
    loop = make_loop(
        RunContext(
            config=config,
            layout=RunLayout(config.output_dir),
            part=part,
            environments=pool,
            servers=servers,
            sender=await opened.enter_async_context(open_sender(config)),
            telemetry=telemetry,
            teacher=teacher,
        )
    )
    _report_numbers(loop)
    process_report.begin_waiting("a policy to start from", on="trainer")
    await _ensure_first_policy(loop, config)
    if teacher is not None:
        await _check_teacher(teacher, loop, config, pool, servers)
    process_report.begin("measuring prompts")
    await _check_prompts(loop, config, pool, servers)
    process_report.begin_waiting("the probe to be compared", on="trainer")
    await _send_probe(loop, config, pool, servers)
    return loop


async def _begin_replay(
    opened: AsyncExitStack, config: OrchestratorConfig, part: OrchestratorPart, telemetry: Telemetry
) -> Loop:
    """Return the loop of a replay, once the trainer has received a probe, which is empty without a server."""
    sender = await opened.enter_async_context(open_sender(config))
    loop = make_replay_loop(part, config=config, layout=RunLayout(config.output_dir), sender=sender, telemetry=telemetry)
    _report_numbers(loop)
    process_report.begin_waiting("the probe to be received", on="trainer")
    await sender.send(_empty_probe(Step(part.progress.step)))
    return loop


def _report_numbers(loop: Loop) -> None:
    process_report.set_number_source(
        lambda: {
            "policy_version": loop.watcher.version,
            "num_ready": loop.buffer.num_ready,
            "num_in_flight": loop.buffer.num_in_flight,
        }
    )


def _require_examples(config: OrchestratorConfig, pool: EnvironmentPool) -> None:
    """Log the size of each environment's data set."""
    for name in (env.label for env in config.env):
        info = pool.infos[name]
        if problem := training_problem(name, info, hash_keys=config.buffer.hash_keys):
            raise EnvironmentLoadError(problem)
        logger.info("environment loaded env=%s examples=%s", name, info.num_examples)


def _starting_point(config: OrchestratorConfig, layout: RunLayout) -> OrchestratorPart:
    if config.ckpt.resume_step is None:
        return OrchestratorPart(
            progress=RunTotals(),
            sampler=SamplerState(),
            buffer=BufferState(),
            rollouts_per_example=config.rollouts_per_example,
        )
    step = resolve_resume_step(layout, config.ckpt.resume_step)
    part = read_part(layout, step, rollouts_per_example=config.rollouts_per_example)
    if bool(part.sampler.replayed_run) != (config.replay is not None):
        raise CheckpointError(
            f"checkpoint step_{step} was made {'by' if part.sampler.replayed_run else 'without'} a replay, and "
            f"orchestrator.replay is {config.replay or 'not set'}; set it back, or start a new run with --model.name "
            f"{layout.weights_step(step)}"
        )
    if config.ckpt.skip_progress:
        part.progress = RunTotals(step=step)
    logger.info(
        "resumed step=%s ready_groups=%s groups_dispatched_again=%s", step, len(part.buffer.ready), len(part.buffer.in_flight)
    )
    return part


async def _check_teacher(
    teacher: Teacher, loop: Loop, config: OrchestratorConfig, pool: EnvironmentPool, servers: ServerPool
) -> None:
    process_report.begin_waiting("a teacher that answers", on="teacher")
    await teacher.wait_ready()
    assert isinstance(loop.sampler, ExampleSampler)
    messages = [await pool.prompt(draw.env, split=Split.TRAIN, example_id=draw.example_id) for draw in loop.sampler.preview(1)]
    policy = inference_client(config.client, servers.roots[0])
    try:
        await teacher.require_same_tokens(policy, model=config.model.name, messages=next(iter(messages), None))
    finally:
        await policy.aclose()


async def _ensure_first_policy(loop: Loop, config: OrchestratorConfig) -> None:
    """Have the servers serve the policy of the step that the run starts from, before the first rollout.

    A deterministic run goes back to the one that the next batch was sampled from when the run was not broken.
    """
    assert isinstance(loop.watcher, PolicyWatcher)
    version = PolicyVersion(loop.progress.step)
    if config.deterministic:
        version = required_version(step=Step(loop.progress.step + 1), max_async_level=config.max_async_level)
    if version:
        await loop.watcher.await_policy(version)
    else:
        await loop.watcher.start_from_base(reload=config.reload_weights_on_start or loop.progress.step > 0)


async def _check_prompts(loop: Loop, config: OrchestratorConfig, pool: EnvironmentPool, servers: ServerPool) -> None:
    """Name prompts that do not fit among the first of the run, and tell the buffer how long they may be."""
    assert isinstance(loop.sampler, ExampleSampler)
    assert loop.buffer.prompt_limits is not None
    client = inference_client(config.client, servers.roots[0], timeout_s=config.client.timeout)
    try:
        loop.buffer.prompt_limits = await check_prompts(
            loop.sampler.preview(NUM_CHECKED),
            limits=loop.buffer.prompt_limits,
            pool=pool,
            client=client,
            model=config.model.name,
        )
    finally:
        await client.aclose()


async def _send_probe(loop: Loop, config: OrchestratorConfig, pool: EnvironmentPool, servers: ServerPool) -> None:
    """Send the probe of a new run; an empty one where the run has one already, or none can be made.

    Its acknowledgement says that the trainer has cleared away what an earlier attempt left.
    """
    assert isinstance(loop.sampler, ExampleSampler)
    step = Step(loop.progress.step)
    batch = _empty_probe(step)
    if config.weights.probe_tokens and loop.watcher.version == step and not _has_probe(loop.layout, step):
        draws = loop.sampler.preview(NUM_PROMPTS)
        clients = [inference_client(config.client, root, timeout_s=config.client.timeout) for root in servers.roots]
        try:
            batch = await make_probe(
                [await pool.prompt(draw.env, split=Split.TRAIN, example_id=draw.example_id) for draw in draws],
                clients=clients,
                model_name=config.model.name,
                sampling=config.sampling,
                temperature=config.sampling.temperature_at(1, max_steps=config.max_steps),
                num_tokens=config.weights.probe_tokens,
                step=step,
            )
        finally:
            for asked in clients:
                await asked.aclose()
    if batch.micro_batches and loop.before_send is not None:  # the trainer needs the GPU's memory to compute
        await loop.before_send()
        await loop.sender.send(batch)
        await _ensure_first_policy(loop, config)
    else:
        await loop.sender.send(batch)


def _has_probe(layout: RunLayout, step: Step) -> bool:
    """Return whether the policy that a run goes on from carries the run's probe."""
    return step > 0 and read_manifest(layout.weights_step(step)).probe is not None


def _empty_probe(step: Step) -> Batch:
    return Batch(step=step, purpose=BatchPurpose.PROBE, micro_batches=[], group_ids=[], num_rollouts=0)
