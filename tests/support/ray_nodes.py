"""Ray clusters on one machine: each machine of a cluster has its own name, network, processes and temporary files.

Without a PID namespace, `ray start` would find the Ray of another machine and refuse.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.nodes import Nodes
from support.processes import heed_signals, wait_until
from trivet.process.lifetime import descendants

RAY = str(Path(sys.executable).with_name("ray"))
_PORT = 6379
START_S = 120.0
_BOOT = """
echo "$1" > /proc/sys/kernel/hostname && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs -o size=256m tmpfs "$0" || exit
trap "" CHLD && echo up && exec sleep infinity
"""
"""The first process of a machine. It ignores SIGCHLD, so that the kernel reaps the processes whose parents have ended."""
_DRAIN = """
import sys, time, ray
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
ray.init(log_to_driver=False)
(node,) = [each["NodeID"] for each in ray.nodes() if each["Alive"] and each["NodeManagerAddress"] == sys.argv[1]]
client = ray._private.worker.global_worker.gcs_client
accepted, why = client.drain_node(node, DRAIN_NODE_REASON_PREEMPTION, "preempted", int(1000 * (time.time() + 60)))
sys.exit(why if not accepted else 0)
"""
_SMALL = ("--object-store-memory=80000000", "--include-log-monitor=false", "--disable-usage-stats")


class RayNodes(Nodes):
    """Machines 0 to `count` - 1, on which Ray may be started.

    >>> with make_ray_nodes(3, directory=tmp_path) as nodes:
    ...     nodes.start_head()
    ...     nodes.join(1, resources={"sandbox": 1})
    ...     driver = nodes.start(0, command, log=path, environ=nodes.environ(os.environ))
    ...     nodes.lose(1)
    ...     nodes.connect(1), nodes.boot(1), nodes.join(1)
    """

    def __init__(self, count: int, *, directory: Path, has_token: bool = True, has_tls: bool = False) -> None:
        super().__init__(count)
        self._directory = directory
        self.temporary = Path("/tmp", self.name)  # Ray makes Unix sockets below it: their paths have at most 107 bytes
        self._firsts: dict[int, psutil.Process] = {}
        self._rays: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        """The newest start of Ray on each machine, and where its output begins."""
        self.token = directory / "auth_token" if has_token else None
        self._certificate = directory / "ray.crt" if has_tls else None
        if self.token is not None:
            self.token.write_text(secrets.token_hex(32))
            self.token.chmod(0o600)
        if self._certificate is not None:
            self._make_certificate(self._certificate)

    @property
    def head_address(self) -> str:
        return f"{self.address(0)}:{_PORT}"

    def make(self) -> None:
        self.temporary.mkdir()
        super().make()
        for node in range(self.count):
            self.boot(node)

    def boot(self, node: int) -> None:
        """Start a machine that was lost, or was never started. It runs nothing yet."""
        enter = ["ip", "netns", "exec", self._namespace(node), "unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
        boot = subprocess.Popen(
            [*enter, "--kill-child", "sh", "-c", _BOOT, str(self.temporary), f"machine-{node}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(boot)
        assert boot.stdout is not None
        with boot.stdout as said:
            assert said.readline() == b"up\n"
        (self._firsts[node],) = psutil.Process(boot.pid).children()

    def start(self, node: int, command: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start a command on a machine; its output is appended to `log`.

        The process returned is the parent of the command, in the same process group: signal both with `os.killpg`.
        """
        enter = [
            "nsenter",
            "--target",
            str(self._firsts[node].pid),
            "--mount",
            "--uts",
            "--pid",
            "--net",
            f"--wdns={Path.cwd()}",
        ]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*enter, *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=heed_signals,
                umask=0o022,
            )
        self.processes.append(process)
        return process

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` with what a driver needs to reach the cluster."""
        values = {**environ, "RAY_ADDRESS": self.head_address, "RAY_TMPDIR": str(self.temporary), "RAY_worker_niceness": "0"}
        values |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        values |= {"RAY_raylet_start_wait_time_s": str(round(START_S)), "RAY_prestart_worker_first_driver": "0"}
        # Every machine has the memory of this one. Ray would kill its actors when other programs use most of it.
        values |= {"RAY_memory_monitor_refresh_ms": "0"}
        # Metrics ask nobody for a token. The head has no switch for two of their ports, and goes on when it cannot listen.
        values |= {"RAY_enable_metrics_collection": "0", "AUTOSCALER_METRIC_PORT": "-1", "DASHBOARD_METRIC_PORT": "-1"}
        if self.token is not None:
            values |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        if self._certificate is not None:
            both = dict.fromkeys(("RAY_TLS_SERVER_CERT", "RAY_TLS_CA_CERT"), str(self._certificate))
            values |= {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_KEY": str(self._certificate.with_suffix(".key")), **both}
        return values

    def start_head(self, *, num_cpus: int = 0, environ: Mapping[str, str] = os.environ, does_wait: bool = True) -> None:
        """Start the cluster on machine 0."""
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--num-cpus={num_cpus}"]
        self._start_ray(0, head, environ, does_wait=does_wait)

    def join(
        self,
        node: int,
        *,
        resources: Mapping[str, float] = {},
        environ: Mapping[str, str] = os.environ,
        does_wait: bool = True,
    ) -> None:
        """Have a machine, which has one CPU, join the cluster."""
        given = [f"--address={self.head_address}", f"--resources={json.dumps(dict(resources))}", "--num-cpus=1"]
        self._start_ray(node, given, environ, does_wait=does_wait)

    def _start_ray(self, node: int, words: Sequence[str], environ: Mapping[str, str], *, does_wait: bool) -> None:
        log = self._log_of_ray(node)
        offset = log.stat().st_size if log.exists() else 0
        variables = {**self.environ(environ), "RAY_gcs_rpc_server_reconnect_timeout_s": "15"}
        del variables["RAY_ADDRESS"]
        command = [RAY, "start", "--block", f"--node-ip-address={self.address(node)}", *_SMALL, *words]
        started = self.start(node, command, log=log, environ=variables)
        self._rays[node] = started, offset

        def is_up() -> bool:
            assert self.has_ray(node), log.read_text()
            return self.is_ray_up(node)

        if does_wait:
            wait_until(is_up, timeout_s=START_S, waiting_for=f"Ray on machine {node}")

    def has_ray(self, node: int) -> bool:
        """Return whether Ray on a machine is starting or up."""
        return node in self._rays and self._rays[node][0].poll() is None

    def is_ray_up(self, node: int) -> bool:
        """Return whether Ray on a machine is up."""
        return self.has_ray(node) and b"Ray runtime started" in self._log_of_ray(node).read_bytes()[self._rays[node][1] :]

    def _log_of_ray(self, node: int) -> Path:
        return self._directory / f"ray_{node}.out"

    def find(self, node: int, *words: str) -> int:
        """Return the host's pid of the process of a machine whose command line has these words."""
        for pid in self.pids(node):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            if all(word in command for word in words):
                return pid
        raise AssertionError(f"no process of machine {node} has {words} in its command line")

    def kill_actor(self, node: int) -> None:
        """Kill the process of the actor on a machine, and nothing else."""
        os.kill(self.find(node, "ray::NodeActor"), signal.SIGKILL)

    def kill_raylet(self, node: int) -> None:
        os.kill(self.find(node, "raylet/raylet", "--raylet_socket_name"), signal.SIGKILL)

    def kill_gcs(self, node: int = 0) -> None:
        os.kill(self.find(node, "gcs/gcs_server"), signal.SIGKILL)

    def drain(self, node: int) -> None:
        """Have Ray know that a machine will be taken away in a minute, as an autoscaler has it before a cloud preempts one."""
        log = self._directory / "drain.out"
        command = [sys.executable, "-c", _DRAIN, self.address(node)]
        assert self.start(0, command, log=log, environ=self.environ(os.environ)).wait(START_S) == 0, log.read_text()

    def root(self, node: int) -> Path:
        """Return the directory through which the files of a machine can be seen. It goes with the machine."""
        return Path(f"/proc/{self._firsts[node].pid}/root")

    def roles(self, node: int) -> list[int]:
        """Return the processes that the actor of a machine has started."""
        return descendants(self.find(node, "ray::NodeActor"))

    def remove(self) -> None:
        super().remove()
        for process in self.processes:
            process.wait(20)
        self.temporary.rmdir()  # it fails if a machine wrote there outside its own mount

    def _make_certificate(self, path: Path) -> None:
        """Make one certificate for all machines. It is its own authority."""
        names = ",".join(f"IP:{address}" for address in ("127.0.0.1", *map(self.address, range(self.count))))
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
        command += ["-subj", "/CN=trivet", "-addext", f"subjectAltName={names}", "-keyout", str(path.with_suffix(".key"))]
        subprocess.run([*command, "-out", str(path)], check=True, capture_output=True)


@contextmanager
def make_ray_nodes(count: int, *, directory: Path, has_token: bool = True, has_tls: bool = False) -> Iterator[RayNodes]:
    """Make machines for a block, and remove them with all that runs on them."""
    nodes = RayNodes(count, directory=directory, has_token=has_token, has_tls=has_tls)
    try:
        nodes.make()
        yield nodes
    finally:
        nodes.remove()
