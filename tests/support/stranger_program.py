"""Tries every port that it is given as a stranger to a Ray cluster does, and prints what each attempt got as JSON."""

import json
import sys
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import grpc

_TIMEOUT_S = 5.0
_METHODS = {
    "GCS": "NodeInfoGcsService/GetAllNodeInfo InternalKVGcsService/InternalKVKeys ActorInfoGcsService/KillActorViaGcs",
    "raylet": "NodeManagerService/GetNodeStats NodeManagerService/GetSystemConfig",
    "object manager": "ObjectManagerService/FreeObjects ObjectManagerService/Pull",
    "worker": "CoreWorkerService/GetCoreWorkerStats CoreWorkerService/NumPendingTasks CoreWorkerService/KillActor",
    "Ray client": "RayletDriver/ClusterInfo RayletDriver/Init RayletDriver/Schedule",
    "agent": "ReporterService/HealthCheck ReporterService/GetTraceback LogService/ListLogs",
}
_HARMFUL = ("Init", "Schedule", "KillActor", "KillActorViaGcs", "FreeObjects", "Pull")
"""An empty request with a valid token may end the server, so only attempts that must be refused send these."""
_PATHS = ("/", "/metrics", "/api/healthz", "/get_or_create_runtime_env")


def try_methods(address: str, token: str | None, *, is_known: bool, root: bytes | None) -> dict[str, str]:
    """Call each method with an empty request; return the name of each status, without those that no server there has."""
    metadata = [("authorization", f"Bearer {token}")] if token is not None else []
    found: dict[str, str] = {}
    with ExitStack() as stack:
        channel = (
            grpc.insecure_channel(address) if root is None else grpc.secure_channel(address, grpc.ssl_channel_credentials(root))
        )
        stack.callback(channel.close)
        for service, methods in _METHODS.items():
            for method in methods.split():
                if is_known and method.rpartition("/")[2] in _HARMFUL:
                    continue
                try:
                    channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=_TIMEOUT_S, metadata=metadata)
                    status = "OK"
                except grpc.RpcError as exc:
                    status = exc.code().name
                if status != "UNIMPLEMENTED":
                    found[f"{service}: {method}"] = status
                if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    return found  # it speaks no plain gRPC
    return found


def try_paths(address: str, token: str | None) -> dict[str, str]:
    """Ask for pages and post to them; return the status of each."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    found: dict[str, str] = {}
    for path in _PATHS:
        for verb in ("GET", "POST"):
            connection = HTTPConnection(address, timeout=_TIMEOUT_S)
            try:
                connection.request(verb, path, headers=headers)
                found[f"{verb} {path}"] = str(connection.getresponse().status)
            except (OSError, HTTPException) as exc:
                return {"HTTP": type(exc).__name__}
            finally:
                connection.close()
    return found


def main() -> None:
    """Read a JSON object with `addresses`, `tokens` by name, and `root`, the file with the authority's certificate, or null."""
    asked = json.loads(sys.argv[1])
    root = Path(asked["root"]).read_bytes() if asked["root"] else None
    for address in asked["addresses"]:
        attempts = {
            name: try_methods(address, token, is_known=name == "valid", root=root) | try_paths(address, token)
            for name, token in asked["tokens"].items()
        }
        print(json.dumps({"address": address, "attempts": attempts}), flush=True)


if __name__ == "__main__":
    main()
