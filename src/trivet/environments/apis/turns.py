"""Makes the arguments of model requests, reads the turns of a rollout from the answers, and joins them into samples. Pure.

A turn is the prompt and the completion of one model request. There are two strategies (`trajectory_strategy`). `branching` makes a
sample of each turn. `interleaved` appends a turn to the newest sample whose tokens are exactly the start of the turn's prompt. If
there is no such sample, it begins a new sample and counts a broken prefix. The inference server keeps the tokens of earlier turns
if the chat template allows it (`inference.continuation`). So a prefix breaks where the template leaves out earlier text, such as
thinking. Only sampled tokens are trained on: no policy chose the environment's own tokens, so they have no log-probability.

Legend: T counts the tokens of one sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trivet.algorithms.arithmetic import derive_seed
from trivet.errors import RolloutFailed
from trivet.wire.experts import RoutedExperts, join_experts, read_experts
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Sample, TurnRun
from trivet.wire.versions import PolicyVersion, VersionRun, count_tokens, join_versions

_OPENAI_FIELDS = ("max_tokens", "top_p", "presence_penalty", "frequency_penalty")
"""Fields that the OpenAI client has arguments for; every other field is sent in `extra_body`."""
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
"""The defaults of the configuration's sampling section, by field; they change nothing. Repeated here, because a worker has no
pydantic. A test compares both."""


def rollout_seed(request: GroupRequest, index: int) -> int | None:
    """Return the seed of one rollout's first request; None when sampling is not to be reproducible."""
    seed = request.sampling.seed
    return None if seed is None else derive_seed(seed, request.group_id, index) % 2**31


def later_seed(seed: int, kind: Literal["trace", "turn"], number: int) -> int:
    """Return the seed of the turn or trace with index `number`. The first has `seed` itself.

    With one seed for all, each would draw the same random numbers.

    Args:
        kind: what is counted: the turns of a trace, or the traces of an episode.
    """
    return derive_seed(seed, kind, number) % 2**31 if number else seed


def request_arguments(sampling: SamplingArguments, *, seed: int | None, is_plain: bool = False) -> dict[str, Any]:
    """Return the arguments of one chat-completions request, in the form that verifiers passes to the OpenAI client.

    Args:
        seed: the seed of this request.
        is_plain: the server is not a trivet server. It may refuse fields that it does not have, so it gets only values that differ
            from their default.
    """
    fields = {name: value for name, value in sampling.fields.items() if not is_plain or value != SAMPLING_DEFAULTS.get(name)}
    openai_fields = {name: fields.pop(name) for name in _OPENAI_FIELDS if name in fields}
    arguments = {"temperature": sampling.temperature, "seed": seed, **openai_fields}
    if not is_plain:
        return {**arguments, "logprobs": True, "extra_body": {**fields, "return_token_ids": True}}
    return {name: value for name, value in {**arguments, "extra_body": fields or None}.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The token ids of one model request and of its completion."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    """One per completion token, as sampled."""
    versions: Sequence[VersionRun]
    """The policy versions of the completion tokens, in runs whose lengths add up to their number."""
    is_truncated: bool = False
    """The completion was cut at a length limit."""
    experts: RoutedExperts | None = None
    """The experts that computed the tokens; None if the server does not return them."""


def read_turn(answer: Mapping[str, Any]) -> Turn:
    """Return the turn in the answer to a chat-completions request, decoded from JSON. Raises as `make_turn`."""
    [choice] = answer["choices"]
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    return make_turn(
        prompt_ids=answer.get("prompt_token_ids"),
        completion_ids=choice.get("token_ids"),
        logprobs=[token["logprob"] for token in logprobs],
        policy_versions=choice.get("policy_versions"),
        is_truncated=choice.get("finish_reason") == "length",
        routed_experts=choice.get("routed_experts"),
    )


def make_turn(
    *,
    prompt_ids: list[int] | None,
    completion_ids: list[int] | None,
    logprobs: list[float],
    policy_versions: Iterable[tuple[int, int]] | None,
    is_truncated: bool,
    routed_experts: str | None = None,
) -> Turn:
    """Check the fields of an answer and make a turn of them. A field that is None is missing in the answer.

    Raises:
        RolloutFailed: a field is missing, or the lengths differ.
        MessageRefused: `routed_experts` cannot be read.
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
        experts=None if routed_experts is None else RoutedExperts.compress(read_experts(routed_experts)),
    )


def to_samples(
    turns: Sequence[Turn],
    *,
    temperature: float | None,
    strategy: Literal["interleaved", "branching"],
    first_turn: int = 0,
    agent: str = "",
) -> tuple[list[Sample], int]:
    """Join turns into samples.

    Args:
        turns: in order; turns without completion tokens are left out.
        temperature: the temperature at which the tokens were sampled; None: the server's default, assumed to be 1.
        first_turn: the number of the first of `turns` in its rollout.
        agent: the agent that sampled them, in an episode of several agents.

    Returns:
        The samples, and the number of broken prefixes: turns after the first that continue no sample. It is 0 for `branching`.
    """
    chains: list[list[Turn]] = []  # each becomes a sample; a later turn continues the turn before it
    numbers: list[list[int]] = []  # of the turns of each chain
    for number, turn in enumerate(turns, start=first_turn):
        if not turn.completion_ids:
            continue
        candidates = reversed(list(enumerate(chains))) if strategy == "interleaved" else ()
        continued = next((index for index, chain in candidates if _is_continued_by(chain[-1], turn)), None)
        if continued is not None:
            chains[continued].append(turn)
            numbers[continued].append(number)
        else:
            chains.append([turn])
            numbers.append([number])
    samples: list[Sample] = []
    for chain, chain_numbers in zip(chains, numbers, strict=True):
        token_ids = [*chain[-1].prompt_ids, *chain[-1].completion_ids]
        loss_mask_T = np.zeros(len(token_ids), dtype=np.bool_)
        logprobs_T = np.zeros(len(token_ids), dtype=np.float32)
        for turn in chain:
            start = len(turn.prompt_ids)
            end = start + len(turn.completion_ids)
            loss_mask_T[start:end] = True
            logprobs_T[start:end] = turn.logprobs
        loss_mask_T[0] = False  # nothing predicts the first token
        loss_counts = [len(turn.completion_ids) - (not turn.prompt_ids) for turn in chain]
        experts = [turn.experts for turn in chain if turn.experts is not None]
        sample = Sample(
            token_ids_T=np.array(token_ids, dtype=np.int32),
            loss_mask_T=loss_mask_T,
            logprobs_T=logprobs_T,
            versions=join_versions(turn.versions for turn in chain),
            temperature=1.0 if temperature is None else temperature,
            turns=[TurnRun(*run) for run in zip(chain_numbers, loss_counts, strict=True)] if any(chain_numbers) else [],
            agent=agent,
            is_truncated=any(turn.is_truncated for turn in chain),
            experts=join_experts(experts) if len(experts) == len(chain) else None,
        )
        samples.append(sample)
    return samples, max(len(chains) - 1, 0) if strategy == "interleaved" else 0


def _is_continued_by(previous: Turn, turn: Turn) -> bool:
    """Return whether the prompt of `turn` begins with exactly the tokens of `previous`: its prompt, then its completion.

    The completion is compared first, because a prefix nearly always breaks there, and prompts are long.
    """
    prompt, start = turn.prompt_ids, len(previous.prompt_ids)
    end = start + len(previous.completion_ids)
    if len(prompt) < end or list(prompt[start:end]) != list(previous.completion_ids):
        return False
    return list(prompt[:start]) == list(previous.prompt_ids)
