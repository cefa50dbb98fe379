import json
from pathlib import Path

import pytest

from trivet.errors import WeightsError
from trivet.weights.adapters import ADAPTER_CONFIG, base_of, is_adapter, is_same_model


def test_a_directory_with_pefts_description_is_an_adapter_for_its_base(tmp_path: Path) -> None:
    assert not is_adapter(tmp_path)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": "org/model"}))
    assert is_adapter(tmp_path)
    assert base_of(tmp_path) == "org/model"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"base_model_name_or_path": null}', '{"base_model_name_or_path": ""}'])
def test_a_description_without_a_base_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text(text)
    with pytest.raises(WeightsError, match=ADAPTER_CONFIG):
        base_of(tmp_path)


def test_two_ways_to_a_directory_are_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_same_model("org/model", "org/model")
    assert is_same_model("models", str(tmp_path / "models"))
    assert not is_same_model("models", "org/model")
    assert not is_same_model("org/model", "org/other")
