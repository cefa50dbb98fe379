"""What becomes of a group's sampling parameters in a request."""

from trivet.config.schema.environment import RequestSamplingConfig
from trivet.environments.apis.requests import (
    SAMPLING_DEFAULTS,
    plain_arguments,
    request_arguments,
    rollout_seed,
    trace_seed,
    turn_seed,
)
from trivet.environments.sampling import sampling_arguments
from trivet.wire.groups import SamplingArguments
from trivet.wire.rollouts import GroupId


def test_the_values_that_change_nothing_are_the_defaults_of_the_configuration() -> None:
    configured = RequestSamplingConfig().model_dump(exclude={"seed", "extra_body"})
    assert configured == SAMPLING_DEFAULTS


def test_a_trivet_server_is_asked_for_tokens_and_gets_every_field() -> None:
    sampling = sampling_arguments(RequestSamplingConfig(max_tokens=8, top_k=5, extra_body={"a": 1}), temperature=0.5)
    asked = request_arguments(sampling, seed=3)
    assert (asked["temperature"], asked["seed"], asked["max_tokens"], asked["logprobs"]) == (0.5, 3, 8, True)
    assert asked["extra_body"] == {
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "a": 1,
        "return_token_ids": True,
    }


def test_another_server_gets_only_what_differs_from_its_own_defaults() -> None:
    sampling = sampling_arguments(RequestSamplingConfig(max_tokens=8, top_k=5), temperature=0.5)
    assert plain_arguments(sampling, seed=None) == {"temperature": 0.5, "max_tokens": 8, "extra_body": {"top_k": 5}}


def test_every_rollout_and_every_turn_has_a_seed_of_its_own() -> None:
    sampling = SamplingArguments(temperature=1.0, seed=1)
    seeds = [rollout_seed(sampling, group_id=GroupId(group), index=index) for group in (0, 1) for index in (0, 1)]
    assert len(set(seeds)) == 4
    assert None not in seeds
    assert rollout_seed(SamplingArguments(temperature=1.0), group_id=GroupId(0), index=0) is None
    assert turn_seed(7, 0) == 7
    assert len({turn_seed(7, turn) for turn in range(4)}) == 4
    assert trace_seed(7, 0) == 7
    assert len({trace_seed(7, number) for number in range(4)} | {turn_seed(7, turn) for turn in range(1, 4)}) == 7
