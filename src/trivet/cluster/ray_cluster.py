"""Connects the driver of a run to a Ray cluster that is closed to strangers, and asks it for the bundles of the run."""

import os
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from trivet.cluster.bundles import BundleGroup
from trivet.config.schema.deployment import RayConfig
from trivet.errors import ConfigError, NodesMissing

_OPEN_CHECK_TIMEOUT_S = 5.0
_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
_NO_ANSWERS = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_HOW_TO_START = (
    "start Ray on each machine: `ray start --head` on one, `ray start --address=HOST:6379` on the others; docs/clusters.md has the"
    " lines with a token"
)
_HOW_TO_CLOSE = (
    "whoever reaches its ports may run programs on it. Close it:\n"
    "  ray get-auth-token --generate        # then copy ~/.ray/auth_token to every machine, mode 600\n"
    "  export RAY_AUTH_MODE=token           # on every machine, and where rl is started\n"
    "  ray start --head                     # start Ray again on every machine\n"
    "or set deployment.ray.allow_open = true if nobody else reaches these machines"
)


@contextmanager
def connect(config: RayConfig, *, namespace: str, lost_after_s: float) -> Generator[str, None, None]:
    """Connect this process to the cluster for a block; yield the address of this machine, as the other machines know it.

    Args:
        namespace: separates this run's actors from those of others.

    Raises:
        ConfigError: there is no cluster, it has other versions than this process, or it is open to strangers.
        NodesMissing: the cluster does not answer.
    """
    # Ray would pack the working directory for every actor when `uv run` has started this process.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray would end this process when it misses the cluster for that long; `cluster.guard` does it sooner, and in order.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(round(4 * lost_after_s)))
    try:
        import ray  # imported here, because Ray reads the variables above when it is imported
    except ImportError as exc:
        raise ConfigError(
            'a run with deployment.type = "multi_node" needs Ray, which is not installed: uv sync --extra ray'
        ) from exc
    address = os.environ.get("RAY_ADDRESS") or config.address
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except ConnectionError as exc:
        if address == "auto":
            raise ConfigError(f"no Ray cluster was found on this machine: {_HOW_TO_START}") from exc
        raise NodesMissing(f"the Ray cluster at {address} does not answer: {exc}; {_HOW_TO_START}") from exc
    except (RuntimeError, ValueError) as exc:
        raise ConfigError(f"the Ray cluster at {address} cannot be used: {exc}") from exc
    try:
        gcs_address = str(ray.get_runtime_context().gcs_address)
        try:
            is_refused = not config.allow_open and is_open(gcs_address, timeout_s=_OPEN_CHECK_TIMEOUT_S)
        except ConnectionError as exc:
            raise NodesMissing(str(exc)) from exc
        if is_refused:
            raise ConfigError(f"the Ray cluster at {gcs_address} answers without a token: {_HOW_TO_CLOSE}")
        yield str(ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


def is_open(address: str, *, timeout_s: float, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the head of a cluster at HOST:PORT answers a call without a token.

    With RAY_USE_TLS in `environ`, the call shows this machine's certificate. TLS alone does not close a cluster: the agents that
    install packages on each machine speak plain HTTP, and only a token closes them.

    Raises:
        ConnectionError: the head does not answer at all.
    """
    with _open_channel(address, environ) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=timeout_s)
        except grpc.RpcError as exc:
            if exc.code() in _NO_ANSWERS:
                raise ConnectionError(f"the Ray cluster at {address} does not answer: {exc.details()}") from exc
            return exc.code() not in _REFUSALS
    return True


def _open_channel(address: str, environ: Mapping[str, str]) -> grpc.Channel:
    if environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address)
    names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
    root, key, certificate = (Path(environ[name]).read_bytes() for name in names)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, certificate))


def place_groups(groups: Sequence[BundleGroup]) -> dict[Any, BundleGroup]:
    """Ask Ray for a placement group for each group of bundles, without waiting for a place."""
    import ray.util  # imported here for the reason given in `connect`

    return {
        ray.util.placement_group(
            [dict(group.resources) for _ in group.nodes],
            strategy="STRICT_SPREAD" if len(group.nodes) > 1 else "PACK",
            bundle_label_selector=[dict(group.labels) for _ in group.nodes],
        ): group
        for group in groups
    }


def resources_of(address: str) -> dict[str, float]:
    """Return all resources of the machine at `address`, in use or not."""
    import ray  # imported here for the reason given in `connect`

    return next((node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == address), {})


def describe_resources() -> str:
    """Return what the cluster has, and what of it is free."""
    import ray  # imported here for the reason given in `connect`

    total, free = ray.cluster_resources(), ray.available_resources()
    names = [name for name in total if not name.startswith(("node:", "object_store"))]
    return ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name}" for name in sorted(names) if "group" not in name)


def draining_machines() -> Collection[str]:
    """Return Ray's ids of the machines that it is about to give back.

    It may block for as long as the cluster does not answer.

    Raises:
        OSError: the cluster does not answer.
    """
    import ray  # imported here for the reason given in `connect`
    from ray._private.state import state  # Ray has no public way to ask
    from ray.exceptions import RayError

    try:
        if not ray.nodes():
            raise OSError("the Ray cluster does not answer")
        return state.get_draining_nodes()
    except RayError as exc:
        raise OSError(f"the Ray cluster does not answer: {exc}") from exc
