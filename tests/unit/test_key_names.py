import threading

import pytest

from trivet.errors import ConfigError
from trivet.key_names import VARIABLE, from_variable, key_name, list_keys, to_variable, use_names

NAMES = {"seq_len": "args.length", "max_model_len": "args.length", "--clean": "--args.overwrite true"}


def test_a_key_has_its_own_name_outside_of_the_context() -> None:
    with use_names(NAMES):
        assert key_name("--clean") == "--args.overwrite true"
        assert key_name("seed") == "seed"
    assert key_name("--clean") == "--clean"


def test_a_thread_uses_the_names_of_the_process() -> None:
    seen: list[str] = []
    with use_names(NAMES):
        thread = threading.Thread(target=lambda: seen.append(key_name("seq_len")))
        thread.start()
        thread.join()
    assert seen == ["args.length"]


def test_two_keys_of_the_run_that_are_one_of_the_users_are_listed_once() -> None:
    keys = ("max_tokens", "seq_len", "max_model_len")
    assert list_keys(*keys) == "max_tokens, seq_len and max_model_len"
    with use_names(NAMES):
        assert list_keys(*keys) == "max_tokens and args.length"
        assert list_keys("seq_len", "max_model_len") == "args.length"


def test_a_process_gets_the_names_that_its_starter_gave_it() -> None:
    assert from_variable(to_variable(NAMES)) == NAMES
    assert from_variable({}) == {}


@pytest.mark.parametrize("value", ["{", "[]", '{"seq_len": 1}'])
def test_a_variable_with_something_else_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        from_variable({VARIABLE: value})
