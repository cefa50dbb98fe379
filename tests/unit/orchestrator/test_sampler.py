from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.groups import make_draw, make_examples, make_group
from trivet.config.schema.orchestrator import BufferConfig
from trivet.orchestrator.sampler import Draw, ExampleSampler, SamplerState
from trivet.wire.codec import decode, encode
from trivet.wire.rollouts import Group
from trivet.wire.versions import Step

EXAMPLES = make_examples(a=5, b=3)


def take(sampler: ExampleSampler, count: int, *, step: int = 1) -> list[Draw]:
    draws = [sampler.take(Step(step)) for _ in range(count)]
    assert None not in draws
    return [draw for draw in draws if draw is not None]


def rows_of(draws: list[Draw]) -> list[tuple[str, int]]:
    return [(draw.env, draw.example_id) for draw in draws]


def finish(sampler: ExampleSampler, draw: Draw, reward: float, *, step: int = 1) -> None:
    group = Group(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, rollouts=[])
    group.rollouts = make_group(0, (reward, reward)).rollouts
    sampler.finished(group, draw, step=Step(step))


def test_each_epoch_visits_every_example_once():
    sampler = ExampleSampler(EXAMPLES, seed=1)
    for _ in range(3):
        assert set(rows_of(take(sampler, 8))) == {("a", i) for i in range(5)} | {("b", i) for i in range(3)}


def test_another_seed_gives_another_order_and_the_buffers_seed_comes_first():
    examples = make_examples(a=50)
    first, other = (rows_of(take(ExampleSampler(examples, seed=seed), 50)) for seed in (1, 2))
    assert first != other
    assert sorted(first) == sorted(other)
    assert rows_of(take(ExampleSampler(examples, seed=1, rules=BufferConfig(seed=2)), 50)) == other


def test_ratios_hold_from_the_first_batch_on():
    sampler = ExampleSampler(make_examples(big=1000, small=2), seed=0, rules=BufferConfig(env_ratios=[3, 1]))
    envs = [draw.env for draw in take(sampler, 400)]
    assert Counter(envs) == {"big": 300, "small": 100}
    assert all(Counter(envs[start : start + 8]) == {"big": 6, "small": 2} for start in range(0, 400, 8))


def test_easy_and_hard_examples_are_not_drawn_again():
    sampler = ExampleSampler(make_examples(a=4), seed=0, rules=BufferConfig(easy_threshold=1.0, hard_threshold=0.0))
    for draw in take(sampler, 4):
        finish(sampler, draw, {0: 1.0, 1: 0.0}.get(draw.example_id, 0.5))
    assert {draw.example_id for draw in take(sampler, 20)} == {2, 3}
    values = sampler.metrics()
    assert (values["pool/easy"], values["pool/normal"], values["pool/hard/a"]) == (0.25, 0.5, 0.25)
    assert (values["evicted_examples/easy"], values["evicted_examples/hard/a"]) == (1, 1)
    assert sampler.metrics()["evicted_examples/easy"] == 0


def test_the_epoch_counts_passes_over_the_examples():
    sampler = ExampleSampler(EXAMPLES, seed=0)
    total = sum(len(hashes) for hashes in EXAMPLES.values())
    take(sampler, total + 2)
    assert sampler.metrics()["progress/epoch"] == pytest.approx(1 + 2 / total)


def test_a_drained_sampler_has_no_example_and_says_where_they_are():
    sampler = ExampleSampler(make_examples(a=2, b=1), seed=0, rules=BufferConfig(easy_threshold=0.9, hard_threshold=0.1))
    for draw in take(sampler, 3):
        finish(sampler, draw, 1.0 if draw.env == "a" else 0.0)
    assert sampler.is_drained
    assert sampler.take(Step(1)) is None
    assert sampler.next_group_id == 3
    said = sampler.explain_drained()
    assert "a: 2 examples, 2 easy, 0 hard, 0 normal; b: 1 examples, 0 easy, 1 hard, 0 normal" in said
    assert "easy_threshold 0.9, hard_threshold 0.1, recheck_interval None" in said


def test_a_parked_example_returns_for_one_more_try_and_is_judged_anew():
    sampler = ExampleSampler(make_examples(a=1), seed=0, rules=BufferConfig(easy_threshold=1.0, recheck_interval=3))
    finish(sampler, take(sampler, 1)[0], 1.0, step=2)
    for step in (2, 3, 4):
        sampler.begin_step(Step(step))
        assert sampler.is_drained
    sampler.begin_step(Step(5))
    (draw,) = take(sampler, 1)
    finish(sampler, draw, 1.0, step=5)
    sampler.begin_step(Step(7))
    assert sampler.is_drained
    sampler.begin_step(Step(8))
    finish(sampler, take(sampler, 1)[0], 0.5, step=8)
    assert not sampler.is_drained


def test_on_resume_the_longest_parked_share_returns():
    rules = BufferConfig(easy_threshold=1.0, hard_threshold=0.0, easy_fraction=0.5, hard_fraction=1.0)
    sampler = ExampleSampler(make_examples(a=6), seed=0, rules=rules)
    draws = take(sampler, 6)
    for step, draw in enumerate(draws):
        finish(sampler, draw, 0.0 if step == 5 else 1.0, step=step)
    resumed = ExampleSampler(make_examples(a=6), seed=0, rules=rules, state=sampler.snapshot())
    easy = [draw.example_id for draw in draws[:5]]
    assert {draw.example_id for draw in take(resumed, 12)} == {*easy[:2], draws[5].example_id}


def test_rows_with_one_hash_are_one_example():
    sampler = ExampleSampler({"a": ["x", "y", "x"]}, seed=0, rules=BufferConfig(easy_threshold=1.0))
    draw = next(draw for draw in take(sampler, 3) if draw.example_hash == "x")
    finish(sampler, draw, 1.0)
    assert {draw.example_id for draw in take(sampler, 6)} == {1}
    assert sampler.metrics()["pool/easy"] == pytest.approx(2 / 3)


def test_pools_follow_their_examples_into_a_data_set_that_has_changed():
    rules = BufferConfig(easy_threshold=1.0)
    sampler = ExampleSampler({"a": ["x", "y", "z"]}, seed=0, rules=rules)
    for draw in take(sampler, 3):
        finish(sampler, draw, 1.0 if draw.example_hash in "xz" else 0.5)
    grown = ExampleSampler({"a": ["new", "y", "x"]}, seed=0, rules=rules, state=sampler.snapshot())
    assert {draw.example_hash for draw in take(grown, 8)} == {"new", "y"}
    assert grown.next_group_id == 11
    assert {draw.example_hash for draw in take(ExampleSampler({"b": ["x"]}, seed=0, state=sampler.snapshot()), 2)} == {"x"}


def test_a_data_set_that_has_changed_begins_a_new_epoch():
    sampler = ExampleSampler(make_examples(a=9), seed=0)
    take(sampler, 5)
    grown = ExampleSampler(make_examples(a=10), seed=0, state=sampler.snapshot())
    assert sorted(draw.example_id for draw in take(grown, 10)) == list(range(10))


def test_groups_in_flight_find_their_examples_again():
    sampler = ExampleSampler({"toy": ["toy-9", "toy-0", "toy-7"]}, seed=0)
    same, moved, gone = make_draw(1, example_id=7), make_draw(2, example_id=0), make_draw(3, example_id=5)
    other_env = make_draw(4, env="gone", example_id=0)
    found, lost = sampler.locate_draws([same, moved, gone, other_env])
    assert [(draw.group_id, draw.example_id) for draw in found] == [(1, 2), (2, 1)]
    assert lost == [gone, other_env]


def test_a_preview_is_what_a_fresh_run_starts_with_and_draws_nothing():
    sampler = ExampleSampler(EXAMPLES, seed=3)
    start = rows_of(take(sampler, 4))
    assert rows_of(sampler.preview(4)) == start
    assert sampler.next_group_id == 4


RULES = st.builds(
    BufferConfig,
    env_ratios=st.sampled_from([None, [1.0, 1.0], [5.0, 1.0]]),
    easy_threshold=st.sampled_from([None, 0.75]),
    hard_threshold=st.sampled_from([None, 0.25]),
    recheck_interval=st.sampled_from([None, 1, 4]),
)
ACTIONS = st.lists(st.one_of(st.just("take"), st.just("step"), st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0]))))


class Scripted:
    """Plays a history of draws, steps and results, and records the draws."""

    def __init__(self, sampler: ExampleSampler, *, in_flight: list[Draw] | None = None, step: int = 1) -> None:
        self.sampler, self.in_flight, self.step = sampler, list(in_flight or []), step
        self.drawn: list[Draw | None] = []

    def play(self, actions: list[object]) -> None:
        for action in actions:
            if action == "step":
                self.step += 1
                self.sampler.begin_step(Step(self.step))
            elif action == "take":
                draw = self.sampler.take(Step(self.step))
                self.drawn.append(draw)
                self.in_flight += [draw] if draw else []
            elif isinstance(action, tuple) and self.in_flight:
                index, reward = action
                finish(self.sampler, self.in_flight.pop(index % len(self.in_flight)), reward, step=self.step)


@settings(max_examples=150, deadline=None)
@given(rules=RULES, actions=ACTIONS, cuts=st.lists(st.integers(0, 60), max_size=3), seed=st.integers(0, 5))
def test_a_sampler_resumed_at_any_moments_draws_what_an_unbroken_one_draws(rules, actions, cuts, seed):
    unbroken = Scripted(ExampleSampler(EXAMPLES, seed=seed, rules=rules))
    unbroken.play(actions)
    resumed = Scripted(ExampleSampler(EXAMPLES, seed=seed, rules=rules))
    drawn: list[Draw | None] = []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), None], strict=True):
        state = decode(encode(resumed.sampler.snapshot()), SamplerState)
        sampler = ExampleSampler(EXAMPLES, seed=seed, rules=rules, state=state)
        resumed = Scripted(sampler, in_flight=resumed.in_flight, step=resumed.step)
        resumed.play(actions[start:end])
        drawn += resumed.drawn
    assert drawn == unbroken.drawn
    assert resumed.sampler.snapshot() == unbroken.sampler.snapshot()


@settings(max_examples=100, deadline=None)
@given(rules=RULES, actions=ACTIONS)
def test_pools_conserve_examples_and_only_normal_ones_are_drawn(rules, actions):
    script = Scripted(ExampleSampler(EXAMPLES, seed=0, rules=rules))
    for action in actions:
        parked = {parked.example_hash for members in script.sampler.snapshot().parked.values() for parked in members}
        script.play([action])
        if action == "take" and (draw := script.drawn[-1]):
            assert draw.example_hash not in parked
        elif action == "take":
            assert len(parked) == 8
        values = script.sampler.metrics()
        assert len(values) == 1 or sum(values[f"pool/{pool}"] for pool in ("easy", "normal", "hard")) == pytest.approx(1.0)
        for members in script.sampler.snapshot().parked.values():
            assert [parked.step for parked in members] == sorted(parked.step for parked in members)
            assert len({parked.example_hash for parked in members}) == len(members)
