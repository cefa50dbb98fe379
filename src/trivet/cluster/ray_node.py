"""Runs Ray on this machine for one job: its variables, its words, its start and its end. `cluster.bring_up` decides when.

Ray's processes are all descendants of this one, which ends them; `ray stop` would end those of other jobs too. They prove
themselves to each other by certificates (TLS in both directions) of an authority that the job has for itself. The key of the
authority lies in the private directory of the job; the key of a node never leaves the node.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import trustme

from trivet.cluster.fence import end_descendants
from trivet.cluster.messages import LEAVING_FILE
from trivet.process.lifetime import tied_command
from trivet.process.lock import lock_directory, remove_if_free
from trivet.schedulers.preparation import RAY_VARIABLES
from trivet.storage.durable import write_atomically

_START_TIMEOUT_S = 120.0
"""Ray starts within 8 s; under load it took 47 s."""
_STOP_TIMEOUT_S = 1.0
"""Ray's processes have nothing to save."""
_RECONNECT_S = 15.0
"""Shortest time after which Ray's processes end that miss the head. Ray's default is 60 s."""
_HEALTH_PERIOD_S = 2.0
_PREFIX = "trivet-ray-"
_OBJECT_STORE_BYTES = 100_000_000
"""Ray would take a third of the memory; a run keeps nothing there."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Passes the signals that ask this process to end on to a command, and remembers them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.command: subprocess.Popen[bytes] | None = None
        self.leaving: Path | None = None
        """Written at the first signal."""
        for number in _FORWARDED:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        if self.leaving is not None:
            self.leaving.touch()
        if self.command is not None:
            self.command.send_signal(number)

    def restore(self) -> None:
        """Let the signals end this process."""
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)


class RayNode:
    """Ray on this machine, with a private directory for its files, which goes with it."""

    def __init__(
        self, directory: Path, *, address: str, num_gpus: int | None, num_cpus: int | None, lost_after_s: float
    ) -> None:
        self.address = address
        for left_by_killed in Path("/tmp").glob(f"{_PREFIX}*"):
            remove_if_free(left_by_killed)
        self.temporary = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))  # paths of sockets have at most 107 bytes
        self._lock = lock_directory(self.temporary)
        self.leaving = self.temporary / "leaving"
        try:
            certify(directory, self.temporary, addresses=[address, "127.0.0.1"])
        except OSError:
            self.remove()
            raise
        self.variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(directory / "token"),
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self.temporary / "node.crt"),
            "RAY_TLS_SERVER_KEY": str(self.temporary / "node.key"),
            "RAY_TLS_CA_CERT": str(directory / "ca.crt"),
        }
        self._own_variables = {
            **RAY_VARIABLES,
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(math.ceil(max(_RECONNECT_S, lost_after_s))),
            "RAY_health_check_period_ms": str(round(1000 * _HEALTH_PERIOD_S)),
            "RAY_health_check_failure_threshold": str(math.ceil(lost_after_s / _HEALTH_PERIOD_S) + 1),
            LEAVING_FILE: str(self.leaving),
        }
        counts = {"--num-gpus": num_gpus, "--num-cpus": num_cpus}
        self._words = [f"{name}={count}" for name, count in counts.items() if count is not None]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str], *, is_wanted: Callable[[], bool]) -> bool:
        """Start Ray; return whether it came up within `_START_TIMEOUT_S`, while it was wanted."""
        ray, note, log = (
            Path(sys.executable).with_name("ray"),
            self.temporary / "ray_current_cluster",
            self.temporary / "ray.out",
        )
        note.unlink(missing_ok=True)  # Ray writes it once it is up
        command = [str(ray), "start", "--block", f"--node-ip-address={self.address}", f"--temp-dir={self.temporary}"]
        command += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--min-worker-port=0", "--max-worker-port=0"]
        command += ["--dashboard-agent-listen-port=0"]
        environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                tied_command([*command, *self._words, *words]),
                env=environ | self.variables | self._own_variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self.is_running() and is_wanted() and time.monotonic() < deadline:
            if note.exists():
                return True
            time.sleep(0.1)
        if is_wanted():
            print(f"bring_up: Ray did not start on {self.address}: {log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        self.stop()
        return False

    def is_running(self) -> bool:
        """Return whether Ray is starting or up."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End all that this process has started, and what that has started."""
        end_descendants(_STOP_TIMEOUT_S)
        end_descendants(0.0)  # of what was started meanwhile

    def remove(self) -> None:
        """Stop Ray, and remove its files."""
        self.stop()
        shutil.rmtree(self.temporary, ignore_errors=True)
        os.close(self._lock)


def make_authority(directory: Path) -> None:
    """Make an authority, `ca.crt` and `ca.key` in `directory`. Only the owner may read its key."""
    authority = trustme.CA()
    _write(directory / "ca", authority.cert_pem, authority.private_key_pem)


def certify(authority: Path, directory: Path, *, addresses: list[str]) -> None:
    """Make a certificate for a node that has these addresses: `node.crt` and `node.key` in `directory`.

    Args:
        authority: the directory of the authority.
        addresses: IP addresses, without names: Ray's processes know each other by addresses.
    """
    issuer = trustme.CA.from_pem((authority / "ca.crt").read_bytes(), (authority / "ca.key").read_bytes())
    node = issuer.issue_cert(*addresses)
    _write(directory / "node", node.cert_chain_pems[0], node.private_key_pem)


def _write(stem: Path, certificate: trustme.Blob, key: trustme.Blob) -> None:
    write_atomically(stem.with_suffix(".key"), key.bytes(), is_private=True)
    write_atomically(stem.with_suffix(".crt"), certificate.bytes())
