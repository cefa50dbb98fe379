"""Writes a trainer's part of a checkpoint at once."""

from pathlib import Path
from typing import Any

from trivet.storage.durable import FileRecord
from trivet.trainer.checkpoint.shard_file import ShardFile
from trivet.trainer.ranks.world import World


def write_state(directory: Path, state: dict[str, Any], world: World) -> dict[str, FileRecord]:
    """Write this rank's shards of `state` into `directory`, which exists. Collective."""
    file = ShardFile(world)
    file.copy(directory, state)
    return file.write(world.control)
