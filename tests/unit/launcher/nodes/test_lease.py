"""One first node at a time has the lease of an output directory, whatever locks and clocks do."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from support.processes import wait_until
from trivet.errors import NodesMissing, RunDirectoryBusy
from trivet.launcher.nodes.lease import HeadLease, Lease, read_lease

LOST_AFTER_S = 30.0


@dataclass
class World:
    """Time that passes while a node sleeps, and what happens in each second of it."""

    now: float = 0.0
    events: dict[float, Callable[[], object]] = field(default_factory=dict)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lease.json"


def make_lease(path: Path, world: World | None = None) -> HeadLease:
    world = world or World()
    return HeadLease(path, lost_after_s=LOST_AFTER_S, clock=lambda: world.now, sleep=world.sleep)


@contextmanager
def hold_by_hand(path: Path, world: World) -> Iterator[HeadLease]:
    """Hold a lease that is renewed only when the test says so."""
    lease = make_lease(path, world)
    lease._is_closing.set()
    with lease:
        lease._thread.join()
        yield lease


def write(path: Path, *, term: int = 1, holder: str = "another", number: int = 7) -> None:
    path.write_bytes(msgspec.json.encode(Lease(term=term, holder=holder, node="host-b", number=number)))


def test_the_lease_is_renewed_while_it_is_held_and_removed_at_the_end(path: Path) -> None:
    with make_lease(path):
        taken = read_lease(path)
        assert taken is not None
        assert taken.node == os.uname().nodename
        wait_until(lambda: (read_lease(path) or taken).number > taken.number, timeout_s=20, waiting_for="a renewal")
    assert not path.exists()


def test_a_lease_that_nobody_renews_is_free_after_the_time(path: Path) -> None:
    write(path)
    world = World()
    with make_lease(path, world) as lease:
        assert world.now >= LOST_AFTER_S
        lease.check()


def test_a_lease_that_is_given_back_is_free_at_once(path: Path) -> None:
    write(path)
    world = World(events={2.0: path.unlink})
    with make_lease(path, world):
        assert world.now < LOST_AFTER_S


def test_a_lease_that_another_node_renews_is_refused(path: Path) -> None:
    write(path)
    world = World(events={20.0: lambda: write(path, number=8)})
    with pytest.raises(RunDirectoryBusy, match="another first node, on host-b, leads the run"), make_lease(path, world):
        pass
    assert read_lease(path) == Lease(term=1, holder="another", node="host-b", number=8)


@pytest.mark.parametrize(("holder", "is_mine"), [("", True), ("z", False)])
def test_of_two_nodes_that_take_a_free_lease_at_once_one_has_it(path: Path, holder: str, is_mine: bool) -> None:
    world = World(events={1.0: lambda: write(path, holder=holder, number=1)})
    with suppress(RunDirectoryBusy), make_lease(path, world):
        found = read_lease(path)
        assert found is not None
        assert is_mine
        assert found.node == os.uname().nodename
        return
    assert not is_mine


def test_a_leader_that_hung_does_not_take_the_lease_back(path: Path) -> None:
    with make_lease(path) as lease:
        own = read_lease(path)
        assert own is not None
        write(path, term=own.term + 1)
        wait_until(lambda: lease.is_lost, timeout_s=20, waiting_for="the loss")
        path.write_bytes(msgspec.json.encode(own))  # what it was about to write when it hung
        successor = make_lease(path)
        successor._own = msgspec.structs.replace(successor._own, term=own.term + 1)
        successor.renew()
        assert not successor.is_lost
        found = read_lease(path)
        assert found is not None
        assert found.term == own.term + 1


def test_a_leader_that_cannot_renew_for_long_must_not_lead(path: Path) -> None:
    world = World()
    with make_lease(path, world) as lease:
        moved = path.parent.with_name("moved")
        path.parent.rename(moved)
        path.parent.write_text("in the way")
        world.now += 0.8 * LOST_AFTER_S
        with pytest.raises(NodesMissing, match="could not renew its lease"):
            lease.check()
        path.parent.unlink()
        moved.rename(path.parent)


def test_a_leader_whose_directory_hangs_stops_to_answer_so_early_that_its_agents_have_ended_with_it(path: Path) -> None:
    """Agents end their processes half of the time after the last answer, which is when the leader ends its own."""
    world = World()
    with hold_by_hand(path, world) as lease:
        world.now += 0.25 * LOST_AFTER_S
        assert lease.may_answer
        world.now += 0.1
        assert not lease.may_answer
        lease.renew()
        assert lease.may_answer


def test_a_leader_whose_lease_has_expired_never_leads_again_and_leaves_the_file_to_be_waited_for(path: Path) -> None:
    world = World()
    with hold_by_hand(path, world) as lease:
        world.now += 0.76 * LOST_AFTER_S
        assert lease.has_expired
        lease.renew()
        assert lease.has_expired
        assert not lease.may_answer
        with pytest.raises(NodesMissing):
            lease.check()
    assert path.exists()


def test_a_lease_that_is_still_waited_for_has_not_expired(path: Path) -> None:
    world = World()
    lease = make_lease(path, world)
    world.now += 2 * LOST_AFTER_S
    assert not lease.has_expired


def test_a_lease_that_cannot_be_read_is_waited_for(path: Path) -> None:
    write(path)

    def hide() -> None:
        path.unlink()
        path.mkdir()

    def show() -> None:
        path.rmdir()
        write(path)

    world = World(events={20.0: hide, 40.0: show})
    with make_lease(path, world):
        assert world.now >= 40.0 + LOST_AFTER_S - 1


def test_a_node_whose_lease_was_taken_knows_it_and_leaves_it_to_the_other(path: Path) -> None:
    with make_lease(path) as lease:
        assert not lease.is_lost
        write(path, term=2)
        wait_until(lambda: lease.is_lost, timeout_s=20, waiting_for="the loss")
        with pytest.raises(RunDirectoryBusy, match="host-b"):
            lease.check()
    assert read_lease(path) == Lease(term=2, holder="another", node="host-b", number=7)


def test_a_directory_that_cannot_be_written_for_a_while_costs_no_lease(path: Path) -> None:
    with make_lease(path) as lease:
        taken = read_lease(path)
        assert taken is not None
        moved = path.parent.with_name("moved")
        path.parent.rename(moved)
        path.parent.write_text("in the way")
        with pytest.raises(OSError, match="director"):
            lease.renew()
        path.parent.unlink()
        moved.rename(path.parent)
        wait_until(lambda: (read_lease(path) or taken).number > taken.number, timeout_s=20, waiting_for="a renewal")
        lease.check()


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_a_damaged_lease_is_none(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert read_lease(path) is None
