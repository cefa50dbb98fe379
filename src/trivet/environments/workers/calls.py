"""Matches the answers of one worker with the calls that wait for them. Owned by `client.WorkerClient`."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from trivet.errors import RolloutFailed, WorkerLost
from trivet.wire.workers import AskPrompt, CallFailed, Cancel, GroupDone, PromptFound, RunGroupOrder, WorkerOrder

AnswerT = TypeVar("AnswerT", GroupDone, PromptFound)


class PendingCalls:
    """The calls in flight to one worker, by call id.

    >>> calls = PendingCalls(channel.post)
    >>> answer = await calls.call(make_order, GroupDone)  # meanwhile: calls.resolve(GroupDone(call_id=0, rollouts=[]))
    >>> calls.fail_all("the worker ended with exit code 7")
    """

    def __init__(self, send: Callable[[WorkerOrder], None]) -> None:
        self._send = send
        self._futures: dict[int, asyncio.Future[GroupDone | PromptFound]] = {}
        self._next_id = 0
        self._loss = ""

    def __len__(self) -> int:
        return len(self._futures)

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
        future = self._futures[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(WorkerOrder(body=make_order(call_id)))
            answer = await future
        except asyncio.CancelledError:
            self._send(WorkerOrder(body=Cancel(call_id=call_id)))
            raise
        finally:
            self._futures.pop(call_id, None)
        assert isinstance(answer, kind)
        return answer

    def resolve(self, answer: GroupDone | PromptFound | CallFailed) -> None:
        """Hand `answer` to its caller; an answer whose caller was cancelled is dropped."""
        future = self._futures.get(answer.call_id)
        if future is None or future.done():
            return
        if isinstance(answer, CallFailed):
            future.set_exception(RolloutFailed(answer.message, kind=answer.kind))
        else:
            future.set_result(answer)

    def fail_all(self, loss: str) -> None:
        """Fail every call in flight, and every later one, with WorkerLost.

        Args:
            loss: which worker ended and how; not empty.
        """
        self._loss = loss
        for future in self._futures.values():
            if not future.done():
                future.set_exception(WorkerLost(loss))
