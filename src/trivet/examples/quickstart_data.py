"""Write warm-up conversations for the quickstart: a careless teacher shows how to reverse a text.

Every answer has the form that the reward asks for, but only a share of the answers reverse the text; the others copy it. A model
that is trained on them does both, each as often as the teacher. Reinforcement learning then teaches it which of them is rewarded.

    uv run python -m trivet.examples.quickstart_data outputs/quickstart/sft.jsonl [--share-reversed 0.4] [--seed 0]
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from reverse_text import held_out_texts, make_texts


def conversations(
    count: int, *, min_length: int, max_length: int, share_reversed: float, seed: int
) -> Iterator[dict[str, object]]:
    """Yield `count` conversations. Held-out texts of the environment's default seed never appear."""
    held_out = frozenset(held_out_texts(200, min_length=min_length, max_length=max_length, seed=0))
    generator = random.Random(f"{seed}/teacher")
    for text in make_texts(count, min_length=min_length, max_length=max_length, seed=f"{seed}/sft", exclude=held_out):
        answer = text[::-1] if generator.random() < share_reversed else text
        yield {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": f"<reversed_text>{answer}</reversed_text>"},
            ]
        }


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--examples", type=int, default=19200)
    parser.add_argument("--min-length", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=7)
    parser.add_argument("--share-reversed", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    with args.file.open("w", encoding="utf-8") as file:
        for conversation in conversations(
            args.examples,
            min_length=args.min_length,
            max_length=args.max_length,
            share_reversed=args.share_reversed,
            seed=args.seed,
        ):
            file.write(json.dumps(conversation) + "\n")
    print(f"wrote {args.file}: {args.examples} conversations, {args.share_reversed:.0%} of them reversed")


if __name__ == "__main__":
    main()
