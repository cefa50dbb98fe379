"""Strangers on the network of a Ray cluster: every port beyond loopback refuses them, and an open cluster is found."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.nodes import can_make_nodes
from support.processes import wait_until
from support.ray_nodes import START_S, RayNodes, make_ray_nodes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")]
SUPPORT = Path(__file__).parents[1] / "support"
STRANGER = 2
"""The machine that is on the network, but not in the cluster."""
LISTENS = "0A"  # the state TCP_LISTEN in /proc/net/tcp
LOOPBACK = ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F")
SERVICES = {
    "gcs/gcs_server": "GCS",
    "raylet/raylet": "raylet, object manager",
    "ray::DashboardAgent": "agent",
    "ray::RuntimeEnvAgent": "agent of runtime environments",
    "ray.util.client.server": "Ray client",
    "ray::Counter": "actor",
    "ray_program": "driver",
}
REFUSALS = {"UNAUTHENTICATED", "401", "403"}
OTHER_PROTOCOL = {"UNAVAILABLE", "BadStatusLine", "RemoteDisconnected", "ConnectionResetError"}
PUBLIC = {"GET /api/healthz", "POST /api/healthz"}
"""The agent says to everybody whether it is healthy, and nothing else."""
IS_OPEN = """
import sys
from trivet.cluster.ray_cluster import is_open
try:
    print(is_open(sys.argv[1], timeout_s=5.0))
except ConnectionError:
    print("away")
"""


def find_ports(nodes: RayNodes, machine: int) -> dict[str, str]:
    """Return the addresses beyond loopback at which a machine listens, with the service of each."""
    owners: dict[str, str] = {}
    pids = nodes.pids(machine)
    for pid in pids:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if inode := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                owners[inode[1]] = next((name for words, name in SERVICES.items() if words in command), command)
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTENS and address not in LOOPBACK:
                found[f"{nodes.address(machine)}:{int(port, 16)}"] = owners[fields[9]]
    return found


def judge(attempts: dict[str, str]) -> str:
    """Say what a stranger got from a port: a refusal, nothing, or the answers."""
    answers = {what: status for what, status in attempts.items() if what not in PUBLIC and status not in OTHER_PROTOCOL}
    if answers and set(answers.values()) <= REFUSALS:
        return "refused"
    return f"answers {answers}" if answers else "speaks no protocol with it"


def try_ports(nodes: RayNodes, directory: Path, asked: dict[str, object]) -> dict[str, dict[str, dict[str, str]]]:
    log = directory / "stranger.out"
    command = [sys.executable, str(SUPPORT / "stranger_program.py"), json.dumps(asked)]
    assert nodes.start(STRANGER, command, log=log, environ=os.environ).wait(START_S) == 0, log.read_text()
    looks = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return {look["address"]: look["attempts"] for look in looks}


def ask_is_open(nodes: RayNodes, directory: Path, address: str) -> str:
    log = directory / f"is_open_{address}.out"
    command = [sys.executable, "-c", IS_OPEN, address]
    assert nodes.start(0, command, log=log, environ=nodes.environ(os.environ)).wait(START_S) == 0, log.read_text()
    return log.read_text().splitlines()[-1]


@contextmanager
def counted_frames(nodes: RayNodes, text: str) -> Iterator[list[int]]:
    """Count the frames on the switch during a block, and those that hold `text`. The list is empty until its end."""
    command = ["ip", "netns", "exec", f"{nodes.name}-switch", sys.executable, str(SUPPORT / "frames_program.py"), text]
    numbers: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        yield numbers
        numbers += map(int, program.communicate(timeout=20)[0].split())


@pytest.mark.parametrize("has_tls", [False, True])
def test_every_port_of_a_closed_cluster_refuses_a_stranger(tmp_path: Path, has_tls: bool) -> None:
    with make_ray_nodes(3, directory=tmp_path, has_tls=has_tls) as nodes:
        assert nodes.token is not None
        token = nodes.token.read_text()
        with counted_frames(nodes, token) as frames:
            nodes.start_head(num_cpus=1)
            nodes.join(1)
            log = tmp_path / "driver.out"
            program = [sys.executable, str(SUPPORT / "ray_program.py"), "2"]
            nodes.start(0, program, log=log, environ=nodes.environ(os.environ))
            wait_until(lambda: '{"counts"' in log.read_text(), timeout_s=START_S, waiting_for="an actor on each machine")
        ports = find_ports(nodes, 0) | find_ports(nodes, 1)
        assert set(ports.values()) == set(SERVICES.values())  # nothing else listens, and all of these are seen
        tokens = {"none": None, "wrong": "0" * len(token)} | ({} if has_tls else {"valid": token})
        root = str(tmp_path / "ray.crt") if has_tls else None
        got = try_ports(nodes, tmp_path, {"addresses": sorted(ports), "tokens": tokens, "root": root})
        print(f"\nTLS {has_tls}: {frames[0]} frames, {frames[1]} with the token")
        for address, attempts in got.items():
            print(f"| {address} | {ports[address]} | {' | '.join(judge(attempts[name]) for name in ('none', 'wrong'))} |")
        assert set(got) == set(ports)
        allowed = {"refused", "speaks no protocol with it"} if has_tls else {"refused"}
        for address, attempts in got.items():
            assert {judge(attempts["none"]), judge(attempts["wrong"])} <= allowed, (address, ports[address])
            assert has_tls or judge(attempts["valid"]) != "refused", address
        assert (frames[1] == 0) == has_tls
        assert ask_is_open(nodes, tmp_path, nodes.head_address) == "False"
        assert ask_is_open(nodes, tmp_path, f"{nodes.address(1)}:{nodes.head_address.rpartition(':')[2]}") == "away"


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_cluster_without_a_token_is_open_even_with_tls(tmp_path: Path, has_tls: bool) -> None:
    with make_ray_nodes(3, directory=tmp_path, has_token=False, has_tls=has_tls) as nodes:
        nodes.start_head()
        assert ask_is_open(nodes, tmp_path, nodes.head_address) == "True"
        root = str(tmp_path / "ray.crt") if has_tls else None
        asked = {"addresses": sorted(find_ports(nodes, 0)), "tokens": {"none": None}, "root": root}
        got = try_ports(nodes, tmp_path, asked)
        assert any(attempts["none"].get("POST /get_or_create_runtime_env") == "200" for attempts in got.values())
