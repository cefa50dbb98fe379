"""Counts the frames on all links of its network namespace, and those that hold a text, until its input ends."""

import select
import socket
import sys

_ALL_PROTOCOLS = 3  # ETH_P_ALL of linux/if_ether.h
_MAX_FRAME_BYTES = 65536


def main() -> None:
    """Print `up`, then the two numbers when the input ends."""
    text = sys.argv[1].encode()
    num_frames = num_with_text = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as listener:
        print("up", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                break
            num_frames += 1
            num_with_text += text in listener.recv(_MAX_FRAME_BYTES)
    print(num_frames, num_with_text)


if __name__ == "__main__":
    main()
