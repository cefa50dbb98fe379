"""Defines requests for groups, facts about environments, and how an environment worker reaches the inference servers.

It carries the names of the variables that hold keys, never the keys.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from trivet.wire.versions import GroupId

OVERLONG_REFUSALS = ("maximum context length", "max_tokens must be at least 1")
"""Parts of vLLM's refusals of a prompt that is longer than the context, and of one that fills it."""


class Split(StrEnum):
    """Names a data set of an environment."""

    TRAIN = "train"
    EVAL = "eval"


class SamplingArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a group. They are fixed when the group starts."""

    temperature: float | None
    """Sampling temperature. None: the server's default, allowed only in evaluations, which train nothing."""
    seed: int | None = None
    """Base of the requests' seeds. The group id and the rollout's index are mixed in. None: sampling is not reproducible."""
    fields: dict[str, Any] = {}
    """Further fields of each chat-completions request, by name."""


class RecordedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation of a rollout that is over, to be scored again."""

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    is_truncated: bool = False


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run `num_rollouts` rollouts of one example on one server and to score them together.

    With `recorded` nothing is sampled: these rollouts are scored.
    """

    group_id: GroupId
    env: str
    """The environment's `name` in the configuration."""
    split: Split = Split.TRAIN
    example_id: int
    """Index of the example in the data set of `split`, from 0."""
    num_rollouts: int
    base_url: str
    """The inference server that gets all model requests of the group."""
    sampling: SamplingArguments
    recorded: list[RecordedConversation] = []
    """Rollouts of the example that are scored instead of new ones, `num_rollouts` of them; empty: new ones are sampled."""


class EnvironmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a loaded environment."""

    num_examples: int
    """Number of examples in the data set that is trained on."""
    num_eval_examples: int = 0
    """Number of examples in the environment's evaluation data set; 0 when it has none."""
    train_digest: str = ""
    """SHA-256 of what rollouts get of the training examples, in their order. Two processes with equal ones have the same data."""
    eval_digest: str = ""
    """The same of the evaluation data."""
    example_hashes: list[str] = []
    """SHA-256 of the fields `buffer.hash_keys` of each training example, by index. With it a resume finds an example again in a
    data set that has changed."""


class ServerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The inference servers, as an environment worker asks them."""

    base_urls: list[str]
    key_variables: list[str]
    """Environment variable that holds the key: one for all servers, or one per entry of `base_urls`."""
    headers: dict[str, str] = {}
    """Sent with every request."""
    timeout_s: float = 1200.0
    """Longest time for one request, seconds."""

    def api_key(self, base_url: str, environ: Mapping[str, str]) -> str | None:
        """Return the key for the server at `base_url`, None when its variable is not set."""
        return environ.get(self.key_variable(base_url))

    def key_variable(self, base_url: str) -> str:
        """Return the name of the variable that holds the key for the server at `base_url`."""
        roots = [server_root(url) for url in self.base_urls]
        root = server_root(base_url)
        index = roots.index(root) if root in roots and len(self.key_variables) > 1 else 0
        return self.key_variables[index]


def server_root(base_url: str) -> str:
    """Return a server's address without `/v1`, which names it in events and logs."""
    return base_url.rstrip("/").removesuffix("/v1")


_REPRODUCIBLE = frozenset(
    {
        *("temperature", "seed"),
        # when a completion ends
        *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        # the prompt, whose tokens are recorded as the model read them
        *("messages", "prompt", "tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "reasoning_effort"),
        *("media_io_kwargs", "mm_processor_kwargs", "known_token_ids"),
        # what an answer tells
        *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo", "return_token_ids"),
        *("skip_special_tokens", "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
        *("spaces_between_special_tokens", "stream", "stream_options", "stream_interval", "include_reasoning"),
        "parallel_tool_calls",
        # who asks, and in which order requests are served
        *("model", "user", "priority", "request_id", "session_id", "cache_salt", "metadata"),
    }
)
"""Fields of a request that change no probability of a token, whatever their value."""

_OFF: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "repetition_penalty": (1,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}
"""Values with which a further field does nothing, besides those that are empty, 0 or false."""


def biasing_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, with their values, of which the trainer does not know what they do to probabilities.

    The trainer computes the softmax of the logits over the temperature, over the whole vocabulary. A field that is not known may
    sample from another distribution: servers get new ones with every release.
    """
    return {
        name: value for name, value in fields.items() if name not in _REPRODUCIBLE and value and value not in _OFF.get(name, ())
    }
