"""One rank's part of a training run: the learner, and everything durable around it. Used by the RL loop and by `sft`.

Every rank calls the methods whose docstring has the word "Collective". Rank 0 alone writes files, except sharded checkpoints. A
policy and a checkpoint are copied between two updates. Then two threads write them, one each, while the next steps run.
`trainer.open_session` begins and ends a session.

consumes: the learner's state between two updates
produces: weights/step_N with its `publish` event; checkpoints/step_N with its `commit` event; metrics and step lines
waits for: the previous policy's files, in `publish` and `await_policy`; the previous checkpoint's, in `save`. A checkpoint's thread
    waits for the other ranks' threads and for the policy of its step
unblocked by: the disk; the group of the checkpoint threads has the timeout `_WRITE_TIMEOUT_S`
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from trivet.algorithms.probe import Probe, convert_dtype, cut_samples
from trivet.checkpoints.commit import (
    TRAINER,
    begin_part,
    commit,
    committed_steps,
    finish_part,
    removable_steps,
    staging_directory,
)
from trivet.checkpoints.run_record import require_newest_attempt
from trivet.checkpoints.settings import DataRecord, write_data_record, write_settings
from trivet.config.layout import COMMITTED, RunLayout
from trivet.config.schema.trainer import TrainingConfig
from trivet.errors import BatchError, Diverged
from trivet.faults import reach
from trivet.machine import Heap
from trivet.storage.disk import explaining_full_disk, require_free_space
from trivet.storage.durable import remove_directory
from trivet.telemetry.metrics import summarize, timed
from trivet.telemetry.process_report import waiting
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.background import BackgroundWriter
from trivet.trainer.checkpoint.shard_file import ShardFile
from trivet.trainer.checkpoint.state import TrainerProgress, collect_state
from trivet.trainer.disk_budget import Sizes
from trivet.trainer.measurement.performance import speed_metrics
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.model.export import Exporter
from trivet.trainer.probe import score, split_samples
from trivet.trainer.ranks.world import World, barrier, open_group
from trivet.trainer.step import Learner, StepResult
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import Manifest
from trivet.weights.publish import DeltaPublisher, publish
from trivet.weights.retention import LiveReaders, needed_to_resume, reference_version_after, retirable, retire
from trivet.wire.batches import MicroBatch
from trivet.wire.events import Commit, Publish, Retire
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 1800.0
"""Seconds that the slowest rank may take longer than the fastest for a checkpoint. A larger dist_timeout_seconds replaces it."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Runs the steps after an update, in order: publish, save, settle, report."""

    config: TrainingConfig
    layout: RunLayout
    learner: Learner
    progress: TrainerProgress
    from_step: Step
    """The step resumed from, 0 for a fresh run."""
    telemetry: Telemetry | None
    """Set on rank 0 only."""
    exporter: Exporter
    profiler: Profiler
    sizes: Sizes
    keep_recent: int = 0
    """Number of versions before the newest that stay too, for servers that lag by design (max_async_level)."""
    reference_interval: int | None = None
    """Steps after which the loss's reference policy is renewed; None: the loss has no reference, or it stays the start model."""
    data: Mapping[str, DataRecord] = field(default_factory=dict[str, DataRecord])
    """Size and digest of each data set of supervised fine-tuning, kept in every checkpoint. Empty in RL."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the current step, by metric name."""
    probe_samples: list[list[int]] = field(default_factory=list)
    """Token ids of the run's probe; empty until it is chosen."""
    newest_checkpoint: Step | None = None
    """The newest step whose checkpoint was begun, which may not be committed yet."""
    ending: str = "done"
    """The reason in the Stop event when no error ended the session."""
    policy_writer: BackgroundWriter = field(init=False)
    checkpoint_writer: BackgroundWriter = field(init=False)
    _deltas: DeltaPublisher | None = field(init=False)
    _readers: LiveReaders = field(init=False)
    _heap: Heap = field(init=False, default_factory=Heap)
    _shards: ShardFile = field(init=False)
    _group: dist.ProcessGroup = field(init=False)
    """The process group of the checkpoint threads. Steps use other groups meanwhile: one must not carry two exchanges at once."""

    def __post_init__(self) -> None:
        """Open the group of the checkpoint threads. Collective."""
        is_async = self.config.ckpt.async_write
        self.policy_writer = BackgroundWriter("publisher", is_async=is_async)
        self.checkpoint_writer = BackgroundWriter("checkpoint-writer", is_async=is_async)
        weights = self.config.weights
        self._deltas = DeltaPublisher(self.layout, weights.anchor_interval) if weights.delta else None
        self._readers = LiveReaders(self.layout)
        self._shards = ShardFile(self.world)
        self._group = open_group(self.world, timeout_s=max(_WRITE_TIMEOUT_S, self.config.dist_timeout_seconds))

    @property
    def world(self) -> World:
        """The ranks of the run."""
        return self.learner.world

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of the block to the step's `time/<name>`."""
        return timed(self.times, name)

    def choose_probe(self, rows: Sequence[MicroBatch]) -> None:
        """Take the tokens of the run's probe from the rows of a batch, unless it has one."""
        if self.config.weights.probe_tokens and not self.probe_samples:
            samples = [sample for row in rows for sample in split_samples(row)]
            self.probe_samples = cut_samples(samples, num_tokens=self.config.weights.probe_tokens)

    def score_probe(self) -> Probe | None:
        """Return the probe of the model as it is now; None without tokens. Collective."""
        if not self.config.weights.probe_tokens or not self.probe_samples:
            return None
        with self.timed("probe"):
            dtype = convert_dtype(self.config.model.compute_dtype)
            return score(self.learner.model, self.probe_samples, self.world, dtype=dtype)

    def publish(self, step: Step) -> None:
        """Copy the weights, and begin to publish them with their probe as the policy of `step`. Collective.

        If the previous publication failed, its error is raised. With ckpt.async_write = false the method returns once the policy
        is published.
        """
        probe = self.score_probe()
        with self.timed("broadcast_weights"):
            self.policy_writer.wait()
            weights = self.exporter.gather(keep=self.world.is_main)
            self.release_memory()
            if self.world.is_main:
                require_free_space(self.layout.weights, self.sizes.weights, what=f"policy {step}")
                self.policy_writer.start(partial(self._write_policy, step, weights, probe))

    def _write_policy(self, step: Step, weights: dict[str, torch.Tensor], probe: Probe | None) -> None:
        def announce(manifest: Manifest) -> None:
            assert self.telemetry is not None
            num_tokens = probe.num_scored if probe is not None else 0
            self.telemetry.write_event(
                Publish(
                    version=manifest.version,
                    digest=manifest.digest,
                    num_probe_tokens=num_tokens,
                    manifest_sha256=manifest.sha256,
                )
            )

        with explaining_full_disk(self.layout.weights, what=f"policy {step}", num_bytes=self.sizes.weights):
            manifest = publish(
                self.layout,
                announce=announce,
                version=PolicyVersion(step),
                run_id=self.config.run.id,
                write=lambda directory: self.exporter.write(directory, weights),
                probe=probe,
                deltas=self._deltas,
            )
        logger.info("policy published version=%s digest=%s", step, manifest.digest[:12])

    def release_memory(self) -> None:
        """Give the driver the GPU memory that nothing needs until the next step, if `release_gpu_memory` is set. Collective.

        A server takes memory of every rank's GPU as soon as it can read the policy. The next step computes new gradients.
        """
        if self.config.release_gpu_memory:
            self.learner.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            barrier(self.world)

    def await_policy(self) -> None:
        """Wait on every rank until the policy that is being published can be read; raise the error of its publication. Collective.

        Ranks that did not wait here would wait for rank 0 in a collective with a shorter timeout, or end before rank 0 has written
        the last good weights.
        """
        with self.timed("wait_for_policy"), waiting("the policy's files", on="disk"):
            try:
                self.policy_writer.wait()
            finally:
                barrier(self.world)

    def save(self, step: Step, *, parts: Sequence[str]) -> None:
        """Copy the trainer part of checkpoint `step`, and begin to write and commit it together with the other `parts`. Collective.

        If the previous checkpoint failed, its error is raised. With ckpt.async_write = false the method returns once the checkpoint
        is committed.
        """
        with self.timed("save_ckpt"):
            with waiting("the checkpoint before", on="disk"):
                self.checkpoint_writer.wait()
            reach("trainer_half.before", step=step)
            if self.world.is_main:
                what = f"the trainer's part of checkpoint {step}"
                require_free_space(self.layout.checkpoints, self.sizes.checkpoint, what=what)
                part = begin_part(self.layout, step, TRAINER)
                write_settings(part, self.config)
                write_data_record(part, self.data)
            barrier(self.world)
            self.newest_checkpoint = step
            with self._explaining_full_disk(step):
                self._shards.copy(staging_directory(self.layout, step) / TRAINER, collect_state(self.learner, self.progress))
            policy = self.policy_writer.running  # a checkpoint is not committed without the policy of its step
            self.checkpoint_writer.start(partial(self._write_checkpoint, step, parts, policy))
            reach("trainer_half.during", step=step)

    def _write_checkpoint(self, step: Step, parts: Sequence[str], policy: Future[None] | None) -> None:
        """Write this rank's shards. Rank 0 commits once every rank has written its own, and removes older checkpoints."""
        with self._explaining_full_disk(step):
            records = self._shards.write(self._group)
            if self.telemetry is None:  # not rank 0
                return
            if policy is not None:
                policy.result()
            finish_part(self.layout, step, TRAINER, written=records)
            reach("trainer_half.after", step=step)
            self.telemetry.sync_events()
            require_newest_attempt(self.layout, self.config.run)
            record = commit(self.layout, step, parts=parts, run_id=self.config.run.id)
            self.telemetry.write_event(Commit(step=step, digest=record.digest))
        logger.info("checkpoint committed step=%s", step)
        # This thread removes them, and not the loop between two steps, because large files take long to remove.
        ckpt = self.config.ckpt
        for old in removable_steps(committed_steps(self.layout), keep_last=ckpt.keep_last, keep_interval=ckpt.keep_interval):
            remove_directory(self.layout.checkpoint_step(old), marker=COMMITTED)

    def _explaining_full_disk(self, step: Step) -> AbstractContextManager[None]:
        return explaining_full_disk(self.layout.checkpoints, what=f"checkpoint {step}", num_bytes=self.sizes.checkpoint)

    def settle(self, *, does_wait: bool = False) -> None:
        """Raise the error of a write that has failed; then remove policies and release memory that are no longer needed.

        Args:
            does_wait: wait for running writes first, so that the error of any write is raised.
        """
        if does_wait:
            with waiting("the last policy and checkpoint", on="disk"):
                self.policy_writer.wait()
                self.checkpoint_writer.wait()
        self.raise_failure()
        if self.telemetry is not None:
            step = self.progress.step
            reach("clean_up.before", step=step)
            for version in self.find_unneeded():
                retire(self.layout, version)
                self.telemetry.write_event(Retire(version=version))
            reach("clean_up.after", step=step)
        self._heap.trim_if_grown()

    def find_unneeded(self) -> list[PolicyVersion]:
        """Return the published policies that no reader, no resume and no reference of the loss needs, oldest first."""
        published = published_versions(self.layout)
        resume_steps = [*committed_steps(self.layout), self.from_step, self.newest_checkpoint or self.from_step]
        steps = (*resume_steps, self.progress.step)
        references = {reference_version_after(step, interval=self.reference_interval) for step in steps}
        # In a deterministic run each batch is sampled from the policy that lags by exactly `keep_recent`, else from the newest.
        resume_lag = self.keep_recent if self.config.deterministic else 0
        return retirable(
            published,
            latest=max(published, default=PolicyVersion(0)),
            keep_recent=self.keep_recent,
            in_use=list(self._readers.versions().values()),
            kept=needed_to_resume(resume_steps, lag=resume_lag) | references,
            keep_interval=self.config.ckpt.weights.interval,
        )

    def raise_failure(self) -> None:
        """Raise the error of a write that has failed, without waiting for any."""
        self.policy_writer.raise_failure()
        self.checkpoint_writer.raise_failure()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let every rank end together when the block fails on all of them.

        No rank ends before rank 0 has finished its writes, because `ranks.starter` ends all ranks when the first one fails.
        """
        try:
            yield
        except (BatchError, Diverged):
            self.policy_writer.close()
            self.checkpoint_writer.close()
            barrier(self.world)
            raise

    def report(
        self, step: Step, result: StepResult, rows: Sequence[MicroBatch], *, extra: Mapping[str, float] | None = None
    ) -> None:
        """Write the metrics and the console line of a finished step, and set its times back to 0.

        Args:
            rows: the batch, with the rows of all ranks.
            extra: further metrics by name.
        """
        metrics: dict[str, float] = {}
        for name, values in result.values.items():
            metrics |= summarize(name, values)
        metrics |= {
            "loss/mean": result.loss,
            "optim/lr": result.lr,
            "optim/grad_norm": result.grad_norm,
            "time/forward_backward": result.forward_backward_s,
            "time/optimizer": result.optimizer_s,
            "progress/total_tokens": self.progress.total_tokens,
            "progress/total_samples": self.progress.total_samples,
            **self.times,
        }
        for name, writer in {"write_weights": self.policy_writer, "write_ckpt": self.checkpoint_writer}.items():
            if (times := writer.take_times()) is not None:
                wall_s, processor_s = times
                metrics |= {f"time/{name}": wall_s, f"time/{name}_cpu": processor_s}
        if self._deltas is not None:
            newest, self._deltas.metrics = self._deltas.metrics, {}
            metrics |= newest
        metrics |= speed_metrics(
            rows,
            num_computed_tokens=result.num_computed_tokens,
            flops=result.flops,
            seconds=self.times["time/step"],
            num_ranks=self.world.size,
            device=self.world.device,
        )
        self.times.clear()
        if self.telemetry is not None:
            self.telemetry.write_step(step, metrics | dict(extra or {}))
        self.profiler.finish_step(step)

    def close(self) -> None:
        """Wait for running writes to end, without raising their errors. May be called again."""
        self.policy_writer.close()
        self.checkpoint_writer.close()
        self.profiler.close()
