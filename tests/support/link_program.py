"""Passes frames on between two network interfaces of this namespace, late or with some of them lost: a bad cable.

    python link_program.py INTERFACE INTERFACE --loss 0.1 --delay 0.2

The kernels that tests run on need not have netem. What is lost is drawn from a fixed seed. Ends with SIGTERM.
"""

import argparse
import heapq
import random
import select
import socket
import sys
import time
from contextlib import suppress

_MAX_FRAME = 1 << 16
_EVERY_PROTOCOL = 0x0003


def open_interface(name: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    link.bind((name, 0))
    link.setblocking(False)
    return link


def forward(names: list[str], *, loss: float, delay_s: float) -> None:
    links = [open_interface(name) for name in names]
    others = {links[0]: links[1], links[1]: links[0]}
    rng, number = random.Random(0), 0
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    print("up", flush=True)
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for link in select.select(links, (), (), timeout_s)[0]:
            with suppress(BlockingIOError):
                while True:
                    frame, (_, _, kind, *_) = link.recvfrom(_MAX_FRAME)
                    if kind == socket.PACKET_OUTGOING or rng.random() < loss:
                        continue
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + delay_s, number, others[link], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            with suppress(OSError):  # the buffer is full, or the cable was pulled: the frame is lost
                target.send(frame)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interfaces", nargs=2)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--delay", type=float, default=0.0)
    arguments = parser.parse_args()
    forward(arguments.interfaces, loss=arguments.loss, delay_s=arguments.delay)
    return 0


if __name__ == "__main__":
    sys.exit(main())
