from support.groups import make_draw, make_sample
from trivet.algorithms.filters import RolloutFilter, mask_rollouts
from trivet.config.schema.environment import EnvConfig, EnvSamplingConfig, SamplingConfig, TempSchedulerConfig
from trivet.config.schema.orchestrator import FiltersConfig, OrchestratorConfig, RepetitionFilterConfig
from trivet.orchestrator.plans import rollout_filters, sampling_plan
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


def test_a_draw_alone_says_how_its_tokens_are_sampled() -> None:
    config = OrchestratorConfig(
        env=[EnvConfig(id="toy"), EnvConfig(id="short", sampling=EnvSamplingConfig(temperature=0.3, max_tokens=5))],
        sampling=SamplingConfig(
            temp_scheduler=TempSchedulerConfig(start_temperature=1.0, end_temperature=0.5, total_steps=6), max_tokens=64, seed=3
        ),
    )
    plan = sampling_plan(config)
    early, late, short = (plan(make_draw(0, env=env, step=step)) for env, step in (("toy", 1), ("toy", 6), ("short", 6)))
    assert (early.temperature, late.temperature, short.temperature) == (1.0, 0.5, 0.3)
    assert (late.fields["max_tokens"], short.fields["max_tokens"]) == (64, 5)
    assert late.seed == short.seed == 3


def test_filters_are_measured_unless_they_are_enforced_and_can_be_taken_away() -> None:
    assert rollout_filters(OrchestratorConfig()).enforced == frozenset()
    filters = FiltersConfig(gibberish=None, repetition=RepetitionFilterConfig(window=9, enforce=True))
    plan = rollout_filters(OrchestratorConfig(filters=filters))
    assert plan.gibberish is None
    assert plan.repetition is not None
    assert plan.repetition.window == 9
    assert plan.enforced == {RolloutFilter.REPETITION}
