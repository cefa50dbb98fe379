"""Has the servers of a run free their GPU memory, and waits until none holds any. Called by `ServerPool.sleep`.

A server counts as done when it says that it sleeps, or when nothing listens at its address. One that does not answer may still
hold its memory, so it is asked again. A server gives up by itself after at most 1,200 s (`inference.policy_loader`: 600 s to pause,
600 s to sleep). That is more than `client.admin_timeout` allows for one answer, so the wait as a whole has the longer limit
`client.wait_for_ready_timeout`: a stuck engine is reported by its own server.

waits for: every known server
unblocked by: its answer, or its end; `timeout_s`
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
"""Between two questions to a server that did not sleep."""
_REPORT_INTERVAL_S = 30.0
"""How often the servers that are waited for are reported."""


async def sleep_all(
    servers: ServerSet, *, timeout_s: float, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
) -> None:
    """Return once every known server sleeps or is gone. Those that are gone are marked unhealthy.

    Raises:
        InferenceError: a server was not started for that, or neither slept nor ended within `timeout_s`.
    """
    begun = clock()
    reported_at = float("-inf")
    for server in servers.known:
        server.is_asleep = False  # it may have been started again since
    while errors := await _find_awake(servers):
        reasons = "; ".join(str(error) for error in errors)
        if clock() - begun >= timeout_s:
            raise InferenceError(
                f"no batch may be sent while a server holds the GPU memory that the trainer needs, and after {timeout_s:.0f} s "
                f"(client.wait_for_ready_timeout) a server neither slept nor ended: {reasons}; see logs/inference.stdout"
            )
        if clock() - reported_at >= _REPORT_INTERVAL_S:
            reported_at = clock()
            logger.warning("the batch waits for servers to free their GPU memory since %.0f s: %s", clock() - begun, reasons)
        await sleep(_RETRY_INTERVAL_S)


async def _find_awake(servers: ServerSet) -> list[InferenceError]:
    """Ask every server to sleep that does not yet; return what those answered that may still hold memory."""
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
    """Return why the server may still hold its memory, or None."""
    try:
        async with server.changing:
            await server.client.sleep()
            server.is_asleep = True
    except ServerGone as exc:
        servers.mark_unhealthy(server, str(exc))
    except InferenceError as exc:
        return exc
    return None
