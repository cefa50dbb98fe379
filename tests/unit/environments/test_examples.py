import pytest
from datasets import Dataset

from trivet.environments.examples import data_digest, digest_records, example_hashes, require_data
from trivet.errors import EnvironmentLoadError
from trivet.wire.groups import EnvironmentInfo

ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": text}], "task": "t"} for text in ("a", "b", "a")])


def test_equal_examples_have_equal_hashes_and_others_have_others():
    first, second, third = example_hashes(ROWS, ["task", "prompt"])
    assert first == third
    assert first != second


def test_a_hash_does_not_depend_on_columns_that_are_not_named():
    other = ROWS.add_column("answer", ["x", "y", "z"])
    assert example_hashes(other, ["task", "prompt"]) == example_hashes(ROWS, ["task", "prompt"])
    assert example_hashes(other, ["prompt", "absent"]) == example_hashes(ROWS, ["prompt"])


def test_every_environment_without_the_data_for_its_purpose_is_named():
    infos = {
        "empty": EnvironmentInfo(num_examples=0),
        "nameless": EnvironmentInfo(num_examples=2),
        "well": EnvironmentInfo(num_examples=1, example_hashes=["h"]),
        "held-out": EnvironmentInfo(num_examples=0, num_eval_examples=1),
        "none-at-all": EnvironmentInfo(num_examples=0),
    }
    with pytest.raises(EnvironmentLoadError) as refused:
        require_data(infos, trained=["empty", "nameless", "well"], hash_keys=["id"])
    empty, nameless, none = str(refused.value).split("\n- ")
    assert "'empty' has no examples to train on" in empty
    assert "'nameless' has none of the columns orchestrator.buffer.hash_keys (id)" in nameless
    assert "'none-at-all' has no data to evaluate on" in none
    require_data({"well": infos["well"]}, trained=["well"], hash_keys=["id"])


def test_a_digest_covers_what_rollouts_get_and_nothing_else() -> None:
    rows = [{"prompt": "a", "answer": "1", "id": 1}, {"prompt": "b", "answer": "2", "id": 2}]
    digest = data_digest(Dataset.from_list(rows))
    assert digest == data_digest(Dataset.from_list([row | {"id": 9} for row in rows]))
    assert digest != data_digest(Dataset.from_list([row | {"answer": "1"} for row in rows]))
    assert digest != data_digest(Dataset.from_list(rows[::-1]))
    assert data_digest(None) == data_digest(Dataset.from_list([{"id": 1}])) == ""


def test_an_object_counts_by_its_type_in_a_digest_since_its_text_may_hold_an_address() -> None:
    assert digest_records([object()]) == digest_records([object()]) != digest_records([{"a": object()}])
