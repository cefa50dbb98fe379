"""Write a tiny Qwen3-architecture model with random weights, a character tokenizer and a chat template.

The quickstart starts from it, and the tests train and serve it.

    uv run python -m trivet.examples.tiny_model models/tiny [--hidden-size 256] [--layers 4] [--seed 0] [--untied]
"""

import argparse
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

END_OF_TEXT, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
WORDS = ["system\n", "user\n", "assistant\n", "tool\n", "<reversed_text>", "</reversed_text>"]
"""Texts that are one token each, so that a conversation has few more tokens than characters."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per printable character, and one per word of WORDS."""
    characters = sorted(set(string.printable) - set("\x0b\x0c\r"))
    vocabulary = {token: index for index, token in enumerate([UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, layers: int, seed: int, tied: bool) -> Qwen3ForCausalLM:
    """Make a model with random weights for `tokenizer`.

    Args:
        tied: the LM head shares the embedding's weights.
    """
    set_seed(seed)
    end, pad = tokenizer.backend_tokenizer.token_to_id(TURN_END), tokenizer.backend_tokenizer.token_to_id(END_OF_TEXT)
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden_size // 64, 1),
        num_key_value_heads=max(hidden_size // 128, 1),
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untied", action="store_true", help="an LM head of its own, not the embedding")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden_size=args.hidden_size, layers=args.layers, seed=args.seed, tied=not args.untied)
    model = model.bfloat16() if args.dtype == "bfloat16" else model
    model.save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    print(f"wrote {args.directory}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
