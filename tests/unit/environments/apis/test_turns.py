import base64
import io
from typing import Any

import msgspec
import numpy as np
import pytest

from support.groups import make_request
from trivet.config.schema.environment import RequestSamplingConfig
from trivet.environments.apis.turns import (
    SAMPLING_DEFAULTS,
    Turn,
    later_seed,
    read_turn,
    request_arguments,
    rollout_seed,
    to_samples,
)
from trivet.environments.settings import sampling_arguments
from trivet.errors import RolloutFailed
from trivet.wire.experts import UNKNOWN
from trivet.wire.groups import SamplingArguments
from trivet.wire.rollouts import TurnRun
from trivet.wire.versions import VersionRun


def turn(prompt: list[int], completion: list[int], version: int = 0, *, is_truncated: bool = False) -> Turn:
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-float(token) for token in completion],
        versions=[VersionRun(version, len(completion))],
        is_truncated=is_truncated,
    )


FIRST = turn([1, 2], [10, 11], version=3)
SECOND = turn([1, 2, 10, 11, 5, 6], [12], version=4)
REWRITTEN = turn([1, 2, 10, 99, 5], [13], version=4)


def test_a_turn_that_continues_the_last_becomes_part_of_its_sample():
    [sample], _ = to_samples([FIRST, SECOND], temperature=1.0, strategy="interleaved")
    assert sample.token_ids_T.tolist() == [1, 2, 10, 11, 5, 6, 12]
    assert sample.loss_mask_T.tolist() == [False, False, True, True, False, False, True]
    assert sample.logprobs_T.tolist() == [0, 0, -10, -11, 0, 0, -12]
    assert sample.versions == [VersionRun(3, 2), VersionRun(4, 1)]


def answer_with_experts(prompt: list[int], completion: list[int], experts_TLK: np.ndarray | None) -> dict[str, Any]:
    """Return the server's answer to a turn, as both APIs read it."""
    text = None
    if experts_TLK is not None:
        with io.BytesIO() as buffer:
            np.save(buffer, experts_TLK.astype(np.uint8))
            text = base64.b64encode(buffer.getvalue()).decode()
    choice = {
        "token_ids": completion,
        "logprobs": {"content": [{"logprob": -1.0} for _ in completion]},
        "policy_versions": [[0, len(completion)]],
        "routed_experts": text,
    }
    return {"choices": [choice], "prompt_token_ids": prompt}


def test_each_token_of_a_conversation_keeps_the_experts_with_which_its_turn_computed_it() -> None:
    """Another reload may have changed the choice of the first tokens by the time that the second turn computed them again."""
    first_TLK, second_TLK = (np.arange(rows * 4).reshape(rows, 2, 2) % 8 + start for rows, start in ((3, 0), (6, 16)))
    for experts_TLK in (first_TLK, second_TLK):
        experts_TLK[..., 1] = experts_TLK[..., 0] + 1
    prompt, continued = [1, 2], [1, 2, 10, 11, 5, 6]
    turns = [
        read_turn(answer_with_experts(prompt, [10, 11], first_TLK)),
        read_turn(answer_with_experts(continued, [12], second_TLK)),
    ]
    [sample], _ = to_samples(turns, temperature=1.0, strategy="interleaved")
    assert sample.experts is not None
    np.testing.assert_array_equal(sample.experts.decompress(7)[:6], [*first_TLK, *second_TLK[3:]])
    assert (sample.experts.decompress(7)[6] == UNKNOWN).all()
    apart, _ = to_samples(turns, temperature=1.0, strategy="branching")
    for each, experts_TLK in zip(apart, (first_TLK, second_TLK), strict=True):
        np.testing.assert_array_equal(each.experts.decompress(len(experts_TLK)), experts_TLK)
    without = read_turn(answer_with_experts(continued, [12], None))
    [sample], _ = to_samples([turns[0], without], temperature=1.0, strategy="interleaved")
    assert sample.experts is None


def test_a_broken_prefix_starts_a_new_sample_and_is_counted():
    samples, num_broken = to_samples([FIRST, REWRITTEN], temperature=1.0, strategy="interleaved")
    assert [sample.token_ids_T.tolist() for sample in samples] == [[1, 2, 10, 11], [1, 2, 10, 99, 5, 13]]
    assert [int(sample.loss_mask_T.sum()) for sample in samples] == [2, 1]
    assert num_broken == 1


def test_branching_makes_a_sample_of_each_turn():
    samples, num_broken = to_samples([FIRST, SECOND], temperature=0.5, strategy="branching")
    assert [sample.num_tokens for sample in samples] == [4, 7]
    assert np.count_nonzero(samples[1].loss_mask_T) == 1
    assert num_broken == 0


def test_a_turn_continues_the_newest_sample_that_it_starts_with_also_after_another_conversation():
    aside = turn([50], [51])
    samples, num_broken = to_samples([FIRST, aside, SECOND], temperature=1.0, strategy="interleaved")
    assert [sample.token_ids_T.tolist() for sample in samples] == [[1, 2, 10, 11, 5, 6, 12], [50, 51]]
    assert num_broken == 1


def test_each_sampled_token_knows_its_turn_also_where_samples_are_not_in_the_order_of_turns():
    aside, empty, tight = turn([50], [51]), turn([1], []), turn([1, 2, 10, 11], [7])
    samples, _ = to_samples(
        [FIRST, aside, empty, SECOND], temperature=1.0, strategy="interleaved", first_turn=2, agent="solver"
    )
    assert [sample.turns for sample in samples] == [[TurnRun(2, 2), TurnRun(5, 1)], [TurnRun(3, 1)]]
    assert {sample.agent for sample in samples} == {"solver"}
    [joined], _ = to_samples([FIRST, tight], temperature=1.0, strategy="interleaved")  # no token between the two turns
    assert joined.turns == [TurnRun(0, 2), TurnRun(1, 1)]
    [only], _ = to_samples([FIRST], temperature=1.0, strategy="interleaved")
    assert only.turns == []
    unprompted, _ = to_samples([FIRST, turn([], [3, 4])], temperature=1.0, strategy="branching")
    assert unprompted[1].turns == [TurnRun(1, unprompted[1].num_loss_tokens)]


def test_a_sample_is_truncated_when_any_of_its_turns_is():
    cut = turn([1, 2], [10, 11], is_truncated=True)
    samples, _ = to_samples([cut, SECOND, REWRITTEN], temperature=1.0, strategy="interleaved")
    assert [sample.is_truncated for sample in samples] == [True, False]


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "finish_reason": "length",
        "token_ids": [7, 8, 9],
        "logprobs": {"content": [{"logprob": -0.25}, {"logprob": -0.5}, {"logprob": -1.0}]},
        "policy_versions": [[3, 1], [4, 2]],
        **changes,
    }
    return {"prompt_token_ids": [1, 2], "choices": [choice]}


def test_tokens_log_probabilities_and_versions_are_those_of_the_answer() -> None:
    turn = read_turn(answer())
    assert (turn.prompt_ids, turn.completion_ids, turn.logprobs) == ([1, 2], [7, 8, 9], [-0.25, -0.5, -1.0])
    assert turn.versions == [VersionRun(3, 1), VersionRun(4, 2)]
    assert turn.is_truncated
    assert not read_turn(answer(finish_reason="stop")).is_truncated


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": None},
        {"policy_versions": None},
        {"policy_versions": [[3, 2]]},
        {"logprobs": None},
        {"token_ids": [7, 8]},
    ],
)
def test_an_answer_that_lacks_something_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RolloutFailed, match=r"is it `uv run inference`"):
        read_turn(answer(**changes))


def test_the_values_that_change_nothing_are_the_defaults_of_the_configuration() -> None:
    configured = RequestSamplingConfig().model_dump(exclude={"seed", "extra_body"})
    assert configured == SAMPLING_DEFAULTS


def test_a_trivet_server_is_asked_for_tokens_and_gets_every_field() -> None:
    sampling = sampling_arguments(RequestSamplingConfig(max_tokens=8, top_k=5, extra_body={"a": 1}), temperature=0.5)
    asked = request_arguments(sampling, seed=3)
    assert (asked["temperature"], asked["seed"], asked["max_tokens"], asked["logprobs"]) == (0.5, 3, 8, True)
    expected = {"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "a": 1, "return_token_ids": True}
    assert asked["extra_body"] == expected


def test_another_server_gets_only_what_differs_from_its_own_defaults() -> None:
    sampling = sampling_arguments(RequestSamplingConfig(max_tokens=8, top_k=5), temperature=0.5)
    asked = request_arguments(sampling, seed=None, is_plain=True)
    assert asked == {"temperature": 0.5, "max_tokens": 8, "extra_body": {"top_k": 5}}


def test_every_rollout_and_every_turn_has_a_seed_of_its_own() -> None:
    def seed_of(group_id: int, index: int, seed: int | None = 1) -> int | None:
        sampling = SamplingArguments(temperature=1.0, seed=seed)
        return rollout_seed(msgspec.structs.replace(make_request(group_id, env="toy"), sampling=sampling), index)

    seeds = {seed_of(group_id, index) for group_id in (0, 1) for index in (0, 1)}
    assert len(seeds - {None}) == 4
    assert seed_of(0, 0, None) is None
    later = {later_seed(7, kind, number) for kind in ("trace", "turn") for number in range(4)}
    assert 7 in later
    assert len(later) == 7
