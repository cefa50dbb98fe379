"""Bring the nodes of a job up with real Ray: closed to strangers, whole again after a lost raylet, and gone with the driver.

A task of SkyPilot, whose script each node runs, takes a run to its end.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster_run import DEPLOYMENT, ENVIRON, prove
from support.nodes import can_make_nodes
from support.processes import wait_until
from support.ray_nodes import RayNodes, make_ray_nodes
from support.rl_run import CONFIG
from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.process.lifetime import module_command
from trivet.schedulers import skypilot

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")]
DRIVER = Path(__file__).parents[1] / "support" / "ray_program.py"
NUM_NODES = 3
UP_S = 180.0
END_S = 5.0
ASK = """
import json, sys
from pathlib import Path
import grpc
from trivet.cluster.ray_node import certify
job, own = map(Path, sys.argv[1:])
head = json.loads((job / "head.json").read_text())
certify(job, own, addresses=["127.0.0.1"])
files = job / "ca.crt", own / "node.key", own / "node.crt"
tls = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
def ask(credentials, token):
    address = f"{head['host']}:{head['port']}"
    channel = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
    metadata = [("authorization", f"Bearer {token}")] if token else []
    try:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", metadata=metadata, timeout=10)
    except grpc.RpcError as exc:
        return exc.code().name
    return "answered"
token = (job / "token").read_text()
print(json.dumps([ask(None, None), ask(None, token), ask(tls, None), ask(tls, "0" * 64), ask(tls, token)]))
"""


def looks(log: Path) -> list[dict[str, list[object]]]:
    """Return what the driver has seen of the cluster."""
    lines = log.read_bytes().decode(errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith('{"counts"')]


def pid_of_driver(nodes: RayNodes) -> int:
    """Return the driver's process, which was started last of those that name it."""
    named = [pid for pid in nodes.pids(0) if str(DRIVER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (found,) = [pid for pid in named if b"bring_up" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def start_all(nodes: RayNodes, directory: Path) -> "list[subprocess.Popen[bytes]]":
    words = ["--directory", str(directory), "--job", "17.0", "--cpus", "1", "--gpus", "0"]
    driver = ["--", sys.executable, str(DRIVER), str(NUM_NODES)]
    return [
        nodes.start(
            node,
            module_command("trivet.cluster.bring_up", *words, f"--index={node}", *driver),
            log=directory / f"node_{node}.out",
            environ=os.environ,
        )
        for node in range(NUM_NODES)
    ]


def test_nodes_of_a_job_are_one_closed_cluster_that_goes_with_its_driver(tmp_path: Path) -> None:
    job, log, asked = tmp_path / "ray-17.0", tmp_path / "node_0.out", tmp_path / "asked.out"
    with make_ray_nodes(NUM_NODES, directory=tmp_path) as nodes:
        idle = [len(nodes.pids(node)) for node in range(NUM_NODES)]
        started = start_all(nodes, tmp_path)
        wait_until(lambda: looks(log), timeout_s=UP_S, waiting_for="an actor on each node")
        stranger = nodes.start(1, [sys.executable, "-c", ASK, str(job), str(tmp_path)], log=asked, environ=os.environ)
        assert stranger.wait(60) == 0, asked.read_text()
        no_tls, no_tls_but_token, no_token, wrong_token, welcome = json.loads(asked.read_text())
        assert {no_tls, no_tls_but_token} == {"UNAVAILABLE"}
        assert {no_token, wrong_token} == {"UNAUTHENTICATED"}
        assert welcome == "answered"  # so the refusals are not those of a dead cluster

        num_before = len(looks(log))
        nodes.kill_raylet(1)

        def has_returned() -> bool:
            """Return whether a second raylet of node 1 was seen, beside the dead one or after its end was noticed."""
            counts = [look["alive"].count(nodes.address(1)) for look in looks(log)[num_before:]]
            return 2 in counts or (0 in counts and counts[-1] == 1)

        wait_until(has_returned, timeout_s=120, waiting_for="the return of node 1")

        os.kill(pid_of_driver(nodes), signal.SIGKILL)
        wait_until(
            lambda: [len(nodes.pids(node)) for node in range(NUM_NODES)] == idle, timeout_s=END_S, waiting_for="empty nodes"
        )
        assert [process.wait(5) for process in started] == [128 + signal.SIGKILL, 0, 0]
    assert not job.exists()


@pytest.mark.vllm
def test_a_task_of_skypilot_takes_a_run_over_its_nodes_to_its_end(tmp_path: Path, tiny_model: Path) -> None:
    file, layout = tmp_path / "rl.toml", RunLayout(tmp_path / "run")
    deployment = DEPLOYMENT.format(num_train_nodes=1, num_servers=1, nodes_per_server=1)
    text = CONFIG.format(max_steps=4, output_dir="run", model=tiny_model) + deployment
    file.write_text(f'{text}[skypilot]\nworking_dir = "{tmp_path}"\ngpus_per_node = 0\npython = "{sys.executable}"\n')
    config = load_config(RLConfig, ["@", str(file)]).config
    task = skypilot.make_task(config, command="rl", configuration=file)
    home = tmp_path / "home"
    (copied,) = (home / path.removeprefix("~/") for path in task["file_mounts"])
    copied.parent.mkdir(parents=True)
    copied.write_text(text)
    with make_ray_nodes(task["num_nodes"], directory=tmp_path) as nodes:
        addresses = "\n".join(map(nodes.address, range(nodes.count)))
        environ = {**ENVIRON, "HOME": str(home), "SKYPILOT_TASK_ID": "sky-1_trivet", "SKYPILOT_NODE_IPS": addresses}
        logs = [tmp_path / f"node_{node}.out" for node in range(nodes.count)]
        started = [
            nodes.start(node, ["bash", "-c", task["run"]], log=log, environ=environ | {"SKYPILOT_NODE_RANK": str(node)})
            for node, log in enumerate(logs)
        ]
        assert [process.wait(UP_S * 2) for process in started] == [0, 0], "".join(log.read_text() for log in logs)
        prove(layout)
    assert not list(layout.skypilot.glob("ray-*"))
