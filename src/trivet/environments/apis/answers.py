"""Reads the tokens of a chat completion, as a trivet server answers it. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from trivet.environments.apis.trajectories import Turn
from trivet.errors import RolloutFailed
from trivet.wire.versions import PolicyVersion, VersionRun, count_tokens


def read_turn(answer: Mapping[str, Any]) -> Turn:
    """Return the tokens of one chat completion, as a turn to train on.

    Args:
        answer: the JSON object of the answer.

    Raises:
        RolloutFailed: it lacks token ids or the policy of each token.
    """
    [choice] = answer["choices"]
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    return make_turn(
        prompt_ids=answer.get("prompt_token_ids"),
        completion_ids=choice.get("token_ids"),
        logprobs=[token["logprob"] for token in logprobs],
        policy_versions=choice.get("policy_versions"),
        is_truncated=choice.get("finish_reason") == "length",
    )


def make_turn(
    *,
    prompt_ids: list[int] | None,
    completion_ids: list[int] | None,
    logprobs: list[float],
    policy_versions: Iterable[tuple[int, int]] | None,
    is_truncated: bool,
) -> Turn:
    """Return a turn of what an answer carries.

    Raises:
        RolloutFailed: something is missing, or the lengths differ.
    """
    versions = [VersionRun(PolicyVersion(version), length) for version, length in policy_versions or []]
    is_whole = prompt_ids is not None and completion_ids is not None and policy_versions is not None
    if not is_whole or not len(completion_ids or []) == len(logprobs) == count_tokens(versions):
        raise RolloutFailed(
            "the server's answer does not carry token ids, their log-probabilities and the policy that sampled each; is it "
            "`uv run inference`?"
        )
    return Turn(
        prompt_ids=prompt_ids or [],
        completion_ids=completion_ids or [],
        logprobs=logprobs,
        versions=versions,
        is_truncated=is_truncated,
    )
