"""Makes up batches for a run of the trainer by itself (`trainer.data.fake`). A `BatchReceiver`."""

from trivet.config.schema.trainer import TrainerConfig
from trivet.trainer.measurement.fake_data import fake_rows
from trivet.trainer.model.initial_weights import read_config
from trivet.trainer.model.policy_model import require_model
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.versions import Step


class FakeReceiver:
    """A receiver of made-up batches."""

    def __init__(self, config: TrainerConfig, *, from_step: Step) -> None:
        """Read the model's vocabulary size.

        Raises:
            ConfigError: there is no such model.
        """
        assert config.data.fake is not None
        self._fake = config.data.fake
        self._seq_len = config.model.seq_len
        self._seed = config.seed
        self._from_step = from_step
        require_model(config.model.name)
        self._vocab_size = int(read_config(config.model).get_text_config().vocab_size)

    def receive(self, step: Step) -> Batch:
        """Return batch `step`, the same each time; for the step that the run starts from, an empty probe."""
        if step == self._from_step:
            return Batch(step=step, purpose=BatchPurpose.PROBE, micro_batches=[], group_ids=[], num_rollouts=0)
        rows = fake_rows(
            step,
            seed=self._seed,
            seq_len=self._seq_len,
            vocab_size=self._vocab_size,
            rows_per_rank=self._fake.batch_size,
            length="variable" if self._fake.generate_samples else "fixed",
        )
        num_rollouts = sum(len(row.sequence_lengths_S) for row in rows)
        return Batch(step=step, purpose=BatchPurpose.TRAIN, micro_batches=rows, group_ids=[], num_rollouts=num_rollouts)

    def close(self) -> None:
        """Do nothing: the receiver holds no resource."""
