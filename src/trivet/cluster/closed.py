"""Finds out whether a Ray cluster answers strangers."""

import grpc

_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE}
"""A server that speaks TLS is unavailable to a client without it."""


def is_open(address: str, *, timeout_s: float) -> bool:
    """Return whether the head of a cluster at HOST:PORT answers a call without a token, without TLS.

    The caller has reached the head by other means: a head that is away refuses too.
    """
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=timeout_s)
        except grpc.RpcError as exc:
            return exc.code() not in _REFUSALS
    return True
