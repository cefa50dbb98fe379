from support.groups import make_sample
from trivet.algorithms.filters import RolloutFilter, mask_rollouts
from trivet.config.orchestrator import OrchestratorConfig
from trivet.orchestrator.plans import rollout_filters
from trivet.wire.rollouts import Group, GroupId, Rollout


def make_group() -> Group:
    rollouts = [
        Rollout(index=0, reward=1.0, advantage=0.5, samples=[make_sample(version=0)]),
        Rollout(index=1, reward=0.0, advantage=-0.5, samples=[make_sample(version=0)], ran_out_of_context=True),
    ]
    return Group(group_id=GroupId(0), env="toy", example_id=0, rollouts=rollouts)


def num_trained(group: Group) -> list[int]:
    return [sum(sample.num_loss_tokens for sample in rollout.samples) for rollout in group.rollouts]


def test_truncated_rollouts_are_counted_and_trained_on() -> None:
    group = make_group()
    assert mask_rollouts(group, rollout_filters(OrchestratorConfig())) == [RolloutFilter.TRUNCATED]
    assert min(num_trained(group)) > 0


def test_truncated_rollouts_are_masked_on_request() -> None:
    group = make_group()
    mask_rollouts(group, rollout_filters(OrchestratorConfig(mask_truncated_completions=True)))
    whole, cut = num_trained(group)
    assert whole > 0
    assert cut == 0
    assert group.rollouts[1].advantage == -0.5
