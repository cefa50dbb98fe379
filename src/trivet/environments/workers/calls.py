"""Matches the answers of one worker with the calls that wait for them. Owned by `client.WorkerClient`, or `nodes.node`."""

import asyncio
from collections.abc import Callable, Collection
from typing import TypeVar

from trivet.errors import MessageRefused, RolloutFailed, WorkerLost
from trivet.shown_text import printable
from trivet.wire.workers import AskPrompt, CallFailed, Cancel, GroupDone, PromptFound, RunGroupOrder, WorkerOrder

AnswerT = TypeVar("AnswerT", GroupDone, PromptFound)


class PendingCalls:
    """The calls in flight to one worker, by call id."""

    def __init__(self, send: Callable[[WorkerOrder], None]) -> None:
        self._send = send
        self._pending: dict[int, tuple[RunGroupOrder | AskPrompt, asyncio.Future[GroupDone | PromptFound]]] = {}
        self._cancelled: set[int] = set()
        """Calls whose answer may have been on its way when they were cancelled."""
        self._next_id = 0
        self._loss = ""

    def __len__(self) -> int:
        return len(self._pending)

    async def call(self, make_order: Callable[[int], RunGroupOrder | AskPrompt], kind: type[AnswerT]) -> AnswerT:
        """Send the order that `make_order` makes of a call id, and wait for its answer.

        If the caller is cancelled, the worker is told to cancel the call.

        Raises:
            RolloutFailed: the worker's answer is a failure.
            WorkerLost: the worker ended before it answered.
        """
        if self._loss:
            raise WorkerLost(self._loss)
        call_id, self._next_id = self._next_id, self._next_id + 1
        order, future = make_order(call_id), asyncio.get_running_loop().create_future()
        self._pending[call_id] = order, future
        try:
            self._send(WorkerOrder(body=order))
            answer = await future
        except asyncio.CancelledError:
            self._cancelled.add(call_id)
            self._send(WorkerOrder(body=Cancel(call_id=call_id)))
            raise
        finally:
            self._pending.pop(call_id, None)
        assert isinstance(answer, kind)
        return answer

    def resolve(self, answer: GroupDone | PromptFound | CallFailed) -> None:
        """Hand `answer` to its caller; an answer whose caller was cancelled is dropped.

        Raises:
            MessageRefused: nothing waits for it: the call was never made, was answered before, or asked for something else.
        """
        if answer.call_id in self._cancelled:
            self._cancelled.remove(answer.call_id)
            return
        order, future = self._pending.get(answer.call_id, (None, None))
        if future is not None and future.cancelled():
            return  # its caller is about to be told
        if order is None or future is None or future.done():
            raise MessageRefused(f"an answer to call {answer.call_id}, which waits for none")
        if isinstance(answer, CallFailed):
            failure = RolloutFailed(
                printable(answer.message), kind=printable(answer.kind), is_infrastructure=answer.is_infrastructure
            )
            future.set_exception(failure)
            return
        if problem := _mismatch(order, answer):
            raise MessageRefused(f"an answer to call {answer.call_id} {problem}")
        future.set_result(answer)

    @property
    def newest(self) -> int:
        """The id of the newest call, -1 before the first."""
        return self._next_id - 1

    def cancelled_among(self, running: Collection[int], *, newest: int) -> list[int]:
        """Return the cancelled calls that the other side still runs; those that it received and ended are forgotten."""
        self._cancelled = {call_id for call_id in self._cancelled if call_id > newest or call_id in running}
        return [call_id for call_id in self._cancelled if call_id <= newest]

    def lose(self, call_id: int, loss: str) -> None:
        """Fail one call with WorkerLost, if it is still in flight."""
        _, future = self._pending.get(call_id, (None, None))
        if future is not None and not future.done():
            future.set_exception(WorkerLost(loss))

    def lose_missing(self, *, newest: int, running: Collection[int], loss: str) -> None:
        """Fail with WorkerLost what the other side has received, up to `newest`, and does not run: its answer was lost."""
        for call_id in [pending for pending in self._pending if pending <= newest and pending not in running]:
            self.lose(call_id, loss)

    def fail_all(self, loss: str) -> None:
        """Fail every call in flight, and every later one, with WorkerLost.

        Args:
            loss: which worker ended and how; not empty.
        """
        self._loss = loss
        for _, future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerLost(loss))


def _mismatch(order: RunGroupOrder | AskPrompt, answer: GroupDone | PromptFound) -> str:
    """Return how `answer` differs from what `order` asked for; empty when it is an answer to it."""
    if isinstance(order, AskPrompt):
        return "" if isinstance(answer, PromptFound) else "that has rollouts where a prompt was asked for"
    if isinstance(answer, PromptFound):
        return "that has a prompt where a group was asked for"
    if answer.group_id != order.request.group_id:
        return f"that has group {answer.group_id} where group {order.request.group_id} was asked for"
    return ""
