import pytest

from trivet.config.load import load_config
from trivet.config.schema.sft import SftConfig


@pytest.mark.parametrize(
    ("argv", "notice"),
    [
        ("--loss-impl liger", "loss_impl (flag --loss-impl) has no effect: head and loss are computed together"),
        ("--data.num-workers 4", "data.num_workers (flag --data.num-workers) has no effect"),
        ("--data.seq-len 64", "data.seq_len is called model.seq_len here"),
        ("--val.data.batch-size 8", "has no effect: the held-out loss is the mean over the whole set"),
        ("--val.data.type sft", "sft is the only choice here"),
    ],
)
def test_keys_without_a_place_here_are_taken_with_a_line(argv: str, notice: str) -> None:
    loaded = load_config(SftConfig, argv.split(), environ={})
    assert any(notice in line for line in loaded.notices)
    if "seq-len" in argv:
        assert loaded.config.model.seq_len == 64
