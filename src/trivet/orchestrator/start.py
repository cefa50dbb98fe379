"""Takes an orchestrator from its configuration to a running loop: resume, servers, checks of prompts and policy."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from trivet.algorithms.dispatching import required_version
from trivet.checkpoints.commit import ORCHESTRATOR, resolve_resume_step
from trivet.checkpoints.resume import settle_schedules
from trivet.checkpoints.run_record import AttemptGuard
from trivet.checkpoints.settings import compare_data
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.examples import require_data
from trivet.environments.port import EnvironmentPool
from trivet.errors import CheckpointError
from trivet.orchestrator.assembly import (
    inference_client,
    make_loop,
    make_replay_loop,
    make_sender,
    make_servers,
    make_teacher,
)
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.checkpoint import OrchestratorPart, RunTotals, data_of, read_part
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.prompts import NUM_CHECKED, NUM_PROMPTS, check_prompts, make_probe, with_question
from trivet.orchestrator.sampler import Draw, ExampleSampler, SamplerState
from trivet.step_directories import discard_after
from trivet.telemetry import process_report
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.messages import BatchSender
from trivet.transport.recording import read_groups, recorded_files
from trivet.weights.manifest import read_manifest
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.events import Start, Stop
from trivet.wire.groups import Split
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


async def run(config: OrchestratorConfig, pool: EnvironmentPool, *, on_loop: Callable[[Loop], None] = lambda _: None) -> None:
    """Run the orchestrator to max_steps. An error in a task of the loop is raised in an exception group.

    Args:
        pool: the environments, loaded.
        on_loop: called with the loop before it begins to fill batches, so that the caller can preempt it.
    """
    layout = RunLayout(config.output_dir)
    require_data(pool.infos, trained=[env.label for env in config.env], hash_keys=config.buffer.hash_keys)
    for name, info in pool.infos.items():
        logger.info("environment loaded env=%s examples=%s", name, info.num_examples)
    part = _starting_point(config, layout)
    step = Step(part.progress.step)
    config = settle_schedules(config, step=step)
    if step:
        strict_key = "orchestrator.strict_data" if config.strict_data else None
        compare_data(layout.checkpoint_step(step) / ORCHESTRATOR, data_of(pool.infos), step=step, strict_key=strict_key)
    replayed = read_groups(recorded_files(config.replay)[0]).run_id if config.replay is not None else ""
    telemetry = Telemetry("orchestrator", config, resume_step=step, check=AttemptGuard(layout, config.run).check)
    telemetry.write_event(Start(run_id=config.run.id, from_step=step, replayed_run=replayed))
    discard_after(layout.rollouts, step)  # later steps are done again, with new rollouts
    if step:
        discard_after(layout.evals, step)
    pool.report_to(telemetry.write_event)
    process_report.set_worker_source(pool.status)
    reason = "failed"
    loop: Loop | None = None
    try:
        async with AsyncExitStack() as opened:
            sender = make_sender(config)
            opened.push_async_callback(sender.aclose)
            if config.replay is None:
                loop = await _begin_sampling(opened, config, part, pool, sender, telemetry)
            else:
                loop = make_replay_loop(config, part, sender=sender, telemetry=telemetry)
                _report_numbers(loop)
                process_report.begin_waiting("the probe to be received", on="trainer")
                # A probe without tokens: there is no server that could score any.
                await sender.send(Batch(step=step, purpose=BatchPurpose.PROBE))
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
    opened: AsyncExitStack,
    config: OrchestratorConfig,
    part: OrchestratorPart,
    pool: EnvironmentPool,
    sender: BatchSender,
    telemetry: Telemetry,
) -> Loop:
    """Prepare a run that samples, and return its loop: the servers serve the first policy, the trainer has acknowledged the probe.

    Args:
        opened: closes the connections that are made here.
    """
    process_report.begin_waiting("servers that answer", on="inference")
    servers, teacher = make_servers(config, telemetry, sender), make_teacher(config)
    opened.push_async_callback(servers.aclose)
    if teacher is not None:
        opened.push_async_callback(teacher.aclose)
    await servers.start()
    loop = make_loop(config, part, environments=pool, servers=servers, sender=sender, telemetry=telemetry, teacher=teacher)
    assert isinstance(loop.sampler, ExampleSampler)
    _report_numbers(loop)
    step = Step(part.progress.step)
    process_report.begin_waiting("a policy to start from", on="trainer" if step else "inference")
    await _ensure_first_policy(loop, config)

    async def read_prompts(draws: Sequence[Draw]) -> list[list[dict[str, Any]]]:
        examples = [await pool.example(draw.env, split=Split.TRAIN, example_id=draw.example_id) for draw in draws]
        return [with_question(example.prompt) for example in examples]

    async with AsyncExitStack() as checking:
        clients = [inference_client(config.client, root) for root in servers.roots]  # without the secret: they change no server
        for client in clients:
            checking.push_async_callback(client.aclose)
        if teacher is not None:
            process_report.begin_waiting("a teacher that answers", on="teacher")
            await teacher.wait_ready()
            messages = next(iter(await read_prompts(loop.sampler.preview(1))), None)
            await teacher.require_same_tokens(clients[0], model=config.model.name, messages=messages)
        process_report.begin("measuring prompts")
        assert loop.buffer.prompt_limits is not None
        loop.buffer.prompt_limits = await check_prompts(
            loop.sampler.preview(NUM_CHECKED),
            limits=loop.buffer.prompt_limits,
            pool=pool,
            client=clients[0],
            model=config.model.name,
        )
        process_report.begin_waiting("the probe to be scored", on="inference")
        # A probe is sent even without tokens: the trainer acknowledges it after it has removed what an earlier attempt left.
        batch = Batch(step=step, purpose=BatchPurpose.PROBE)
        # A deterministic run may start from an older policy than that of `step`, which the trainer could not compare.
        is_comparable = config.weights.probe_tokens and loop.watcher.version == step
        # A policy that was published with a probe was compared when the servers loaded it.
        if is_comparable and (step == 0 or read_manifest(loop.layout.weights_step(step)).probe is None):
            batch = await make_probe(
                await read_prompts(loop.sampler.preview(NUM_PROMPTS)),
                clients=clients,
                model_name=config.model.name,
                sampling=config.sampling,
                temperature=config.sampling.temperature_at(1, max_steps=config.max_steps),
                num_tokens=config.weights.probe_tokens,
                step=step,
            )
    put_to_sleep = loop.before_send if batch.micro_batches else None  # the trainer needs the servers' GPU memory to compare
    if put_to_sleep is not None:
        await put_to_sleep()
    process_report.begin_waiting("the probe to be compared", on="trainer")
    await sender.send(batch)
    if put_to_sleep is not None:
        process_report.begin_waiting("the servers to wake", on="inference")
        await _ensure_first_policy(loop, config)
    return loop


def _report_numbers(loop: Loop) -> None:
    """Add the loop's policy version and numbers of groups to the report of this process."""
    process_report.set_number_source(
        lambda: {
            "policy_version": loop.watcher.version,
            "num_ready": loop.buffer.num_ready,
            "num_in_flight": loop.buffer.num_in_flight,
        }
    )


def _starting_point(config: OrchestratorConfig, layout: RunLayout) -> OrchestratorPart:
    """Return the checkpoint part that the run resumes from, or an empty one for a new run."""
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


async def _ensure_first_policy(loop: Loop, config: OrchestratorConfig) -> None:
    """Make the servers serve the policy of the step that the run starts from, before the first rollout.

    A deterministic run loads the policy from which an uninterrupted run samples the next batch; it may be older.
    """
    assert isinstance(loop.watcher, PolicyWatcher)
    version = PolicyVersion(loop.progress.step)
    if config.deterministic:
        version = required_version(step=Step(loop.progress.step + 1), max_async_level=config.max_async_level)
    if version:
        await loop.watcher.await_policy(version)
    else:
        await loop.watcher.start_from_base(reload=config.reload_weights_on_start or loop.progress.step > 0)
