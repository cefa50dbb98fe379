"""Write a tiny model with random weights for all six example environments; its chat template has tools.

The tokenizer is trained on the conversations that the model will learn from. The chat template writes tool calls as Hermes models
do, so that the server finds them with `tool_call_parser = "hermes"`.

    uv run python -m trivet.examples.environments_model models/examples/start --data models/examples/sft.jsonl [--seed 0]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trivet.examples.tiny_model import END_OF_TEXT, TURN_END, TURN_START, make_model

VOCABULARY = 1024
TAGS = ["<tool_call>", "</tool_call>"]
"""The tags around a tool call. Each is one token, as in models that were trained to call tools."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
    {{- 'Call one: <tool_call>\\n{"name": name, "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def texts_of(record: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of one record: contents, tool calls and tool definitions."""
    for message in record["messages"]:
        yield message["content"]
        yield from (json.dumps(call["function"]) for call in message.get("tool_calls", ()))
    yield from map(json.dumps, record.get("tools", ()))


def train_tokenizer(data: Path) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on the records in `data`. It can encode every text, because it has a token for each byte."""
    records = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for record in records for text in texts_of(record)), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="JSONL file of conversations")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = train_tokenizer(args.data)
    model = make_model(tokenizer, hidden_size=args.hidden_size, layers=args.layers, seed=args.seed, tied=True)
    model.save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    print(f"wrote {args.directory}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
