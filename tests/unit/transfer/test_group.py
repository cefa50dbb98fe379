"""Real gloo between threads: what arrives is what was sent, and a rank that is lost, silent or a stranger makes the others fail."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trivet.errors import WeightsError
from trivet.transfer import group as module
from trivet.transfer.group import TransferGroup, open_store
from trivet.transfer.tensors import describe
from trivet.wire.transfers import TransferHeader, TransferRound
from trivet.wire.versions import PolicyVersion

KEY = b"k" * 32
CPU = torch.device("cpu")
V = PolicyVersion(3)


@pytest.fixture
def make_round() -> Iterator[Callable[..., TransferRound]]:
    store, port = open_store("127.0.0.1")

    def make(group_id: str = "g", *, world_size: int = 3, timeout_s: float = 20.0) -> TransferRound:
        return TransferRound(
            version=V, group_id=group_id, host="127.0.0.1", port=port, world_size=world_size, timeout_s=timeout_s
        )

    yield make
    del store


def join(transfer: TransferRound, keys: list[bytes]) -> list[TransferGroup]:
    """Connect one rank per key, each on a thread."""
    with ThreadPoolExecutor(len(keys)) as pool:
        futures = [pool.submit(TransferGroup, transfer, rank=rank, device=CPU, key=key) for rank, key in enumerate(keys)]
        return [future.result() for future in futures]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(1000, 3, generator=generator).bfloat16()
    return {"a": large, "b": torch.tensor(4.5), "c": torch.zeros(0, 2), "d": torch.arange(5, dtype=torch.int64), "e": large.T}


@pytest.mark.parametrize("bucket_bytes", [64 << 20, 64, 1])
def test_tensors_arrive_as_they_were_sent(
    make_round: Callable[..., TransferRound], monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(module, "_BUCKET_BYTES", bucket_bytes)
    sent = tensors()
    header = TransferHeader(version=V, tensors=[describe(*pair) for pair in sent.items()])
    trainer, *workers = join(make_round(), [KEY] * 3)

    def receive(worker: TransferGroup) -> dict[str, torch.Tensor]:
        found = worker.receive_header(V)
        return {info.name: tensor for pairs in worker.receive(found) for info, tensor in pairs}

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # the connections are used again
            received = [pool.submit(receive, worker) for worker in workers]
            trainer.send_header(header)
            trainer.send(header, sent)
            for future in received:
                found = future.result()
                assert list(found) == list(sent)
                for name, tensor in sent.items():
                    assert found[name].dtype == tensor.dtype
                    assert torch.equal(found[name], tensor)
    for group in (trainer, *workers):
        group.close()
        group.close()


def test_a_refusal_and_another_version_are_errors(make_round: Callable[..., TransferRound]) -> None:
    trainer, worker = join(make_round(world_size=2), [KEY] * 2)
    for header, reason in (
        (TransferHeader(version=V, refusal="it is gone"), "it is gone"),
        (TransferHeader(version=PolicyVersion(4)), "sends policy 4, not 3"),
    ):
        sending = threading.Thread(target=trainer.send_header, args=(header,))
        sending.start()
        with pytest.raises(WeightsError, match=reason):
            worker.receive_header(V)
        sending.join()


def test_a_stranger_without_the_key_is_noticed_by_all(make_round: Callable[..., TransferRound]) -> None:
    transfer = make_round()
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(TransferGroup, transfer, rank=rank, device=CPU, key=key)
            for rank, key in enumerate([KEY, b"other" * 8, KEY])
        ]
        errors = [future.exception(30) for future in futures]
    for error, rank in zip(errors, (1, 0, 1), strict=True):
        assert isinstance(error, WeightsError)
        assert f"as rank {rank} of a weight transfer does not have the run's secret" in str(error)


def test_a_rank_that_does_not_come_ends_the_wait(make_round: Callable[..., TransferRound]) -> None:
    with pytest.raises(RuntimeError):
        TransferGroup(make_round(world_size=2, timeout_s=0.5), rank=0, device=CPU, key=KEY)


def test_a_rank_that_is_silent_ends_the_wait(make_round: Callable[..., TransferRound]) -> None:
    trainer, worker = join(make_round(world_size=2, timeout_s=1.0), [KEY] * 2)
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        worker.receive_header(V)
    trainer.close()


def test_a_rank_that_closes_ends_the_wait_at_once(make_round: Callable[..., TransferRound]) -> None:
    trainer, worker = join(make_round(world_size=2, timeout_s=300.0), [KEY] * 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.receive_header, V)
        time.sleep(0.2)
        trainer.close()
        del trainer
        assert isinstance(waiting.exception(60), RuntimeError)
