import pytest

from trivet.process.node_places import RankPlace, ServerShard, read_place, read_shard, shard_name


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::2", "node-1.jobs.example"])
def test_ranks_and_shards_read_what_the_launcher_wrote(host: str) -> None:
    place = RankPlace(first_rank=8, num_ranks=32, host=host, port=41000, attempt=3)
    shard = ServerShard(index=1, num_shards=2, host=host, port=41000)
    environ = place.environment() | shard.environment()
    assert (read_place(environ), read_shard(environ)) == (place, shard)
    assert (read_place({"RANK": "0"}), read_shard({})) == (None, None)


def test_the_first_shard_has_the_name_of_the_server() -> None:
    assert [shard_name("inference-2", index) for index in range(2)] == ["inference-2", "inference-2-shard-1"]
