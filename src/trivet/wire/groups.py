"""Defines requests for groups, facts about environments, and how an environment worker reaches the inference servers.

These messages have the names of the environment variables that hold API keys, never the keys.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from trivet.wire.versions import GroupId

OVERLONG_REFUSALS = ("maximum context length", "max_tokens must be at least 1")
"""Texts in the errors with which vLLM refuses a prompt that is longer than the context, and a prompt that fills it."""


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
    """The conversation of a finished rollout, to be scored again."""

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    is_truncated: bool = False


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt and the reference answer of an example."""

    prompt: list[dict[str, Any]]
    """The messages that its rollouts start with, in the OpenAI chat format."""
    answer: str = ""
    """The reference answer in the data; empty if it has none."""


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run `num_rollouts` rollouts of one example on one server and to score them together."""

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
    """`num_rollouts` rollouts of the example to score again, in which case nothing is sampled; empty when new ones are sampled."""


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
    """The addresses of the inference servers, and how an environment worker sends requests to them."""

    base_urls: list[str]
    key_variables: list[str]
    """Names of the environment variables that hold the keys: one for all servers, or one for each entry of `base_urls`."""
    headers: dict[str, str] = {}
    """Headers of every request."""
    timeout_s: float = 1200.0
    """Longest time for one request, in seconds."""

    def api_key(self, base_url: str, environ: Mapping[str, str]) -> str | None:
        """Return the key for the server at `base_url`; None when its variable is not set."""
        return environ.get(self.key_variable(base_url))

    def key_variable(self, base_url: str) -> str:
        """Return the name of the variable that holds the key for the server at `base_url`."""
        roots = [server_root(url) for url in self.base_urls]
        root = server_root(base_url)
        index = roots.index(root) if root in roots and len(self.key_variables) > 1 else 0
        return self.key_variables[index]


def server_root(base_url: str) -> str:
    """Return a server's address without `/v1`. Events and logs name the server by it."""
    return base_url.rstrip("/").removesuffix("/v1")


_UNBIASED_FIELDS = frozenset(
    {
        *("temperature", "seed"),
        # when a completion ends
        *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        # the prompt, whose tokens are recorded as the model read them
        *("messages", "prompt", "tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "reasoning_effort"),
        *("media_io_kwargs", "mm_processor_kwargs", "known_token_ids"),
        # the content of the answer
        *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo", "return_token_ids"),
        *("skip_special_tokens", "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
        *("spaces_between_special_tokens", "stream", "stream_options", "stream_interval", "include_reasoning"),
        "parallel_tool_calls",
        # the sender, and the order in which requests are served
        *("model", "user", "priority", "request_id", "session_id", "cache_salt", "metadata"),
    }
)
"""Fields of a request whose effect on the probabilities of tokens the trainer reproduces, or that have no such effect."""

_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "repetition_penalty": (1,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}
"""Values with which any other field has no effect on probabilities. A value that is empty, 0 or false has none either."""


def biasing_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, with their values, that may change the distribution from which tokens are sampled.

    The trainer computes the softmax of the logits divided by the temperature, over the whole vocabulary. An unknown field may make
    the server sample from another distribution: servers get new fields with every release.
    """
    return {
        name: value
        for name, value in fields.items()
        if name not in _UNBIASED_FIELDS and value and value not in _NEUTRAL_VALUES.get(name, ())
    }
