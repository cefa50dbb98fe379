"""Tells by its type whether infrastructure made a rollout fail, or the environment's code on what the policy did. Pure.

A rollout that infrastructure failed is played again. One that fails on the policy's own answer is not: played until an answer does
not break the environment, the group would hold better answers than the policy gives. verifiers attributes failures by types of its
own. Types are compared by name, since each release has others and an environment brings its own clients.
"""

import errno
from collections.abc import Iterable, Iterator

_INFRASTRUCTURE = frozenset(
    {
        *("InfraError", "SandboxError", "ToolsetError", "InterceptionError", "TunnelError"),  # verifiers, v0 and v1
        *("ConnectionError", "TimeoutError", "gaierror"),  # Python; `requests` has the first too
        *("APIConnectionError", "TransportError", "NetworkError", "ClientConnectionError", "ClientPayloadError", "ReadTimeout"),
    }
)
"""Types that name infrastructure, with the types derived from them; the last line: openai, httpx, httpcore, aiohttp, requests."""
_MODEL = "ModelError"
"""verifiers' v0 type for whatever a model request raised. It counts by its cause; without one the server answered nonsense."""
_ERRNOS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENETUNREACH, errno.EHOSTUNREACH})
"""Errors of a machine that lacks something. Other errors of the operating system may come from a path that the model chose."""
_PASSING_STATUS = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 that a later request may not get. Others refuse what was asked, which the policy may have written."""
_FIRST_SERVER_ERROR = 500


def is_infrastructure(error: BaseException, *, has_sampled: bool = True) -> bool:
    """Return whether `error`, or what caused it, is a failure of infrastructure.

    Args:
        has_sampled: see `names_infrastructure`; True where it is not known.
    """
    chain = list(_chain(error))
    status = next((found for link in chain if (found := _status(link)) is not None), None)
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    if status is None and any(isinstance(link, OSError) and link.errno in _ERRNOS for link in chain):
        return True
    if status is None and any(base.__name__ == _MODEL for base in type(chain[-1]).__mro__):
        return True
    return names_infrastructure(names, status_code=status, has_sampled=has_sampled)


def names_infrastructure(names: Iterable[str], *, status_code: int | None, has_sampled: bool) -> bool:
    """Return whether an error that is known by its type is a failure of infrastructure.

    Args:
        names: of the type and of those that it is derived from, as far as they are known.
        status_code: the HTTP status that it carries. If there is one, it decides.
        has_sampled: the policy has said something. What fails before cannot be its doing.
    """
    if status_code is not None:
        return status_code >= _FIRST_SERVER_ERROR or status_code in _PASSING_STATUS
    return not has_sampled or not _INFRASTRUCTURE.isdisjoint(names)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of a client carries, on itself or on its response."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None
