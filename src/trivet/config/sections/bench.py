"""`[bench]`: measure the trainer on made-up rows instead of training."""

from pathlib import Path

from pydantic import Field

from trivet.config.sections.base import Section


class BenchConfig(Section):
    """`--bench`: take a few optimizer steps on made-up rows of model.seq_len tokens and print what they cost.

    There are no orchestrator, servers, data or tokenizer; nothing is published and nothing is kept.
    """

    output_json: Path | None = None
    """File that gets the figures, with the configuration, versions and hardware that they belong to."""
    num_steps: int = Field(default=4, ge=2)
    """Optimizer steps. The first warms up and does not count."""
    rows_per_rank: int = Field(default=2, ge=1)
    """Rows of model.seq_len tokens per rank and step; the published figures of prime-rl have 2."""
    prompt_len: int = Field(default=0, ge=0)
    """Tokens of the prompt that each sample begins with. They are not trained on. 0: a sample is an answer alone."""
    answer_len: int | None = Field(default=None, ge=2)
    """Tokens of the answer that each sample ends with. A row has as many samples as fit. "None": a sample fills a row."""
    group_size: int = Field(default=1, ge=1)
    """Samples that begin with the same prompt, as the rollouts of a group do. With model.share_prefixes it is computed once."""
