"""Makes groups and samples by hand."""

from collections.abc import Sequence

import numpy as np

from trivet.config.schema.orchestrator import FiltersConfig
from trivet.orchestrator.sampler import Draw
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Group, Rollout, Sample
from trivet.wire.versions import GroupId, PolicyVersion, Step, VersionRun

NO_FILTERS = FiltersConfig(repetition=None, gibberish=None, zero_advantage=None)


def make_examples(**sizes: int) -> dict[str, list[str]]:
    """Return hashes of data sets of these sizes, by environment."""
    return {env: [f"{env}-{row}" for row in range(size)] for env, size in sizes.items()}


def make_draw(group_id: int, *, env: str = "toy", example_id: int = 0, step: int = 1) -> Draw:
    return Draw(group_id=GroupId(group_id), env=env, example_id=example_id, example_hash=f"{env}-{example_id}", step=Step(step))


def make_sample(*, prompt: int = 3, completion: int = 4, version: int = 0, newest: int | None = None) -> Sample:
    total = prompt + completion
    versions = [VersionRun(PolicyVersion(version), completion)]
    if newest is not None and newest != version:
        versions = [VersionRun(PolicyVersion(version), completion - 1), VersionRun(PolicyVersion(newest), 1)]
    return Sample(
        token_ids_T=np.arange(total, dtype=np.int32),
        loss_mask_T=np.arange(total) >= prompt,
        logprobs_T=np.where(np.arange(total) >= prompt, -1.0, 0.0).astype(np.float32),
        versions=versions,
        temperature=1.0,
    )


def make_group(group_id: int, rewards: Sequence[float] = (0.0, 1.0), *, version: int = 0, newest: int | None = None) -> Group:
    rollouts = [
        Rollout(index=index, reward=reward, samples=[make_sample(version=version, newest=newest)])
        for index, reward in enumerate(rewards)
    ]
    return Group(group_id=GroupId(group_id), env="toy", example_id=group_id, rollouts=rollouts)


def make_request(
    group_id: int, *, env: str, example_id: int = 0, num_rollouts: int = 2, url: str = "http://model"
) -> GroupRequest:
    return GroupRequest(
        group_id=GroupId(group_id),
        env=env,
        example_id=example_id,
        num_rollouts=num_rollouts,
        base_url=url,
        sampling=SamplingArguments(temperature=1.0),
    )
