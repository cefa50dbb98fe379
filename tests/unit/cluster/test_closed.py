"""The check for an open cluster, against a gRPC server that answers as a head does."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from support.processes import find_free_port

pytest.importorskip("grpc")

import grpc

from trivet.cluster.ray_cluster import is_open


@contextmanager
def head(code: grpc.StatusCode | None) -> Iterator[str]:
    """Serve the method that lists the nodes: it fails with `code`, or answers."""

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        if code is not None:
            context.abort(code, "no")
        return b""

    server = grpc.server(ThreadPoolExecutor(1))
    methods = {"GetAllNodeInfo": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", methods)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(None).wait(5)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(None, True), (grpc.StatusCode.INTERNAL, True), (grpc.StatusCode.UNAUTHENTICATED, False)],
)
def test_a_cluster_is_closed_only_if_it_asks_for_a_token(code: grpc.StatusCode | None, expected: bool) -> None:
    with head(code) as address:
        assert is_open(address, timeout_s=5.0, environ={}) is expected


def test_a_head_that_is_away_is_neither_open_nor_closed() -> None:
    with pytest.raises(ConnectionError, match="does not answer"):
        is_open(f"127.0.0.1:{find_free_port()}", timeout_s=2.0, environ={})
