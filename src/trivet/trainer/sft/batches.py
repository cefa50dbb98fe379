"""Chooses the sequences of each step of supervised fine-tuning and packs them into rows. Called by `trainer.sft.main`.

A batch depends on configuration, data and step alone: every rank makes the same batch, and so does a resumed run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from trivet.algorithms.packing import PackItem, pack, stack
from trivet.checkpoints.settings import DataRecord
from trivet.config.schema.sft import FakeDataConfig, LossMaskConfig, SftConfig, SftDataConfig
from trivet.conversations.mixture import Mixture, open_data, step_indices
from trivet.errors import BatchError
from trivet.trainer.measurement.fake import fake_item
from trivet.trainer.sft.data import to_sample
from trivet.wire.batches import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SftBatch:
    """The rows of one step."""

    rows: Sequence[MicroBatch]
    num_samples: int
    num_truncated: int
    """Sequences longer than model.seq_len; their beginning is trained on."""
    num_empty: int
    """Sequences left out: they have no trained token within model.seq_len."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationBatches:
    """Sequences made from conversations, in the order that `config` asks for."""

    data: Mixture
    config: SftDataConfig
    seed: int
    tokenizer: PreTrainedTokenizerBase

    @property
    def num_steps(self) -> int | None:
        """Steps of one epoch, rounded up."""
        return -(-len(self.data) // self.config.batch_size)

    def items(self, step: int) -> list[PackItem]:
        """Render and tokenize the conversations of step `step`."""
        indices = step_indices(
            step,
            batch_size=self.config.batch_size,
            num_records=len(self.data),
            seed=self.seed,
            does_shuffle=self.config.shuffle,
        )
        return to_items(self.data, indices, self.tokenizer, loss_mask=self.config.loss_mask)

    def epoch(self, step: int) -> int:
        """Return the epoch, from 0, of the last conversation of step `step`."""
        return (step * self.config.batch_size - 1) // len(self.data)

    def record(self) -> DataRecord:
        """Return the number of conversations and their digest."""
        return DataRecord(num_records=len(self.data), digest=self.data.digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBatches:
    """An endless source of made-up sequences."""

    config: FakeDataConfig
    seed: int
    seq_len: int
    vocab_size: int

    @property
    def num_steps(self) -> int | None:
        """Return None: there is no end."""
        return None

    def items(self, step: int) -> list[PackItem]:
        """Make up the sequences of step `step`."""
        size = self.config.batch_size
        return [
            fake_item(
                index,
                seed=self.seed,
                seq_len=self.seq_len,
                vocab_size=self.vocab_size,
                length=self.config.length,
                token_ids=self.config.input_ids,
            )
            for index in range((step - 1) * size, step * size)
        ]

    def epoch(self, step: int) -> int:
        """Return 0: there is no second epoch."""
        return 0

    def record(self) -> DataRecord:
        """Return nothing that could differ: seed and configuration say all."""
        return DataRecord(num_records=0, digest="")


Batches = ConversationBatches | FakeBatches


def open_batches(config: SftConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> Batches:
    """Open the data that `config.data` names."""
    seed = config.seed if config.data.seed is None else config.data.seed
    if isinstance(config.data, FakeDataConfig):
        return FakeBatches(config=config.data, seed=seed, seq_len=config.model.seq_len, vocab_size=vocab_size)
    data = open_data(config.data, seed=config.seed, key="data")
    return ConversationBatches(data=data, config=config.data, seed=seed, tokenizer=tokenizer)


def to_items(
    data: Mixture, indices: Iterable[int], tokenizer: PreTrainedTokenizerBase, *, loss_mask: LossMaskConfig
) -> list[PackItem]:
    """Turn the conversations at `indices` into samples without advantage."""
    samples = (to_sample(data.conversation(index), tokenizer, loss_mask=loss_mask) for index in indices)
    return [PackItem(sample=sample, advantage=0.0) for sample in samples]


def make_batch(items: Sequence[PackItem], config: SftConfig) -> SftBatch:
    """Pack the sequences into rows of one forward each, as `data.pack_function` and `data.micro_batch_size` say."""
    seq_len, num_rows = config.model.seq_len, config.data.micro_batch_size
    if config.data.pack_function == "stack":
        rows = stack(items, seq_len=seq_len, samples_per_row=num_rows)
    else:
        rows = pack(items, seq_len=seq_len, row_len=num_rows * seq_len)
    if not rows:
        raise BatchError(
            f"none of the {len(items)} conversations of this step has a token to train on within model.seq_len ({seq_len}): "
            "raise it, or look at data.loss_mask and at the roles in the data"
        )
    return SftBatch(
        rows=rows,
        num_samples=len(items),
        num_truncated=sum(item.sample.num_tokens > seq_len for item in items),
        num_empty=len(items) - sum(len(row.sequence_lengths_S) for row in rows),
    )
