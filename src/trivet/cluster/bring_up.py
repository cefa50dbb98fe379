"""Starts Ray on one node of a job, and on the first node the command that drives the run.

    python -m trivet.cluster.bring_up --directory outputs/slurm --job 17.0 --index 0 -- COMMAND…

Every node of the job runs this program. The first one makes a directory for this start of the job, which only its owner may read:
with a token, an authority for certificates and the address of the cluster. The others wait for that address. When the command has
ended, the first node removes the directory, which tells the others to end, and notes the exit code in `JOB.code` beside it. So no
file of an earlier start misleads a node for long: its address does not answer, and the node reads the file again.
"""

import argparse
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trivet.cluster.addresses import own_address
from trivet.cluster.ray_node import RayNode, Signals, make_authority
from trivet.errors import NodesMissing, TrivetError
from trivet.process.lifetime import adopt_orphans, tied_command
from trivet.process.sockets import ReservedPorts, address_towards
from trivet.schedulers.lost_script import MAX_WATCHERS, replace_lost_script
from trivet.shown_text import print_error
from trivet.storage.durable import write_atomically, write_json_atomically

_HEAD_FILE = "head.json"
_POLL_INTERVAL_S = 1.0
_FIRST_TIMEOUT_S = 300.0
"""The first node imports and starts Ray for seconds, and a file on NFS is seen up to a minute late."""
_LOST_TIMEOUT_S = 30.0
"""How long a node whose Ray has ended seeks the first node."""
_PROBE_INTERVAL_S = 5.0
"""Seconds between two connections to the head. Ray itself notices minutes later that a machine is silent."""
_MAX_STARTS = 5
"""Starts of Ray on a node, each of which ended within `_STABLE_S`, after which the node gives up."""
_STABLE_S = 60.0


class Head(msgspec.Struct, frozen=True):
    """The cluster of one start of a job."""

    host: str
    port: int


def lead(args: argparse.Namespace, directory: Path, signals: Signals) -> int:
    """Start the cluster, run the command, end the cluster; return the command's exit code.

    Raises:
        NodesMissing: Ray does not start here.
    """
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier start with the same name
    directory.mkdir(mode=0o700, parents=True)
    write_atomically(directory / "token", secrets.token_hex(32).encode(), is_private=True)
    make_authority(directory)
    address = own_address(os.environ.get("SLURMD_NODENAME"))
    node = _ray_node(args, directory, address)
    try:
        head = _start_head(node, signals)
        if head is None:
            return 128 + signals.received[0]
        write_json_atomically(directory / _HEAD_FILE, head)
        variables = node.variables | {"RAY_ADDRESS": f"{head.host}:{head.port}"}
        signals.command = subprocess.Popen(tied_command(args.command), env=os.environ | variables, start_new_session=True)
        for number in signals.received:  # it came while the command was starting
            signals.command.send_signal(number)
        while (ended := signals.command.poll()) is None:
            if not node.is_running():
                print("bring_up: Ray has ended on the first node; the command decides what that means", file=sys.stderr)
                ended = signals.command.wait()
                break
            with suppress(subprocess.TimeoutExpired):
                signals.command.wait(_POLL_INTERVAL_S)
        return ended if ended >= 0 else 128 - ended
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        node.remove()


def _ray_node(args: argparse.Namespace, directory: Path, address: str) -> RayNode:
    return RayNode(directory, address=address, num_gpus=args.gpus, num_cpus=args.cpus, lost_after_s=args.lost_after_s)


def _start_head(node: RayNode, signals: Signals) -> Head | None:
    """Start Ray; return None when a signal came first."""
    for _ in range(_MAX_STARTS):
        with ReservedPorts() as ports:
            port, client_port = (ports.reserve(node.address, preferred=0) for _ in range(2))
        # Nobody uses the server for clients. It cannot be left out, and two jobs on one machine need two ports.
        words = ["--head", f"--port={port}", f"--ray-client-server-port={client_port}", "--include-dashboard=false"]
        if node.start(words, is_wanted=lambda: not signals.received):
            return Head(node.address, port)
        if signals.received:
            return None
    raise NodesMissing(f"Ray did not start on the first node in {_MAX_STARTS} attempts: see the lines above")


def join(args: argparse.Namespace, directory: Path, signals: Signals) -> bool:
    """Keep this node in the cluster until the first node has ended; return whether that said so itself."""
    head, num_starts = await_head(directory, timeout_s=_FIRST_TIMEOUT_S, signals=signals), 0
    if head is None and not signals.received:
        print(f"bring_up: no cluster in {directory} within {_FIRST_TIMEOUT_S:g} s: see the first node's lines", file=sys.stderr)
    while head is not None and num_starts < _MAX_STARTS:
        since = time.monotonic()
        try:
            node = _ray_node(args, directory, address_towards(head.host))
            _run_other(node, directory, head, signals, lost_after_s=args.lost_after_s)
        except OSError as exc:  # the first node removes the directory just now, or this one has no network
            print(f"bring_up: Ray was not started on this node: {exc}", file=sys.stderr)
        if is_over(directory, head):
            return True
        if signals.received:
            return False
        num_starts = num_starts + 1 if time.monotonic() - since < _STABLE_S else 1
        head = await_head(directory, timeout_s=_LOST_TIMEOUT_S, signals=signals)
    return False


def _run_other(node: RayNode, directory: Path, head: Head, signals: Signals, *, lost_after_s: float) -> None:
    """Run Ray on this node until it ends, the first node has ended, or the first node's machine is silent for `lost_after_s`."""
    signals.leaving = node.leaving
    try:
        if not node.start([f"--address={head.host}:{head.port}"], is_wanted=lambda: not is_over(directory, head)):
            return
        reached_at = due = time.monotonic()
        while node.is_running() and not is_over(directory, head) and time.monotonic() - reached_at < lost_after_s:
            time.sleep(_POLL_INTERVAL_S)
            if time.monotonic() > due:
                reached_at = time.monotonic() if answers(head) else reached_at
                due = time.monotonic() + _PROBE_INTERVAL_S
    finally:
        signals.leaving = None
        node.remove()


def await_head(directory: Path, *, timeout_s: float, signals: Signals) -> Head | None:
    """Return the cluster of this start of the job, once its head can be reached; None when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not signals.received and time.monotonic() < deadline:
        try:
            if answers(head := read_head(directory)):  # it may be of an earlier start, or cut off
                return head
        except (OSError, msgspec.DecodeError):  # not yet there
            pass
        time.sleep(_POLL_INTERVAL_S)
    return None


def answers(head: Head) -> bool:
    """Return whether the machine of the head answers, and Ray on it listens."""
    try:
        with socket.create_connection((head.host, head.port), timeout=_POLL_INTERVAL_S):
            return True
    except OSError:
        return False


def read_head(directory: Path) -> Head:
    """Return the cluster that the first node has written down.

    Raises:
        OSError: this node does not see it.
    """
    list(directory.parent.iterdir())  # NFS remembers for a while that a name was not there, unless its directory is read
    return msgspec.json.decode((directory / _HEAD_FILE).read_bytes(), type=Head)


def is_over(directory: Path, head: Head) -> bool:
    """Return whether the first node has removed the cluster's directory, or made another."""
    try:
        return read_head(directory) != head
    except FileNotFoundError:
        return True
    except OSError:  # the file system does not answer for a moment
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the node of a job to its end; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="a directory that all nodes of the job see")
    parser.add_argument("--job", required=True, help="a name of this start of the job, the same on every node")
    parser.add_argument(
        "--index", type=int, default=os.environ.get("SLURM_PROCID", "0"), help="the number of this node, from 0"
    )
    parser.add_argument("--gpus", type=int, help="GPUs for Ray; those that it finds unless this is given")
    parser.add_argument("--cpus", type=int, default=os.environ.get("SLURM_CPUS_ON_NODE"), help="cores for Ray")
    parser.add_argument("--lost-after-s", type=float, default=30.0, help="deployment.lost_after_s of the run")
    parser.add_argument("--script-host", help="SLURM's name of the node that runs the batch script, when the job may lose it")
    parser.add_argument("--script-lost", default="scancel", help="the command that is given the job's number then")
    parser.add_argument("command", nargs="+", help="what the first node runs, after --")
    args = parser.parse_args(arguments)
    if args.index < 0 or "/" in args.job:
        parser.error("--index must be >= 0, and --job a name without a slash")
    adopt_orphans()
    signals, directory = Signals(), args.directory.absolute() / f"ray-{args.job}"
    code = args.directory.absolute() / f"{args.job}.code"
    try:
        if args.index == 0:
            return _note(code, lead(args, directory, signals))
        is_ended = join(args, directory, signals)
    except TrivetError as exc:
        print_error(exc)
        return _note(code, exc.exit_code) if args.index == 0 else 0
    if args.script_host and not is_ended and not signals.received and args.index <= MAX_WATCHERS:
        signals.restore()
        replace_lost_script(os.environ["SLURM_JOB_ID"], host=args.script_host, action=args.script_lost, is_over=code.exists)
    return 0  # the first node's exit code is the job's


def _note(file: Path, exit_code: int) -> int:
    """Note the exit code for the batch script: of all nodes srun reports the highest."""
    try:
        write_atomically(file, f"{exit_code}\n".encode())
    except OSError as exc:  # the job still ends with this code, unless the scheduler kills another node
        print(f"exit code {exit_code} was not noted in {file}: {exc.strerror}; see why that cannot be written", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
