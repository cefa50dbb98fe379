import pytest

from support.transport_ends import make_batch
from trivet.config.layout import MANIFEST, STABLE, RunLayout
from trivet.orchestrator.connections import is_trained
from trivet.wire.batches import BatchPurpose


@pytest.mark.parametrize(
    ("purpose", "step", "expected"),
    [
        (BatchPurpose.TRAIN, 6, True),
        (BatchPurpose.TRAIN, 7, True),
        (BatchPurpose.TRAIN, 8, False),
        (BatchPurpose.PROBE, 7, False),
        (BatchPurpose.PREEMPT, 7, False),
    ],
)
def test_a_published_policy_shows_that_the_trainer_had_the_batches_up_to_it(tmp_path, purpose, step, expected):
    layout = RunLayout(tmp_path)
    for version in (6, 7, 8):
        layout.weights_step(version).mkdir(parents=True)
        (layout.weights_step(version) / MANIFEST).touch()
    for version in (6, 7):
        (layout.weights_step(version) / STABLE).touch()

    assert is_trained(make_batch(step, purpose=purpose), layout) is expected


def test_without_a_policy_no_batch_is_known_to_have_arrived(tmp_path):
    assert not is_trained(make_batch(1), RunLayout(tmp_path))
