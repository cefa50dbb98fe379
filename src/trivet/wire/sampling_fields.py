"""Knows which fields of a request leave the distribution of its tokens one that the trainer can compute.

The trainer computes the softmax of the logits over the temperature, over the whole vocabulary. A field that is not listed here
may sample from another distribution: servers get new ones with every release.
"""

from collections.abc import Mapping
from typing import Any

REPRODUCIBLE = frozenset(
    {
        "temperature",
        "seed",
        # when a completion ends
        *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        # the prompt, whose tokens are recorded as the model read them
        *("messages", "prompt", "tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "reasoning_effort"),
        *("media_io_kwargs", "mm_processor_kwargs", "known_token_ids"),
        # what an answer tells
        *(
            "logprobs",
            "top_logprobs",
            "prompt_logprobs",
            "logprob_token_ids",
            "echo",
            "return_token_ids",
            "skip_special_tokens",
        ),
        *("return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text", "spaces_between_special_tokens"),
        *("stream", "stream_options", "stream_interval", "include_reasoning", "parallel_tool_calls"),
        # who asks, and in which order requests are served
        *("model", "user", "priority", "request_id", "session_id", "cache_salt", "metadata"),
    }
)
"""Fields that change no probability of a token, whatever their value."""

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
    """Return the fields, with their values, of which the trainer does not know what they do to probabilities."""
    return {
        name: value for name, value in fields.items() if name not in REPRODUCIBLE and value and value not in _OFF.get(name, ())
    }
