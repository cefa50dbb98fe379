"""Has the servers of a run free their GPU memory, and waits until none holds any. Called by `ServerPool.sleep`.

A server counts as done when it says that it sleeps. A server that does not answer may still hold its memory, so it is asked
again. A server of `client.base_url` that refuses connections may be starting, and takes memory before it listens, so it is asked
again too. A server of `client.elastic` that refuses connections counts as done, because the run does not know whether it will be
started again. A server whose engine is stuck gives up and reports that itself, after at most 1,200 s (`inference.policy_loader`:
600 s to pause, 600 s to sleep). That is more than `client.admin_timeout` allows for one answer. So the whole wait has the longer
limit `client.wait_for_ready_timeout`. It is checked after each round of questions, which takes up to three `client.admin_timeout`.

waits for: every known server
unblocked by: its answer; its refusal or its removal, if `client.elastic` found it; `timeout_s`
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from trivet.client.server import Server
from trivet.client.server_set import ServerSet
from trivet.errors import InferenceError, PolicyRefused, ServerGone
from trivet.key_names import key_name

logger = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 1.0
"""Seconds between two requests to a server that does not sleep yet."""
_REPORT_INTERVAL_S = 30.0
"""Seconds between two reports of the servers that are waited for."""


async def sleep_all(
    servers: ServerSet, *, timeout_s: float, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
) -> None:
    """Have every known server sleep. Return once each sleeps or is gone. A server that refuses connections is marked
    unhealthy.

    Raises:
        InferenceError: a server was started without `inference.sleep_while_training`, or did not sleep within `timeout_s`.
    """
    begun = clock()
    reported_at = float("-inf")
    for server in servers.known:
        server.is_asleep = False  # the server may have been started again since
    while errors := await _find_awake(servers):
        reasons = "; ".join(str(error) for error in errors)
        if clock() - begun >= timeout_s:
            raise InferenceError(
                "the batch was not sent, because a server may still hold GPU memory that the trainer needs: it does not sleep after"
                f" {clock() - begun:.0f} s (client.wait_for_ready_timeout = {timeout_s:g}): {reasons}; see logs/inference.stdout,"
                " and restart each server whose process has ended"
            )
        if clock() - reported_at >= _REPORT_INTERVAL_S:
            reported_at = clock()
            logger.warning("the batch waits for servers to free their GPU memory seconds=%.0f: %s", clock() - begun, reasons)
        await sleep(_RETRY_INTERVAL_S)


async def _find_awake(servers: ServerSet) -> list[InferenceError]:
    """Ask every server that is awake to sleep. Return the errors of those that may still hold GPU memory."""
    asked = [server for server in servers.known if not server.is_asleep]
    errors = await asyncio.gather(*(_put_to_sleep(servers, server) for server in asked))
    for error in errors:
        if isinstance(error, PolicyRefused):
            raise InferenceError(
                f"{key_name('orchestrator.sleep_servers')} = true, but {error}; start that server with "
                f"{key_name('inference.sleep_while_training')} = true, or set {key_name('orchestrator.sleep_servers')} = false"
            ) from error
    return [error for error in errors if error is not None]


async def _put_to_sleep(servers: ServerSet, server: Server) -> InferenceError | None:
    """Ask the server to sleep. Return why it may still hold its GPU memory; None when it holds none."""
    try:
        async with server.changing:
            if servers.find(server.root) is not server:  # removed meanwhile, and its client closed
                return None
            await server.client.sleep()
            server.is_asleep = True
    except ServerGone as exc:
        servers.mark_unhealthy(server, str(exc))
        return None if server.is_elastic else exc
    except InferenceError as exc:
        return exc
    return None
