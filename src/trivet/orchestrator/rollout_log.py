"""Writes `rollouts/step_N/`: the rollouts trained in step N.

`rollouts.jsonl` is for a human to read. From `groups.msgpack.z`, `trivet view` shows which tokens were likely and which policy
sampled them, and another run can train on them (`orchestrator.replay`).
"""

from collections.abc import Sequence

import msgspec

from trivet.config.layout import ROLLOUTS_FILE, RunLayout
from trivet.storage.durable import digest_of, hash_bytes, replace_file
from trivet.transport.recording import GROUPS_FILE, pack_groups
from trivet.wire.events import RolloutsWritten
from trivet.wire.rollouts import Group, RolloutRecord
from trivet.wire.versions import Step


def write_rollouts(
    layout: RunLayout, step: Step, groups: Sequence[Group], *, run_id: str = "", is_replayable: bool = False
) -> RolloutsWritten:
    """Write the files of a step. Each appears whole, or not at all; the groups first, so a reader of the rollouts finds them.

    Args:
        is_replayable: another run is to train on the groups.

    Returns:
        The event that describes the files.
    """
    records = [
        RolloutRecord(
            group_id=group.group_id,
            env=group.env,
            example_id=group.example_id,
            index=rollout.index,
            reward=rollout.reward,
            advantage=rollout.advantage,
            scores=rollout.scores,
            num_turns=rollout.num_turns,
            is_truncated=rollout.is_truncated,
            ran_out_of_context=rollout.ran_out_of_context,
            versions=[run for sample in rollout.samples for run in sample.versions],
            prompt=rollout.prompt,
            completion=rollout.completion,
        )
        for group in groups
        for rollout in group.rollouts
    ]
    contents = {
        GROUPS_FILE: pack_groups(groups, run_id=run_id, step=step, is_replayable=is_replayable),
        ROLLOUTS_FILE: msgspec.json.Encoder().encode_lines(records),
    }
    for name, content in contents.items():
        replace_file(layout.rollouts_step(step) / name, content)
    digest = digest_of({name: hash_bytes(content) for name, content in contents.items()})
    return RolloutsWritten(step=step, num_rollouts=len(records), digest=digest)
