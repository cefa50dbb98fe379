"""Makes the arguments of model requests, reads the turns of a rollout from the answers, and joins them into samples. Pure.

A turn is the prompt and the answer of one model request. `branching` makes a sample of each turn. `interleaved` continues the
newest sample whose tokens are exactly the start of the prompt, and begins a new sample where there is none: a broken prefix is
counted and never trained on as if it were whole. The inference server keeps the tokens of earlier turns wherever the chat
template allows it (inference/continuation), so a prefix breaks where the template leaves out earlier text, such as thinking.
Only sampled tokens are trained on: no policy chose the environment's own tokens, so they have no log-probability.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trivet.algorithms.arithmetic import derive_seed
from trivet.errors import RolloutFailed
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Sample
from trivet.wire.versions import PolicyVersion, VersionRun, count_tokens, join_versions

_OPENAI = ("max_tokens", "top_p", "presence_penalty", "frequency_penalty")
"""Fields that the OpenAI client knows; every other travels in `extra_body`."""
SAMPLING_DEFAULTS: Mapping[str, Any] = {
    "max_tokens": None,
    "min_tokens": 0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Values that change nothing, by the name of the field: the defaults of the sampling section. A test compares them with it."""


def rollout_seed(request: GroupRequest, index: int) -> int | None:
    """Return the seed of one rollout's first request; None when sampling is not to be reproducible."""
    seed = request.sampling.seed
    return None if seed is None else derive_seed(seed, request.group_id, index) % 2**31


def later_seed(seed: int, kind: Literal["trace", "turn"], number: int) -> int:
    """Return the seed of a turn, or of a conversation of a rollout, that has `number` others before it; the first has `seed`.

    With one seed for all, each would draw the same random numbers.
    """
    return derive_seed(seed, kind, number) % 2**31 if number else seed


def request_arguments(sampling: SamplingArguments, *, seed: int | None, is_plain: bool = False) -> dict[str, Any]:
    """Return the arguments of one chat-completions request, in the form that verifiers passes on.

    Args:
        seed: this request's own.
        is_plain: for a server that is not trivet's. It gets only values that differ from their default: such a server may refuse
            fields that it does not know.
    """
    fields = {name: value for name, value in sampling.fields.items() if not is_plain or value != SAMPLING_DEFAULTS.get(name)}
    known = {name: fields.pop(name) for name in _OPENAI if name in fields}
    asked = {"temperature": sampling.temperature, "seed": seed, **known}
    if not is_plain:
        return {**asked, "logprobs": True, "extra_body": {**fields, "return_token_ids": True}}
    return {name: value for name, value in {**asked, "extra_body": fields or None}.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The token ids of one model request and of its completion."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    """One per completion token, as sampled."""
    versions: Sequence[VersionRun]
    """Cover the completion tokens."""
    is_truncated: bool = False


def read_turn(answer: Mapping[str, Any]) -> Turn:
    """Return the tokens of one chat completion, the JSON object of an answer, as a turn to train on. Raises as `make_turn`."""
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


def to_samples(
    turns: Sequence[Turn], *, temperature: float | None, strategy: Literal["interleaved", "branching"]
) -> tuple[list[Sample], int]:
    """Join turns into samples. Return them, and how many turns after the first continue no sample: always 0 for `branching`.

    Args:
        turns: in order; turns without completion tokens are left out.
        temperature: at which the tokens were sampled; None: the server's default, taken to be 1.
    """
    chains: list[list[Turn]] = []
    for turn in turns:
        if not turn.completion_ids:
            continue
        candidates = reversed(chains) if strategy == "interleaved" else ()
        if (continued := next((chain for chain in candidates if _continues(chain[-1], turn)), None)) is not None:
            continued.append(turn)
        else:
            chains.append([turn])
    samples: list[Sample] = []
    for chain in chains:
        token_ids = [*chain[-1].prompt_ids, *chain[-1].completion_ids]
        loss_mask_T = np.zeros(len(token_ids), dtype=np.bool_)
        logprobs_T = np.zeros(len(token_ids), dtype=np.float32)
        for turn in chain:
            start = len(turn.prompt_ids)
            end = start + len(turn.completion_ids)
            loss_mask_T[start:end] = True
            logprobs_T[start:end] = turn.logprobs
        loss_mask_T[0] = False
        sample = Sample(
            token_ids_T=np.array(token_ids, dtype=np.int32),
            loss_mask_T=loss_mask_T,
            logprobs_T=logprobs_T,
            versions=join_versions(turn.versions for turn in chain),
            temperature=1.0 if temperature is None else temperature,
            is_truncated=any(turn.is_truncated for turn in chain),
        )
        samples.append(sample)
    return samples, max(len(chains) - 1, 0) if strategy == "interleaved" else 0


def _continues(previous: Turn, turn: Turn) -> bool:
    """Compare the completion first: a prefix nearly always breaks there, and prompts are long."""
    prompt, start = turn.prompt_ids, len(previous.prompt_ids)
    end = start + len(previous.completion_ids)
    if len(prompt) < end or list(prompt[start:end]) != list(previous.completion_ids):
        return False
    return list(prompt[:start]) == list(previous.prompt_ids)
