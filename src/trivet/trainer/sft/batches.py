"""Makes the rows of each step of supervised fine-tuning, from conversations or made-up sequences. Called by `trainer.sft.main`.

A batch depends on configuration, data and step alone: every rank makes the same batch, and so does a resumed run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from trivet.algorithms.packing import PackItem, pack, stack
from trivet.checkpoints.settings import DataRecord
from trivet.config.schema.sft import FakeDataConfig, LossMaskConfig, SftConfig
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
class Batches:
    """Makes the batches of a run, in the order that `config.data` sets."""

    config: SftConfig
    tokenizer: PreTrainedTokenizerBase
    data: Mixture | None
    """The conversations; None: sequences are made up, without end."""

    @classmethod
    def open(cls, config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> "Batches":
        """Open the data that `config.data` names."""
        data = None
        if not isinstance(config.data, FakeDataConfig):
            data = open_data(config.data, seed=config.seed, key="data")
        return cls(config=config, tokenizer=tokenizer, data=data)

    @property
    def num_steps(self) -> int | None:
        """Steps of one epoch, rounded up; None: there is no end."""
        return None if self.data is None else -(-len(self.data) // self.config.data.batch_size)

    def epoch(self, step: int) -> int:
        """Return the epoch, from 0, of the last sequence of step `step`."""
        return 0 if self.data is None else (step * self.config.data.batch_size - 1) // len(self.data)

    def record(self) -> DataRecord:
        """Return the number of conversations and their digest. Made-up sequences have none: the configuration fixes them."""
        if self.data is None:
            return DataRecord(num_records=0, digest="")
        return DataRecord(num_records=len(self.data), digest=self.data.digest())

    def make(self, step: int) -> SftBatch:
        """Pack the sequences of step `step` into rows by `data.pack_function`.

        A row has `data.micro_batch_size` sequences with "stack", and otherwise as many times model.seq_len tokens.
        """
        items, data = self._items(step), self.config.data
        seq_len = self.config.model.seq_len
        if data.pack_function == "stack":
            rows = stack(items, seq_len=seq_len, samples_per_row=data.micro_batch_size)
        else:
            rows = pack(items, seq_len=seq_len, row_len=data.micro_batch_size * seq_len)
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

    def _items(self, step: int) -> list[PackItem]:
        config = self.config.data
        seed = self.config.seed if config.seed is None else config.seed
        if isinstance(config, FakeDataConfig):
            return [
                fake_item(
                    index,
                    seed=seed,
                    seq_len=self.config.model.seq_len,
                    vocab_size=len(self.tokenizer),
                    length=config.length,
                    token_ids=config.input_ids,
                )
                for index in range((step - 1) * config.batch_size, step * config.batch_size)
            ]
        assert self.data is not None
        indices = step_indices(
            step, batch_size=config.batch_size, num_records=len(self.data), seed=seed, does_shuffle=config.shuffle
        )
        return to_items(self.data, indices, self.tokenizer, loss_mask=config.loss_mask)


def to_items(
    data: Mixture, indices: Iterable[int], tokenizer: PreTrainedTokenizerBase, *, loss_mask: LossMaskConfig
) -> list[PackItem]:
    """Render and tokenize the conversations at `indices`, as samples without advantage."""
    samples = (to_sample(data.conversation(index), tokenizer, loss_mask=loss_mask) for index in indices)
    return [PackItem(sample=sample, advantage=0.0) for sample in samples]
