import asyncio

import pytest

from trivet.config.layout import STABLE
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.errors import ConfigError
from trivet.evaluation.targets import BASE, follow_targets, present_targets

ENVS = [EvalEnvConfig(id="letters")]


@pytest.fixture
def weights(tmp_path):
    directory = tmp_path / "weights"
    directory.mkdir()
    return directory


def publish(weights, *steps, is_complete=True):
    for step in steps:
        (weights / f"step_{step}").mkdir()
        if is_complete:
            (weights / f"step_{step}" / STABLE).touch()


def steps_of(config, envs=ENVS):
    return [target.step for target in present_targets(config, envs)]


def test_the_base_comes_first_and_then_every_complete_step(weights):
    publish(weights, 10, 9, 2)
    publish(weights, 11, is_complete=False)
    (weights / "readers").mkdir()
    assert steps_of(EvalConfig(weights_dir=weights)) == [0, 2, 9, 10]
    assert steps_of(EvalConfig(weights_dir=weights, eval_base=False)) == [2, 9, 10]
    assert steps_of(EvalConfig(weights_dir=weights, steps=[10, 2])) == [0, 2, 10]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(weights):
    publish(weights, 3, 5)
    publish(weights, 4, is_complete=False)
    with pytest.raises(ConfigError, match=r"holds no complete step 4, 7; complete steps there: 3, 5"):
        steps_of(EvalConfig(weights_dir=weights, steps=[3, 4, 7]))


def test_a_directory_without_steps_is_refused_unless_somebody_waits_for_them(weights):
    with pytest.raises(ConfigError, match=r"holds no complete step at all; complete steps there: none"):
        steps_of(EvalConfig(weights_dir=weights))
    assert steps_of(EvalConfig(weights_dir=weights / "later", watcher=True)) == [0]


def test_an_interval_leaves_out_steps_that_no_environment_is_measured_on(weights):
    publish(weights, 2, 3, 4, 5, 6)
    envs = [EvalEnvConfig(id="a"), EvalEnvConfig(id="b", interval=5)]
    assert steps_of(EvalConfig(weights_dir=weights, interval=3), envs) == [0, 3, 5, 6]
    assert steps_of(EvalConfig(weights_dir=weights, interval=3, steps=[4]), envs) == [0, 4]
    with pytest.raises(ConfigError, match=r"no step .* is a multiple of interval \(9\)"):
        steps_of(EvalConfig(weights_dir=weights, interval=9, eval_base=False))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": [1]}, "steps is about directories inside weights_dir, which is not set"),
        ({"watcher": True}, "watcher is about directories inside weights_dir, which is not set"),
        ({"eval_base": False}, "nothing to evaluate: eval_base is false and weights_dir is not set"),
    ],
)
def test_without_a_weights_directory_there_is_the_base_alone(changes, said):
    assert present_targets(EvalConfig(), ENVS) == [BASE]
    with pytest.raises(ConfigError, match=said):
        present_targets(EvalConfig(**changes), ENVS)


class Time:
    """A clock that moves in sleeps. `then` happens in the sleep of that number."""

    def __init__(self, then=None):
        self.now, self.num_sleeps, self.then = 0.0, 0, then or {}

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds
        self.num_sleeps += 1
        self.then.get(self.num_sleeps, lambda: None)()


def followed(config, time, *, max_steps=None, while_evaluating=None):
    async def collect():
        found = []
        present = present_targets(config, ENVS)
        async for target in follow_targets(config, present, envs=ENVS, max_steps=max_steps, clock=time, sleep=time.sleep):
            found.append(target.step)
            (while_evaluating or {}).get(target.step, lambda: None)()
        return found

    return asyncio.run(collect())


def test_watching_goes_on_to_the_last_step_of_the_run(weights):
    publish(weights, 1)
    time = Time({2: lambda: publish(weights, 2, 3), 5: lambda: publish(weights, 4)})
    assert followed(EvalConfig(weights_dir=weights, watcher=True), time, max_steps=4) == [0, 1, 2, 3, 4]


def test_what_is_published_while_the_last_is_evaluated_is_not_missed(weights):
    publish(weights, 1)
    found = followed(
        EvalConfig(weights_dir=weights, watcher=True), Time(), max_steps=3, while_evaluating={1: lambda: publish(weights, 2, 3)}
    )
    assert found == [0, 1, 2, 3]


def test_watching_ends_when_nothing_comes_any_more(weights, caplog):
    publish(weights, 1)
    time = Time({5: lambda: publish(weights, 2)})
    assert followed(EvalConfig(weights_dir=weights, watcher=True, watcher_timeout=60), time) == [0, 1, 2]
    assert time.now == 65.0
    assert "watching ends after step 2" in caplog.text


def test_watching_waits_for_the_named_steps_alone(weights):
    time = Time({1: lambda: publish(weights, 1, 2), 3: lambda: publish(weights, 3, 4)})
    config = EvalConfig(weights_dir=weights, watcher=True, steps=[2, 4], eval_base=False)
    assert followed(config, time, max_steps=9) == [2, 4]


def test_a_named_step_that_was_left_out_by_its_run_is_told(weights, caplog):
    publish(weights, 1, 4)
    assert followed(EvalConfig(weights_dir=weights, watcher=True, steps=[2, 4], eval_base=False), Time()) == [4]
    assert "never published or removed before: 2" in caplog.text
