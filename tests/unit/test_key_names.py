import threading

from trivet.key_names import key_name, list_keys, names_from_variable, names_to_variable, use_names

NAMES = {"seq_len": "args.length", "max_model_len": "args.length", "vllm_args.": "args.", "--clean": "--args.overwrite true"}


def test_a_key_is_named_as_the_user_knows_it_while_the_names_are_used() -> None:
    seen: list[str] = []
    with use_names(NAMES):
        thread = threading.Thread(target=lambda: seen.append(key_name("seq_len")))
        thread.start()
        thread.join()
        seen += [key_name("--clean"), key_name("seed"), key_name("vllm_args.swap_space")]
    assert seen == ["args.length", "--args.overwrite true", "seed", "args.swap_space"]
    assert key_name("--clean") == "--clean"


def test_keys_that_are_one_of_the_users_are_listed_once() -> None:
    keys = ("max_tokens", "seq_len", "max_model_len")
    assert list_keys(*keys) == "max_tokens, seq_len and max_model_len"
    with use_names(NAMES):
        assert list_keys(*keys) == "max_tokens and args.length"
        assert list_keys("seq_len", "max_model_len") == "args.length"


def test_names_reach_a_process_in_a_variable() -> None:
    assert names_from_variable(names_to_variable(NAMES)) == NAMES
    assert names_from_variable({}) == {}
