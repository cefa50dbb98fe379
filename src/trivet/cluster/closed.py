"""Finds out whether a Ray cluster answers a caller without a token."""

import os
from collections.abc import Mapping
from pathlib import Path

import grpc

_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
_NO_ANSWERS = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


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
