from pathlib import Path

import pytest

from trivet.config.schema.orchestrator import AdvantageConfig
from trivet.errors import ConfigError
from trivet.launcher.run import require_advantage


def custom(name: str) -> AdvantageConfig:
    return AdvantageConfig(type="custom", import_path=f"launched_advantages.{name}")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def good(inputs):\n    return inputs.rewards\n\ndef bad(inputs):\n    return [float('nan')] * len(inputs.rewards)\n"
    (tmp_path / "launched_advantages.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_function_that_works_is_accepted() -> None:
    require_advantage(custom("good"))


def test_a_function_that_does_not_work_is_refused_in_words() -> None:
    with pytest.raises(ConfigError) as caught:
        require_advantage(custom("bad"))
    message = str(caught.value)
    assert message.startswith('orchestrator.advantage.import_path "launched_advantages.bad" called with rewards')
    assert "must be finite" in message
    assert "Traceback" not in message


def test_functions_of_ours_are_not_tried() -> None:
    require_advantage(AdvantageConfig(type="rloo"))
