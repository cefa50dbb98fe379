"""The ranks of a node read what the launcher told them."""

import pytest

from trivet.process.rank_place import RankPlace, read_place


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::2", "node-1.jobs.example"])
def test_ranks_read_the_place_that_the_launcher_wrote(host: str) -> None:
    place = RankPlace(first_rank=8, num_ranks=32, host=host, port=41000, attempt=3)
    assert read_place(place.environment()) == place


def test_one_variable_carries_the_place() -> None:
    environment = RankPlace(first_rank=0, num_ranks=2, host="10.0.0.1", port=41000, attempt=1).environment()
    assert environment == {"TRAINER_RANK_PLACE": "0 2 1 41000 10.0.0.1"}


def test_ranks_of_one_machine_have_no_place() -> None:
    assert read_place({"RANK": "0", "WORLD_SIZE": "2"}) is None
