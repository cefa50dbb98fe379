import threading

import pytest
import torch

from trivet.trainer.checkpoint.snapshot import Snapshot, TensorKey


@pytest.fixture
def state() -> dict:
    return {
        "model": {"a": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0)},
        "groups": [{"b": torch.tensor(3.0), "lr": 0.1}],
    }


def test_nothing_is_copied_of_what_is_read_in_time(state: dict) -> None:
    buffers = dict[TensorKey, torch.Tensor]()
    snapshot = Snapshot(state, buffers=buffers)
    for tensor in (state["model"]["a"], state["model"]["empty"], state["groups"][0]["b"]):
        with snapshot.hold(tensor) as held:
            assert held is tensor
    snapshot.detach()
    assert buffers == {}


def test_what_was_not_read_is_as_it_was_before_the_change(state: dict) -> None:
    snapshot = Snapshot(state, buffers={})
    a, b = state["model"]["a"], state["groups"][0]["b"]
    with snapshot.hold(b):
        pass
    snapshot.detach()
    a.add_(1)
    with snapshot.hold(a) as held:
        assert torch.equal(held, torch.arange(6.0).reshape(2, 3))


def test_a_second_change_finds_the_copies_of_the_first(state: dict) -> None:
    snapshot = Snapshot(state, buffers={})
    a = state["model"]["a"]
    for _ in range(2):
        snapshot.detach()
        a.add_(1)
    with snapshot.hold(a) as held:
        assert torch.equal(held, torch.arange(6.0).reshape(2, 3))


def test_copies_are_made_in_the_memory_of_the_last(state: dict) -> None:
    buffers = dict[TensorKey, torch.Tensor]()
    Snapshot(state, buffers=buffers).detach()
    first = {key: buffer.data_ptr() for key, buffer in buffers.items()}
    state["model"]["a"].mul_(2)
    snapshot = Snapshot(state, buffers=buffers)
    snapshot.detach()
    assert {key: buffer.data_ptr() for key, buffer in buffers.items()} == first
    with snapshot.hold(state["model"]["a"]) as held:
        assert torch.equal(held, torch.arange(6.0).reshape(2, 3) * 2)


def test_memory_of_tensors_that_are_gone_is_given_back(state: dict) -> None:
    buffers, others = dict[TensorKey, torch.Tensor](), [torch.full((3,), float(number)) for number in range(20)]
    for other in others:
        Snapshot(state | {"new each time": other}, buffers=buffers).detach()
    assert len(buffers) == 3


def test_what_the_snapshot_does_not_have_is_refused_once_it_may_have_changed(state: dict) -> None:
    snapshot, part = Snapshot(state, buffers={}), state["model"]["a"][:1]
    with snapshot.hold(part) as held:
        assert held is part
    snapshot.detach()
    with pytest.raises(AssertionError, match=r"\(1, 3\) is not one of the snapshot's"), snapshot.hold(part):
        pass
    with snapshot.hold(state["model"]["empty"]) as held:
        assert held.numel() == 0


def test_the_learner_waits_for_the_tensor_that_is_being_read(state: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, a = Snapshot(state, buffers={}), state["model"]["a"]
    order, waits = list[str](), threading.Event()
    wait_for = snapshot._changed.wait_for

    def tell(predicate) -> bool:
        waits.set()
        return wait_for(predicate)

    monkeypatch.setattr(snapshot._changed, "wait_for", tell)

    def change() -> None:
        snapshot.detach()
        order.append("changed")
        a.add_(1)

    learner = threading.Thread(target=change)
    with snapshot.hold(a) as held:
        learner.start()
        assert waits.wait(10)
        order.append("read")
        assert torch.equal(held, torch.arange(6.0).reshape(2, 3))
    learner.join(10)
    assert order == ["read", "changed"]


def test_a_reader_that_fails_does_not_block_the_learner(state: dict) -> None:
    snapshot = Snapshot(state, buffers={})
    with pytest.raises(OSError, match="gone"), snapshot.hold(state["model"]["a"]):
        raise OSError("the disk is gone")
    snapshot.detach()
