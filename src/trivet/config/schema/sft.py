"""Sections of supervised fine-tuning, which shares model, optimizer and schedule with the trainer."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from trivet.config.schema.base import MAX_PROCESSES, MAX_ROLLOUTS, Section, type_or
from trivet.config.schema.deployment import KubernetesConfig, SkyPilotConfig, SlurmConfig
from trivet.config.schema.trainer import TrainingConfig


class LossMaskConfig(Section):
    """The roles whose messages are trained on. A `weight` of 0 or 1 in a message decides for that message alone."""

    system: bool = False
    """Also messages of the role `developer`."""
    user: bool = False
    """Messages that ask, their header and end of turn included."""
    assistant: bool = True
    """Messages that the model writes, their end of turn included; the header of the turn is given to it."""
    tool: bool = False
    """Answers of tools."""


class ConversationsConfig(Section):
    """The place of conversations, and how several sources of them become one."""

    name: str = "data.jsonl"
    """File, directory or data set of the hub. Rows have `messages`, or `prompt` and `completion`, and may have `tools`."""
    subsets: list[str] | None = None
    """Configurations of the data set, or subdirectories. Several subsets or splits are interleaved."""
    splits: list[str] | None = None
    """One for each subset, or several of one data set; unset: `train`. Slices as of `datasets` work too: `train[:5%]`."""
    probabilities: list[float] | None = Field(default=None, min_length=1)
    """Probability of each source, summing to 1; unset: sources take turns."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """An epoch of several sources ends when the first has no more rows, or when each was seen whole and the short ones again."""
    seed: int | None = Field(default=None, ge=0)
    """Seeds the mixture, and the order where it is shuffled; unset: the run's seed."""
    loss_mask: LossMaskConfig = LossMaskConfig()


class BatchingConfig(Section):
    """Keys that say how conversations, or made-up sequences, are put into batches."""

    batch_size: int = Field(default=128, ge=1, le=MAX_ROLLOUTS)
    """Conversations per optimizer step."""
    micro_batch_size: int = Field(default=1, ge=1, le=MAX_ROLLOUTS)
    """Rows of seq_len tokens (`cat`), or conversations (`stack`), that one forward takes. Memory and speed, never the result."""
    pack_function: Literal["cat", "stack"] = "cat"
    """`cat` fills each forward up with whole conversations; `stack` takes equally many, of alike length. Neither pads."""


class SftDataConfig(ConversationsConfig, BatchingConfig):
    """Conversations to train on."""

    type: Literal["sft"] = "sft"
    shuffle: bool = True
    """Another order in each epoch, from seed and epoch."""


class FakeDataConfig(BatchingConfig):
    """Made-up sequences, for measuring. Each stands for a conversation."""

    type: Literal["fake"] = "fake"
    seed: int | None = Field(default=None, ge=0)
    """Seeds the sequences; unset: the run's seed."""
    length: Literal["fixed", "variable"] = "fixed"
    """Sequences of model.seq_len tokens, or of 2 to model.seq_len."""
    input_ids: Literal["increasing", "random"] = "increasing"
    """Tokens 0, 1, 2, …, which a model learns fast, or drawn from the vocabulary, which it cannot."""


DataConfig = Annotated[
    Annotated[SftDataConfig, Tag("sft")] | Annotated[FakeDataConfig, Tag("fake")],
    Discriminator(type_or("sft")),
]


class ValDataConfig(ConversationsConfig):
    """Conversations to measure the loss on."""

    name: str = "val.jsonl"
    """As in data.name. Never trained on."""


class SftValConfig(Section):
    """Held-out loss: the mean over every token of the set that its loss mask selects, without dropout."""

    interval: int = Field(default=50, ge=1)
    """Steps between measurements. The last step is always measured."""
    eval_on_start: bool = False
    """Measure the start model too, as step 0."""
    data: ValDataConfig = ValDataConfig()


class SftConfig(TrainingConfig):
    """`uv run sft @ sft.toml`. Without max_steps every row of the data is seen once."""

    data: DataConfig = SftDataConfig()
    val: SftValConfig | None = None
    """Unset: nothing is held out."""
    strict_data: bool = False
    """Refuse to resume with other records in `data` or `val.data` than those of the checkpoint. False: a warning says it."""
    num_ranks: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Processes; unset: one per visible GPU, one on the CPU."""
    kubernetes: KubernetesConfig | None = None
    """Set: a Kubernetes manifest is written, and nothing runs here."""
    skypilot: SkyPilotConfig | None = None
    """Set: a task of SkyPilot is written, and nothing runs here."""
    slurm: SlurmConfig | None = None
    """Set: the run is submitted to SLURM. Unset: it runs here."""
