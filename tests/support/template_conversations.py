"""Conversations of several turns with every kind of chat template, which environments of both APIs play."""

from dataclasses import dataclass

from support.template_server import SENTENCE_END


@dataclass(frozen=True)
class TemplateConversation:
    """The model's answers with one template, and the number of samples into which `interleaved` joins the turns."""

    template: str
    answers: list[str]
    num_samples: int
    lines: tuple[str, ...] = ()
    """The user's message after each answer; empty where the model has the tool `add`."""
    parses_reasoning: bool = False

    @property
    def has_tool(self) -> bool:
        return not self.lines


IM_END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
PACKED_CALLS = 'I add.\n\n<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>\n' + CALL
THOUGHT = "<think>\nhm, two and three\n</think>\n\n"
CUT = "message.content, message"
"""Text from which the tokenizer has learned long pieces."""
THREE = ("Sure?", "Really?", "Well then")

CONVERSATIONS = {
    "plain chat": TemplateConversation(
        "chatml", ["message.content" + IM_END, " Sure. \n" + IM_END, IM_END, "Bye" + IM_END], 1, THREE
    ),
    "an answer that was cut": TemplateConversation("chatml", [CUT, "say five" + IM_END], 1, ("Go on",)),
    "trimmed content": TemplateConversation(
        "llama3", ["\n Five. \n<|eot_id|>", "Yes  <|eot_id|>", "\n\n" + CUT + " \n", "<|eot_id|>"], 1, THREE
    ),
    "bare tool call": TemplateConversation(
        "llama3", ['{"name":"add",  "parameters":{"a":2,"b":3}}<|eot_id|>', "Five<|eot_id|>"], 1
    ),
    "tool calls": TemplateConversation("hermes", [CALL + IM_END, PACKED_CALLS + IM_END, "Five" + IM_END], 1),
    "tool call followed by words that its message does not keep": TemplateConversation(
        "hermes", [CALL + "\nSo?" + IM_END, "Five" + IM_END], 2
    ),
    "thinking between questions is left out later": TemplateConversation(
        "qwen3", [THOUGHT + "Five" + IM_END, THOUGHT + "Yes" + IM_END, "Bye" + IM_END, "!" + IM_END], 3, THREE
    ),
    "thinking between tool calls stays": TemplateConversation(
        "qwen3", [THOUGHT + CALL + IM_END, THOUGHT + PACKED_CALLS + IM_END, THOUGHT + "Five" + IM_END], 1
    ),
    "parsed thinking between tool calls stays": TemplateConversation(
        "qwen3",
        ["<think>hm</think>" + CALL + IM_END, THOUGHT + PACKED_CALLS + IM_END, "Five" + IM_END],
        1,
        parses_reasoning=True,
    ),
    "thinking that the template opens is left out later": TemplateConversation(
        "deepseek_r1", ["hm\n</think>\nFive" + SENTENCE_END, "so\n</think>\nYes" + SENTENCE_END], 2, ("Sure?",)
    ),
}
