"""Real gloo between threads: what arrives is what was sent, and a rank that is lost, silent or a stranger makes the others fail."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from trivet.errors import WeightsError
from trivet.transfer import group as module
from trivet.transfer.group import TransferGroup, open_store
from trivet.wire.versions import PolicyVersion, TransferRound

KEY = b"k" * 32


@pytest.fixture
def make_round() -> Iterator[Callable[..., TransferRound]]:
    store = open_store("127.0.0.1")
    port = store.port

    def make(group_id: str = "g", *, world_size: int = 3, timeout_s: float = 20.0) -> TransferRound:
        return TransferRound(
            version=PolicyVersion(3),
            digest="d",
            group_id=group_id,
            host="127.0.0.1",
            port=port,
            world_size=world_size,
            timeout_s=timeout_s,
        )

    yield make
    del store


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def make_groups(*keys: bytes) -> list[TransferGroup]:
    return [TransferGroup(device=torch.device("cpu"), key=key) for key in keys]


def start(
    threads: ThreadPoolExecutor,
    groups: Sequence[TransferGroup],
    transfer: TransferRound,
    files: Sequence[Sequence[torch.Tensor]],
) -> list[Future[None]]:
    """Begin the broadcast of each rank, which has the files of its place in `files`."""
    each = enumerate(zip(groups, files, strict=True))
    return [threads.submit(group.broadcast, transfer, memory, rank=rank) for rank, (group, memory) in each]


def make_files(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in (1000, 1, 64)]


@pytest.mark.parametrize("chunk_bytes", [64 << 20, 64, 1])
def test_files_arrive_as_they_were_sent(
    make_round: Callable[..., TransferRound], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
    groups = make_groups(KEY, KEY, KEY)
    for seed, group_id in enumerate(["g", "h"]):
        sent = make_files(seed)
        received = [[torch.zeros_like(file) for file in sent] for _ in range(2)]
        for future in start(threads, groups, make_round(group_id), [sent, *received]):
            future.result(30)
        assert all(torch.equal(ours, file) for files in received for ours, file in zip(files, sent, strict=True))
    for group in groups:
        group.close()
        group.close()


def test_a_stranger_without_the_key_is_noticed_by_all_before_anything_is_sent(
    make_round: Callable[..., TransferRound], threads: ThreadPoolExecutor
) -> None:
    received = [[torch.zeros(4, dtype=torch.uint8)] for _ in range(2)]
    sent = [torch.ones(4, dtype=torch.uint8)]
    futures = start(threads, make_groups(KEY, b"other" * 8, KEY), make_round(), [sent, *received])
    for future, rank in zip(futures, (1, 0, 1), strict=True):
        error = future.exception(30)
        assert isinstance(error, WeightsError)
        assert f"as rank {rank} of a weight transfer does not have the run's secret" in str(error)
    assert not any(files[0].any() for files in received)


def test_a_rank_that_does_not_come_ends_the_wait(make_round: Callable[..., TransferRound]) -> None:
    [trainer] = make_groups(KEY)
    with pytest.raises(RuntimeError):
        trainer.broadcast(make_round(world_size=2, timeout_s=0.5), [])


def test_a_rank_that_is_silent_ends_the_wait_and_another_round_connects_anew(
    make_round: Callable[..., TransferRound], threads: ThreadPoolExecutor
) -> None:
    groups, sent, received = make_groups(KEY, KEY), make_files(0), [torch.zeros_like(file) for file in make_files(0)]
    silent, receiving = start(threads, groups, make_round(world_size=2, timeout_s=1.0), [[], received])
    silent.result(30)
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        receiving.result(30)
    for future in start(threads, groups, make_round("h", world_size=2), [sent, received]):
        future.result(30)
    assert torch.equal(received[0], sent[0])


def test_a_trainer_that_cannot_read_a_file_ends_the_wait_at_once(
    make_round: Callable[..., TransferRound], threads: ThreadPoolExecutor
) -> None:
    def read() -> Iterator[torch.Tensor]:
        time.sleep(0.2)
        raise WeightsError("it is gone")
        yield

    trainer, worker = make_groups(KEY, KEY)
    transfer = make_round(world_size=2, timeout_s=300.0)
    sending = threads.submit(trainer.broadcast, transfer, read())
    waiting = threads.submit(worker.broadcast, transfer, make_files(0), rank=1)
    assert isinstance(sending.exception(60), WeightsError)
    assert isinstance(waiting.exception(60), RuntimeError)
