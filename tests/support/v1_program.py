"""Plays one group of a v1 environment with the verifiers of its interpreter, as a worker does, and writes its rollouts to a file.

PYTHONPATH=src:tests:tests/support/environments PYTHON tests/support/v1_program.py OUT < order.json
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from trivet.environments.apis.load import load_host
from trivet.wire.codec import encode
from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import Group
from trivet.wire.workers import HostSettings


class Order(msgspec.Struct):
    """The input of the program: the settings of the environment, and the group to run."""

    settings: HostSettings
    request: GroupRequest


async def play(order: Order) -> Group:
    """Run the group of the order."""
    host = load_host(order.settings, environ=os.environ)
    request = order.request
    async with host.serving():
        rollouts = await host.run_group(request)
    return Group(group_id=request.group_id, env=request.env, example_id=request.example_id, rollouts=rollouts)


if __name__ == "__main__":
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Order])
    for number, each in enumerate(orders):
        (Path(sys.argv[1]) / str(number)).write_bytes(encode(asyncio.run(play(each))))
