"""The shards of a server read what the launcher told them."""

import pytest

from trivet.process.server_shard import ServerShard, read_shard, shard_name


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::2", "node-1.jobs.example"])
def test_a_shard_reads_what_the_launcher_wrote(host: str) -> None:
    shard = ServerShard(index=1, num_shards=2, host=host, port=41000)
    assert read_shard(shard.environment()) == shard


def test_one_variable_carries_the_shard() -> None:
    environment = ServerShard(index=1, num_shards=2, host="10.0.0.1", port=41000).environment()
    assert environment == {"INFERENCE_SERVER_SHARD": "1 2 41000 10.0.0.1"}


def test_a_server_of_one_node_has_no_shards() -> None:
    assert read_shard({}) is None


def test_the_first_shard_has_the_name_of_the_server() -> None:
    assert [shard_name("inference-2", index) for index in range(3)] == [
        "inference-2",
        "inference-2-shard-1",
        "inference-2-shard-2",
    ]
    assert [ServerShard(index=index, num_shards=2, host="h", port=1).is_first for index in range(2)] == [True, False]
