"""Runs the manifest of a Job or RayJob on this machine. Each pod is a machine of `support.ray_nodes`, and its end has the
consequences that Kubernetes and KubeRay give it. Needs root, `ip` and `unshare`.

It knows the fields that trivet writes, and refuses some that would change what happens. It plays no images, limits or scheduling.
"""

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from support.ray_nodes import RayNodes, make_ray_nodes

_PORT, _DASHBOARD_PORT = 6379, 8265
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
_AWAIT_HEAD = f"until (exec 3<> /dev/tcp/{{head}}/{_DASHBOARD_PORT}) 2> /dev/null; do sleep 0.5; done\n"
"""KubeRay has the other pods wait until the head is up."""
_SUBMIT = f"exec ray job submit --address=http://{{head}}:{_DASHBOARD_PORT} --submission-id={{id}} -- {{entrypoint}}"


class Pod:
    """A pod that was started."""

    def __init__(
        self, name: str, *, slot: int, nodes: RayNodes, spec: Mapping[str, Any], mounts: str, prefix: str, log: Path
    ) -> None:
        """Start the first process of its container.

        Args:
            mounts: a script that mounts its volumes.
            prefix: the shell's words before each command of the container.
        """
        (container,) = spec["containers"]
        self.name, self.slot, self._nodes, self._prefix, self._log = name, slot, nodes, prefix, log
        self._grace_s: float = spec["terminationGracePeriodSeconds"]
        self._hook: list[str] = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["true"])
        assert self._start(mounts).wait(20) == 0, log.read_text()
        self._first = self._start(f"{prefix} {shlex.join(container['command'])}")
        self._is_told = False
        self._stopping: subprocess.Popen[bytes] | None = None
        self._kill_at = float("inf")

    def _start(self, script: str) -> "subprocess.Popen[bytes]":
        return self._nodes.start(self.slot, ["bash", "-euc", script], log=self._log, environ=os.environ)

    def terminate(self) -> None:
        """Ask the pod to end, as an eviction or a deletion does: its hook, SIGTERM, and SIGKILL after its grace period."""
        if self._stopping is None:
            self._stopping = self._start(f"{self._prefix} {shlex.join(self._hook)}")
            self._kill_at = time.monotonic() + self._grace_s

    def runs(self, word: str) -> bool:
        """Return whether a process of the pod has a word in its command."""
        for pid in self._nodes.pids(self.slot):
            with suppress(psutil.Error):  # it ended meanwhile
                if word in psutil.Process(pid).cmdline():
                    return True
        return False

    def poll(self) -> int | None:
        """Return the exit code as Kubernetes shows it: 128 + N after signal N. All processes end with the first."""
        code = self._first.poll()
        if code is None and self._stopping is not None:
            if time.monotonic() > self._kill_at:
                self._nodes.kill(self.slot)
            elif self._stopping.poll() is not None and not self._is_told:
                self._is_told = True
                with suppress(psutil.NoSuchProcess):  # the program is the only child of what entered the namespaces
                    for process in psutil.Process(self._first.pid).children():
                        process.send_signal(signal.SIGTERM)
        elif code is not None and self._nodes.pids(self.slot):
            self._nodes.kill(self.slot)
        return code if code is None or code >= 0 else 128 - code


class ManifestRunner:
    """The cluster for one Job or RayJob. `tick` is to be called again and again.

    >>> with run_manifest(documents, directory=tmp_path, claims={"runs": tmp_path / "volume"}) as runner:
    ...     wait_until(lambda: runner.tick() is not None, timeout_s=60, waiting_for="the end")
    ...     assert runner.outcome == "Completed"
    """

    def __init__(
        self,
        documents: Sequence[Mapping[str, Any]],
        *,
        nodes: RayNodes,
        directory: Path,
        claims: Mapping[str, Path],
        secret_values: Mapping[str, Mapping[str, str]],
    ) -> None:
        config_map, job = documents
        self._kind, self._spec = job["kind"], job["spec"]
        self._nodes, self._directory, self._claims, self._secrets = nodes, directory, claims, secret_values
        self._uid, self._free = secrets.token_hex(16), list(range(nodes.count))
        self._mounted = directory / "config_maps" / config_map["metadata"]["name"]
        self._mounted.mkdir(parents=True)
        for name, text in config_map["data"].items():
            (self._mounted / name).write_text(text)
        self.restarts = 0
        self.outcome: str | None = None
        """`Completed` or `Failed`."""
        self.ended: list[tuple[str, int]] = []
        """Pods that have ended, with their exit codes."""
        self._pods: list[Pod] = []
        self._is_deleting = False
        self._begin()

    def pod(self, name: str) -> Pod:
        """Return the newest pod of a name: `job`, `submitter`, `head` or that of a worker group."""
        return next(pod for pod in reversed(self._pods) if pod.name == name)

    def pod_with(self, module: str) -> Pod:
        """Return the pod that runs a module. Ray may place any node in any pod that has the room."""
        return next(pod for pod in self._pods if pod.runs(module))

    def output(self) -> str:
        """Return what the pods wrote."""
        logs = sorted(self._directory.glob("*.log"))
        return "\n\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs)

    def tick(self) -> str | None:
        """Act on what has ended since the last call; return the outcome once everything is over."""
        for pod in list(self._pods):
            if (code := pod.poll()) is not None:
                self._pods.remove(pod)
                self.ended.append((pod.name, code))
                if not self._is_deleting:
                    self._react(pod, code)
        if self._is_deleting and not self._pods and self.outcome is None:
            self._is_deleting = False
            self._begin()
        return self.outcome if not self._pods else None

    def _react(self, pod: Pod, code: int) -> None:
        if pod.name in ("job", "submitter"):
            rules = self._spec.get("podFailurePolicy", {}).get("rules", [])
            is_final = any(code in rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob")
            if code == 0:
                self.outcome = "Completed"
            elif is_final or self.restarts >= self._spec["backoffLimit"]:
                self.outcome = "Failed"
            else:
                self.restarts += 1
            self._is_deleting = True
            for each in self._pods:
                each.terminate()
        elif pod.name != "head":  # without it, the submitter fails
            self._start_worker(next(group for group in self._cluster["workerGroupSpecs"] if group["groupName"] == pod.name))

    def _begin(self) -> None:
        if self._kind == "Job":
            assert self._spec["podReplacementPolicy"] == "Failed"
            self._start("job", self._spec["template"]["spec"], {})
            return
        assert self._spec["submissionMode"] == "K8sJobMode"
        assert self._spec["shutdownAfterJobFinishes"]
        self._cluster = self._spec["rayClusterSpec"]
        assert self._cluster["authOptions"] == {"mode": "token"}
        self._token = secrets.token_hex(32)
        group, self._head = self._cluster["headGroupSpec"], self._nodes.address(self._free[0])
        self._start_ray("head", group, "ray start --head --dashboard-host=0.0.0.0", f"127.0.0.1:{_PORT}")
        for each in self._cluster["workerGroupSpecs"]:
            for _ in range(each["replicas"]):
                self._start_worker(each)
        submit = _SUBMIT.format(head=self._head, id=secrets.token_hex(4), entrypoint=self._spec["entrypoint"])
        script = _AWAIT_HEAD.format(head=self._head) + submit
        spec = {"containers": [{"name": "submitter", "command": ["bash", "-euc", script]}], "terminationGracePeriodSeconds": 1}
        self._start("submitter", spec, {"RAY_ADDRESS": f"http://{self._head}:{_DASHBOARD_PORT}"})

    def _start_worker(self, group: Mapping[str, Any]) -> None:
        address = f"{self._head}:{_PORT}"
        command = f"{_AWAIT_HEAD.format(head=self._head)}ray start --address={address}"
        self._start_ray(group["groupName"], group, command, address)

    def _start_ray(self, name: str, group: Mapping[str, Any], script: str, address: str) -> None:
        """Start a pod with the command that KubeRay makes."""
        parameters = " ".join(f"--{key}={value}" for key, value in group["rayStartParams"].items())
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        script = script.replace("ray start", f"exec ray start --block --metrics-export-port=8080 {parameters}")
        command = ["bash", "-c", script]
        self._start(name, {**spec, "containers": [{**container, "command": command}]}, {"RAY_ADDRESS": address})

    def _start(self, name: str, spec: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """Start a pod. Each has an address that no pod before it had."""
        slot = self._free.pop(0)
        (container,) = spec["containers"]
        # What an image sets. Ray's files would be in /tmp, which all machines share here.
        environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/root", "LANG": "C.UTF-8"}
        environ |= {"RAY_TMPDIR": self._nodes.environ({})["RAY_TMPDIR"], **variables}
        if self._kind == "RayJob":
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}
        self._add_variables(environ, container)
        command = [_expand(word, environ) for word in container["command"]]
        prefix = f"cd {shlex.quote(container.get('workingDir', '/'))}\nexec env -i "
        self._pods.append(
            Pod(
                name,
                slot=slot,
                nodes=self._nodes,
                spec={**spec, "containers": [{**container, "command": command}]},
                mounts="\n".join(self._mounts(spec, container)),
                prefix=prefix + shlex.join(f"{key}={value}" for key, value in environ.items()),
                log=self._directory / f"{slot}-{name}.log",
            )
        )

    def _add_variables(self, environ: dict[str, str], container: Mapping[str, Any]) -> None:
        for each in container.get("env", []):
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == _UID
                environ[each["name"]] = self._uid
            elif "secretKeyRef" in source:
                environ[each["name"]] = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                environ[each["name"]] = _expand(each["value"], environ)

    def _mounts(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
        """Yield commands that mount the volumes. A directory that this machine lacks is made in a file system of the pod's own."""
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        made: set[str] = set()
        for mount in container.get("volumeMounts", []):
            target, volume = Path(mount["mountPath"]), volumes[mount["name"]]
            if not target.is_dir() and (top := f"/{target.parts[1]}") not in made:
                yield f"mount -t tmpfs tmpfs {top}"
                made.add(top)
            yield f"mkdir -p {target}"
            if "emptyDir" in volume:
                yield f"mount -t tmpfs -o size={volume['emptyDir']['sizeLimit'].replace('i', '').lower()} tmpfs {target}"
                continue
            source = self._mounted if "configMap" in volume else self._claims[volume["persistentVolumeClaim"]["claimName"]]
            yield f"mount --bind {source} {target}"
            if mount.get("readOnly"):
                yield f"mount -o remount,bind,ro {target}"


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` as the kubelet hands it over: `$$` is `$`, `$(NAME)` the value of a variable that is known."""
    return _REFERENCE.sub(lambda found: "$" if found[1] is None else environ.get(found[1], found[0]), text)


@contextmanager
def run_manifest(
    documents: Sequence[Mapping[str, Any]],
    *,
    directory: Path,
    claims: Mapping[str, Path],
    secret_values: Mapping[str, Mapping[str, str]],
    num_slots: int,
) -> Iterator[ManifestRunner]:
    """Apply a manifest for a block, and remove all of it afterwards.

    Args:
        claims: the directory behind each claim of a volume.
        secret_values: keys and values of each secret.
        num_slots: most pods that are started in all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with make_ray_nodes(num_slots, directory=directory) as nodes:
        yield ManifestRunner(documents, nodes=nodes, directory=directory, claims=claims, secret_values=secret_values)
