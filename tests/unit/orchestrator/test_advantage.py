import sys
from pathlib import Path

import numpy as np
import pytest

from trivet.algorithms.advantages import AdvantageInputs
from trivet.config.schema.orchestrator import AdvantageConfig
from trivet.errors import BatchError, ConfigError
from trivet.orchestrator.advantage import make_advantage

INPUTS = AdvantageInputs(
    rewards=np.array([1.0, 0.0, 0.0, 0.0]),
    completion_lengths=np.array([3, 1, 1, 1]),
    scores={"correct": np.array([1.0, 0.0, 0.0, 0.0])},
)

MODULE = """
import numpy as np

def scaled(inputs, *, factor=1.0):
    return (inputs.rewards - np.median(inputs.rewards)) * factor

def as_list(inputs):
    return [0.0] * len(inputs.rewards)

def divides(inputs):
    with np.errstate(all="ignore"):
        return inputs.rewards / inputs.rewards.sum()

def scaled_up(inputs):
    return (inputs.rewards - inputs.rewards.mean()) * 1e30

def one_number(inputs):
    return 1.0

def picky(inputs):
    if len(inputs.rewards) == 3:
        raise ZeroDivisionError("three of them")
    return inputs.rewards
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_advantages.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_advantages", raising=False)
    return "my_advantages"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AdvantageConfig(), [0.75, -0.25, -0.25, -0.25]),
        (AdvantageConfig(length_weighted_mean=True), [0.5, -0.5, -0.5, -0.5]),
        (AdvantageConfig(type="length_weighted_mean"), [0.5, -0.5, -0.5, -0.5]),
        (AdvantageConfig(type="rloo"), [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (AdvantageConfig(type="std_norm", eps=0.5), [0.75, -0.25, -0.25, -0.25]),
        (AdvantageConfig(type="max_rl"), [3.0, -1.0, -1.0, -1.0]),
        (AdvantageConfig(type="gdpo", components={"correct": 2.0}, eps=0.5), [1.5, -0.5, -0.5, -0.5]),
        (AdvantageConfig(type="none"), [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_every_type_has_its_function(config: AdvantageConfig, expected: list[float]) -> None:
    np.testing.assert_allclose(make_advantage(config)(INPUTS), expected, rtol=1e-15)


def test_a_function_of_ones_own_gets_its_arguments(module: str) -> None:
    config = AdvantageConfig(type="custom", import_path=f"{module}.scaled", kwargs={"factor": 2.0})
    np.testing.assert_array_equal(make_advantage(config)(INPUTS), [2.0, 0.0, 0.0, 0.0])
    listed = make_advantage(AdvantageConfig(type="custom", import_path=f"{module}:as_list"))(INPUTS)
    assert listed.dtype == np.float64


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.f", "cannot be imported .ModuleNotFoundError"),
        ("my_advantages.missing", "cannot be imported .AttributeError"),
        ("scaled", 'must be "module.function"'),
        ("my_advantages.one_number", "returned shape .*one advantage per rollout"),
        ("my_advantages.scaled_up", r"returned \[.*e\+29.*\], must be finite and at most 1e\+15 in size"),
        ("my_advantages.divides", r"rewards \[0.0, 0.0\].*must be finite"),
        ("my_advantages.np", "failed .TypeError"),
    ],
)
def test_a_function_that_cannot_work_is_refused_before_the_run(module: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_advantage(AdvantageConfig(type="custom", import_path=name))
    assert f'orchestrator.advantage.import_path "{name}"' in str(caught.value)


def test_an_error_during_the_run_ends_it_with_the_rewards(module: str) -> None:
    advantage = make_advantage(AdvantageConfig(type="custom", import_path=f"{module}.picky"))
    three = AdvantageInputs(rewards=np.array([1.0, 0.0, 0.5]), completion_lengths=np.array([1, 1, 1]))
    with pytest.raises(BatchError, match=r"picky\" of rewards \[1.0, 0.0, 0.5\] failed: three of them"):
        advantage(three)
    negative = AdvantageInputs(rewards=np.array([-1.0, 0.0]), completion_lengths=np.array([1, 1]))
    with pytest.raises(BatchError, match=r'advantage "max_rl" of rewards .* needs rewards >= 0'):
        make_advantage(AdvantageConfig(type="max_rl"))(negative)
