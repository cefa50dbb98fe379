"""Matches the answers of one worker with the calls that wait for them, and checks what they hold.

Owned by `client.WorkerClient`, or `nodes.node`.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from trivet.errors import MessageRefused, RolloutFailed, WorkerLost
from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import Rollout, Sample
from trivet.wire.versions import count_tokens
from trivet.wire.workers import AskPrompt, CallFailed, Cancel, GroupDone, PromptFound, RunGroupOrder, WorkerOrder

_DTYPES = {"token_ids_T": np.int32, "loss_mask_T": np.bool_, "logprobs_T": np.float32}

AnswerT = TypeVar("AnswerT", GroupDone, PromptFound)


class PendingCalls:
    """The calls in flight to one worker, or to one node, by call id."""

    def __init__(self, send: Callable[[WorkerOrder], None]) -> None:
        self._send = send
        self._pending: dict[int, tuple[type[GroupDone | PromptFound], asyncio.Future[Any]]] = {}
        self._loss = ""
        self.newest = -1
        """The id of the newest call, -1 before the first."""

    @property
    def ids(self) -> list[int]:
        """The calls in flight."""
        return list(self._pending)

    def next_id(self) -> int:
        """Return the id of a new call."""
        self.newest += 1
        return self.newest

    async def call(self, order: RunGroupOrder | AskPrompt, kind: type[AnswerT]) -> AnswerT:
        """Send `order` and wait for its answer. If the caller is cancelled, the worker is told to cancel the call.

        Raises:
            RolloutFailed: the worker's answer is a failure.
            WorkerLost: the worker ended before it answered.
        """
        if self._loss:
            raise WorkerLost(self._loss)
        future: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._pending[order.call_id] = kind, future
        try:
            self._send(WorkerOrder(body=order))
            return await future
        except asyncio.CancelledError:
            self._send(WorkerOrder(body=Cancel(call_id=order.call_id)))
            raise
        finally:
            del self._pending[order.call_id]

    def resolve(self, answer: GroupDone | PromptFound | CallFailed) -> None:
        """Hand `answer` to its caller; an answer whose caller was cancelled is dropped.

        Raises:
            MessageRefused: its call was never made, or asked for something else.
        """
        if not 0 <= answer.call_id <= self.newest:
            raise MessageRefused(f"an answer to call {answer.call_id}, which was never made")
        kind, future = self._pending.get(answer.call_id, (None, None))
        if kind is None or future is None or future.done():
            return
        if isinstance(answer, CallFailed):
            failure = RolloutFailed(answer.message, kind=answer.kind, is_infrastructure=answer.is_infrastructure)
            future.set_exception(failure)
        elif isinstance(answer, kind):
            future.set_result(answer)
        else:
            raise MessageRefused(f"a {type(answer).__name__} in answer to call {answer.call_id}, which needs a {kind.__name__}")

    def lose(self, call_id: int, loss: str) -> None:
        """Fail one call with WorkerLost, if it is still in flight."""
        _, future = self._pending.get(call_id, (None, None))
        if future is not None and not future.done():
            future.set_exception(WorkerLost(loss))

    def fail_all(self, loss: str) -> None:
        """Fail every call in flight, and every later one, with WorkerLost. `loss` says which worker ended and how."""
        self._loss = loss
        for call_id in self.ids:
            self.lose(call_id, loss)


def find_fault(rollouts: Sequence[Rollout], request: GroupRequest) -> str | None:
    """Return what is wrong with the answer to `request`, as the end of a sentence; None when the run may use it."""
    if [rollout.index for rollout in rollouts] != list(range(request.num_rollouts)):
        return f"has {len(rollouts)} rollouts, where {request.num_rollouts} in order were asked for"
    for rollout in rollouts:
        numbers = {"reward": rollout.reward, **rollout.scores}
        found = [f"with {name} = {value}" for name, value in numbers.items() if not math.isfinite(value)]
        found += [fault for sample in rollout.samples for fault in _sample_faults(sample)]
        if found:
            return f"has a rollout (index {rollout.index}) {found[0]}"
    return None


def _sample_faults(sample: Sample) -> Iterator[str]:
    shape, num_versioned = sample.token_ids_T.shape[:1], count_tokens(sample.versions)
    for name, dtype in _DTYPES.items():
        array = getattr(sample, name)
        if array.dtype != dtype or array.shape != shape:
            yield f"whose {name} has the shape {array.shape} and dtype {array.dtype}, where its tokens need {shape} and {dtype}"
    # The first token of a sample is never trained on, so the model may have sampled one more than the mask has.
    if num_versioned - sample.num_loss_tokens not in (0, 1):
        yield f"that has {sample.num_loss_tokens} sampled tokens and policy versions for {num_versioned}"
    if not np.isfinite(sample.logprobs_T).all():
        yield "with log-probabilities that are no numbers"
