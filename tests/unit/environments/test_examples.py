from datasets import Dataset

from trivet.environments.examples import data_digest, digest_rows, example_hashes, training_problem
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


def test_an_environment_without_examples_or_without_named_columns_cannot_be_trained_on():
    problem = training_problem("toy", EnvironmentInfo(num_examples=0), hash_keys=["prompt"])
    assert problem is not None
    assert "'toy' has no examples" in problem
    problem = training_problem("toy", EnvironmentInfo(num_examples=2), hash_keys=["id"])
    assert problem is not None
    assert "hash_keys (id)" in problem
    assert training_problem("toy", EnvironmentInfo(num_examples=1, example_hashes=["h"]), hash_keys=["id"]) is None


def test_a_digest_covers_what_rollouts_get_and_nothing_else() -> None:
    rows = [{"prompt": "a", "answer": "1", "id": 1}, {"prompt": "b", "answer": "2", "id": 2}]
    digest = data_digest(Dataset.from_list(rows))
    assert digest == data_digest(Dataset.from_list([row | {"id": 9} for row in rows]))
    assert digest != data_digest(Dataset.from_list([row | {"answer": "1"} for row in rows]))
    assert digest != data_digest(Dataset.from_list(rows[::-1]))
    assert data_digest(None) == data_digest(Dataset.from_list([{"id": 1}])) == ""


def test_an_object_counts_by_its_type_in_a_digest_since_its_text_may_hold_an_address() -> None:
    assert digest_rows([object()]) == digest_rows([object()]) != digest_rows([{"a": object()}])
