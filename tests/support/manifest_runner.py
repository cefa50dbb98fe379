"""Runs the manifest of a JobSet on this machine. Each pod is a set of namespaces, and its end has the consequences that the
policies of JobSet and Job give it. Needs root, `ip` and `unshare`.

It knows the fields that trivet writes, and refuses some that would change what happens. It plays no images, limits or scheduling.
"""

import os
import re
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.nodes import Nodes, make_nodes

IMAGE_ENVIRON = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"}
"""What an image sets."""
_NETWORK = "10.214.0"
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_FIELD = re.compile(r"metadata\.(?:labels|annotations)\['(.+)'\]")


@dataclass(slots=True, kw_only=True)
class Pod:
    """A pod that was started."""

    name: str
    """Its host name: `JOBSET-JOB-N-M`."""
    job: "_Job"
    index: int
    slot: int
    grace_s: float
    process: "subprocess.Popen[bytes]"
    kill_at: float | None = None
    """Set when it was asked to end."""

    def terminate(self) -> None:
        """Ask the pod to end, as an eviction or a deletion does. What still runs after its grace period is killed."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace_s
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Signal the first process of the pod, which is the only child of what made the namespaces."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            for process in own.children() or [own]:
                process.send_signal(number)

    def poll(self) -> int | None:
        """Return the exit code as Kubernetes shows it: 128 + N after signal N."""
        code = self.process.poll()
        if code is None and self.kill_at is not None and time.monotonic() > self.kill_at:
            self.kill()
        return code if code is None or code >= 0 else 128 - code


@dataclass(slots=True, kw_only=True)
class _Job:
    group: str
    """Name of the replicated job."""
    index: int
    spec: Mapping[str, Any]
    pods: dict[int, Pod] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    num_failures: int = 0
    failure: str | None = None
    """The reason of its condition Failed."""

    @property
    def is_complete(self) -> bool:
        return len(self.done) == self.spec["completions"]


class ManifestRunner:
    """The cluster for one JobSet. `tick` is to be called again and again.

    >>> with run_manifest(documents, directory=tmp_path, claims={"runs": tmp_path / "volume"}) as runner:
    ...     wait_until(lambda: runner.tick() is not None, timeout_s=60, waiting_for="the end")
    ...     assert runner.outcome == "Completed"
    """

    def __init__(
        self,
        documents: Sequence[Mapping[str, Any]],
        *,
        nodes: Nodes,
        num_slots: int,
        directory: Path,
        claims: Mapping[str, Path],
        secret_values: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._documents = {each["kind"]: each for each in documents}
        self._nodes, self._free = nodes, list(range(num_slots))
        self._directory, self._claims, self._secrets = directory, claims, secret_values
        self._uid = secrets.token_hex(16)
        self._name = self._documents["JobSet"]["metadata"]["name"]
        self._spec = self._documents["JobSet"]["spec"]
        assert self._spec["network"]["enableDNSHostnames"]
        assert self._spec["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
        self._ending: list[Pod] = []
        """Pods that were deleted and still run."""
        self.restarts = 0
        self.outcome: str | None = None
        """`Completed` or `Failed`, as the JobSet's condition says it."""
        self.ended: list[tuple[str, int]] = []
        """Pods that ended by themselves, with their exit codes."""
        self._mounted = self._write_config_map()
        self._jobs: list[_Job] = []
        self._create_jobs()

    def pod(self, name: str) -> Pod:
        """Return the running pod `JOB-N-M`."""
        return next(pod for job in self._jobs for pod in job.pods.values() if pod.name == f"{self._name}-{name}")

    @property
    def num_running(self) -> int:
        return sum(len(job.pods) for job in self._jobs) + len(self._ending)

    def output(self) -> str:
        """Return what the pods wrote."""
        logs = sorted(self._directory.glob("*.log"))
        return "\n\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs)

    def tick(self) -> str | None:
        """Act on what has ended since the last call; return the outcome once everything is over."""
        self._ending = [pod for pod in self._ending if not self._is_over(pod)]
        for job in self._jobs:
            for pod in list(job.pods.values()):
                if (code := pod.poll()) is not None:
                    self._end(job, pod, code)
        if self.outcome is None:
            self._judge()
        if not self._jobs and not self._ending and self.outcome is None:
            self._create_jobs()
        return self.outcome if not self.num_running else None

    def _is_over(self, pod: Pod) -> bool:
        return pod.poll() is not None

    def _end(self, job: _Job, pod: Pod, code: int) -> None:
        del job.pods[pod.index]
        self.ended.append((pod.name.removeprefix(f"{self._name}-"), code))
        if code == 0:
            job.done.add(pod.index)
            return
        action = next((rule["action"] for rule in _pod_rules(job.spec) if _applies(rule["onExitCodes"], code)), "Count")
        assert action in ("FailJob", "Count"), action
        job.num_failures += 1
        if action == "FailJob":
            job.failure = job.failure or "PodFailurePolicy"
        elif job.num_failures > job.spec["backoffLimit"]:
            job.failure = job.failure or "BackoffLimitExceeded"
        elif job.failure is None:
            self._start(job, pod.index)

    def _judge(self) -> None:
        """Decide whether the set is over or begins anew."""
        policy = self._spec["successPolicy"]
        assert policy["operator"] == "All"
        targets = [job for job in self._jobs if job.group in policy["targetReplicatedJobs"]]
        if failed := [job for job in self._jobs if job.failure is not None]:
            rules = self._spec["failurePolicy"]["rules"]
            applying = [
                rule["action"]
                for rule in rules
                for job in failed
                if job.failure in rule["onJobFailureReasons"] and job.group in rule["targetReplicatedJobs"]
            ]
            action = applying[0] if applying else "RestartJobSet"
            assert action in ("FailJobSet", "RestartJobSet"), action
            if action == "FailJobSet" or self.restarts >= self._spec["failurePolicy"]["maxRestarts"]:
                self.outcome = "Failed"
            else:
                self.restarts += 1
            self._delete_jobs()
        elif targets and all(job.is_complete for job in targets):
            self.outcome = "Completed"
            self._delete_jobs()

    def _delete_jobs(self) -> None:
        for job in self._jobs:
            for pod in job.pods.values():
                pod.terminate()
                self._ending.append(pod)
        self._jobs = []

    def _create_jobs(self) -> None:
        self._jobs = [
            _Job(group=each["name"], index=index, spec=each["template"]["spec"])
            for each in self._spec["replicatedJobs"]
            for index in range(each["replicas"])
        ]
        for job in self._jobs:
            assert job.spec["completionMode"] == "Indexed"
            for index in range(job.spec["parallelism"]):
                self._start(job, index)

    def _write_config_map(self) -> Path:
        found = self._documents["ConfigMap"]
        directory = self._directory / "config_maps" / found["metadata"]["name"]
        directory.mkdir(parents=True)
        for name, text in found["data"].items():
            (directory / name).write_text(text)
        return directory.parent

    def _start(self, job: _Job, index: int) -> None:
        """Start a pod. Each has an address that no pod before it had."""
        name, slot = f"{self._name}-{job.group}-{job.index}-{index}", self._free.pop(0)
        pod = job.spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        (container,) = pod["containers"]
        labels = {"job-index": str(job.index), "restart-attempt": str(self.restarts), "jobset-uid": self._uid}
        environ = self._environ(container, {f"jobset.sigs.k8s.io/{key}": value for key, value in labels.items()})
        environ["JOB_COMPLETION_INDEX"] = str(index)
        words = [_expand(word, environ) for word in container["command"]]
        script = [*self._mounts(pod, container), f"mount --bind {self._hosts_file(slot)} /etc/hosts", f"hostname {name}"]
        script.append(f"cd {shlex.quote(container['workingDir'])}")
        script.append(f"exec env -i {shlex.join([f'{key}={value}' for key, value in environ.items()])} {shlex.join(words)}")
        # The pod's first process has the id 1, heeds no signal without a handler, and takes all others with it.
        make = (
            "unshare",
            "--uts",
            "--mount",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation=private",
        )
        job.pods[index] = Pod(
            name=name,
            job=job,
            index=index,
            slot=slot,
            grace_s=pod["terminationGracePeriodSeconds"],
            process=self._nodes.start(
                slot, [*make, "bash", "-euc", "\n".join(script)], log=self._directory / f"{name}.log", environ=os.environ
            ),
        )
        self._write_hosts()

    def _environ(self, container: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, str]:
        environ = dict(IMAGE_ENVIRON)
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                named = _FIELD.fullmatch(source["fieldRef"]["fieldPath"])
                assert named, source
                environ[each["name"]] = labels.get(named[1], "")
            elif "secretKeyRef" in source:
                environ[each["name"]] = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                environ[each["name"]] = _expand(each["value"], environ)
        return environ

    def _mounts(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
        """Yield commands that mount the volumes. A directory that this machine lacks is made in a file system of the pod's own."""
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        made: set[str] = set()
        for mount in container["volumeMounts"]:
            target, volume = Path(mount["mountPath"]), volumes[mount["name"]]
            if not target.is_dir() and (top := f"/{target.parts[1]}") not in made:
                yield f"mount -t tmpfs tmpfs {top}"
                made.add(top)
            yield f"mkdir -p {target}"
            if "emptyDir" in volume:
                yield f"mount -t tmpfs -o size={volume['emptyDir']['sizeLimit'].replace('i', '').lower()} tmpfs {target}"
                continue
            source = (
                self._mounted / volume["configMap"]["name"]
                if "configMap" in volume
                else self._claims[volume["persistentVolumeClaim"]["claimName"]]
            )
            yield f"mount --bind {source} {target}"
            if mount.get("readOnly"):
                yield f"mount -o remount,bind,ro {target}"

    def _hosts_file(self, slot: int) -> Path:
        file = self._directory / f"hosts.{slot}"
        file.touch()
        return file

    def _write_hosts(self) -> None:
        """Write what each pod resolves: its own name, and those of all below the subdomain."""
        pods = [pod for job in self._jobs for pod in job.pods.values()]
        subdomain = self._spec["network"]["subdomain"]
        known = [f"{_NETWORK}.{pod.slot + 1} {pod.name}.{subdomain}" for pod in pods]
        for pod in pods:
            own = f"{_NETWORK}.{pod.slot + 1} {pod.name}"
            # In place: what is mounted is this file.
            self._hosts_file(pod.slot).write_text("\n".join(["127.0.0.1 localhost", *known, own, ""]))


def _pod_rules(spec: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return spec.get("podFailurePolicy", {}).get("rules", [])


def _applies(codes: Mapping[str, Any], code: int) -> bool:
    return (code in codes["values"]) == (codes["operator"] == "In")


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` as the kubelet hands it over: `$$` is `$`, `$(NAME)` the value of a variable that is known."""
    return _REFERENCE.sub(lambda found: "$" if found[1] is None else environ.get(found[1], found[0]), text)


@contextmanager
def run_manifest(
    documents: Sequence[Mapping[str, Any]],
    *,
    directory: Path,
    claims: Mapping[str, Path],
    secret_values: Mapping[str, Mapping[str, str]] | None = None,
    num_slots: int = 8,
) -> Iterator[ManifestRunner]:
    """Apply a manifest for a block, and remove all of it afterwards.

    Args:
        claims: the directory behind each claim of a volume.
        secret_values: keys and values of each secret.
        num_slots: most pods that are started in all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with make_nodes(num_slots) as nodes:
        yield ManifestRunner(
            documents,
            nodes=nodes,
            num_slots=num_slots,
            directory=directory,
            claims=claims,
            secret_values=secret_values or {},
        )
