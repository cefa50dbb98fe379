"""Makes the directory of a run that the real trainer took over groups of which everything was recorded."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from support.prepared_batches import make_batch, make_config, run_loop
from trivet.algorithms.packing import PackItem, pack
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.orchestrator.checkpoint import write_rollouts
from trivet.trainer.ranks.world import open_world
from trivet.transport.recording import record_batch
from trivet.wire.batches import BatchPurpose
from trivet.wire.rollouts import Group, MaskedTokens, Rollout, Sample
from trivet.wire.versions import GroupId, PolicyVersion, Step, VersionRun

SEQ_LEN = 24
STEPS = 2
_VOCABULARY = 100


def make_groups(step: int, *, has_teacher: bool = False) -> list[Group]:
    """Make three groups of two rollouts: some are longer than SEQ_LEN, one has two turns, one was filtered."""
    rng = np.random.default_rng(step)
    groups: list[Group] = []
    for group_id in range(3 * (step - 1), 3 * step):
        prompt = rng.integers(0, _VOCABULARY, 6)
        rollouts: list[Rollout] = []
        for index in range(2):
            length = 28 if (group_id % 3, index) == (0, 0) else int(rng.integers(10, SEQ_LEN))
            mask_T = np.arange(length) >= len(prompt)
            if group_id % 3 == 1:
                mask_T[9:11] = False  # a message between two turns
            logprobs_T = np.where(mask_T, rng.normal(-4.6, 0.8, length), 0.0).astype(np.float32)
            sample = Sample(
                token_ids_T=np.concatenate([prompt, rng.integers(0, _VOCABULARY, length - len(prompt))]).astype(np.int32),
                loss_mask_T=mask_T,
                logprobs_T=logprobs_T,
                teacher_logprobs_T=(logprobs_T - np.float32(0.3)) * mask_T if has_teacher else None,
                versions=[VersionRun(PolicyVersion(max(step - 2, 0)), int(mask_T.sum()))],
                temperature=0.7 if index else 1.0,
            )
            if (group_id % 3, index) == (2, 1):
                sample.masked = MaskedTokens(loss_mask_T=mask_T, logprobs_T=logprobs_T)
                sample.loss_mask_T, sample.logprobs_T = np.zeros_like(mask_T), np.zeros_like(logprobs_T)
            role = "tool" if group_id % 3 == 1 else "user"
            completion = [{"role": "assistant", "content": "x"}, {"role": role, "content": "y"}]
            advantage = float(np.float32(rng.normal()))
            rollouts.append(
                Rollout(index=index, reward=float(index), samples=[sample], completion=completion, advantage=advantage)
            )
        groups.append(Group(group_id=GroupId(group_id), env="toy", example_id=group_id, rollouts=rollouts))
    return groups


def record_run(
    layout: RunLayout, model: Path, *, loss: Mapping[str, object], is_replayable: bool = True, keeps_weights: bool = True
) -> None:
    """Train STEPS steps, as the roles of a run would: rollouts, recorded batches, policies, metrics and configurations."""
    has_teacher = "teacher_tau" in loss or "distil" in str(loss.get("import_path"))
    batches = {0: make_batch(0, [], BatchPurpose.PROBE)}
    for step in range(1, STEPS + 1):
        groups = make_groups(step, has_teacher=has_teacher)
        items = [
            PackItem(sample=sample, advantage=rollout.advantage)
            for group in groups
            for rollout in group.rollouts
            for sample in rollout.samples
        ]
        batches[step] = make_batch(step, pack(items, seq_len=SEQ_LEN), BatchPurpose.TRAIN)
        batches[step].group_ids = [group.group_id for group in groups]
        write_rollouts(layout, Step(step), groups, run_id="run", is_replayable=is_replayable)
        record_batch(layout, batches[step])
    config = make_config(
        model,
        layout.root,
        max_steps=STEPS,
        loss=loss,
        optim={"lr": 1e-2},
        ckpt={"weights": {"interval": 1 if keeps_weights else None}},
    )
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=30) as world:
        run_loop(config, world, lambda: batches)
    layout.configs.mkdir(exist_ok=True)
    (layout.configs / "trainer.toml").write_text(to_toml(config))
    orchestrator = OrchestratorConfig.model_validate(
        {"seq_len": SEQ_LEN, "env": [{"id": "toy"}], "rollouts_per_example": 2, "batch_size": 6}
    )
    (layout.configs / "orchestrator.toml").write_text(to_toml(orchestrator))
