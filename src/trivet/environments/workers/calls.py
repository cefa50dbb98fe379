"""Matches the answers of one worker with the calls that wait for them, and checks the rollouts in an answer.

`workers.client.WorkerClient` owns a `PendingCalls`, and so does `nodes.node` for a node of a run over several nodes.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from trivet.errors import MessageRefused, RolloutFailed, WorkerLost
from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import MAX_REWARD, Rollout, Sample
from trivet.wire.versions import count_tokens
from trivet.wire.workers import AskExample, CallAnswer, CallFailed, CallOrder, Cancel, ExampleFound, GroupDone, RunGroupOrder

_DTYPES = {"token_ids_T": np.int32, "loss_mask_T": np.bool_, "logprobs_T": np.float32}
"""The dtype of each array of a sample. T counts the sample's tokens."""
_MAX_TURNS = 1 << 20
"""Limit on the number of a turn, because arrays are made of that size."""

AnswerT = TypeVar("AnswerT", GroupDone, ExampleFound)


class PendingCalls:
    """The calls in flight to one worker, or to one node, by call id."""

    def __init__(self, send: Callable[[CallOrder], None]) -> None:
        self._send = send
        self._pending: dict[int, tuple[type[GroupDone | ExampleFound], asyncio.Future[Any]]] = {}
        """The type of the answer, and the future that gets it, by call id."""
        self._loss = ""
        """How the worker ended; empty while it runs."""
        self.newest = -1
        """The id of the newest call; -1 before the first."""

    @property
    def ids(self) -> list[int]:
        """The ids of the calls in flight."""
        return list(self._pending)

    def next_id(self) -> int:
        """Return the id of a new call."""
        self.newest += 1
        return self.newest

    async def call(self, order: RunGroupOrder | AskExample, answer_type: type[AnswerT]) -> AnswerT:
        """Send `order` and wait for its answer. If the caller is cancelled, send the worker an order to cancel the call.

        Raises:
            RolloutFailed: the worker's answer is a failure.
            WorkerLost: the worker ended before it answered.
        """
        if self._loss:
            raise WorkerLost(self._loss)
        future: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._pending[order.call_id] = answer_type, future
        try:
            self._send(order)
            return await future
        except asyncio.CancelledError:
            self._send(Cancel(call_id=order.call_id))
            raise
        finally:
            del self._pending[order.call_id]

    def resolve(self, answer: CallAnswer) -> None:
        """Pass `answer` to its caller, or drop it if the caller was cancelled.

        Raises:
            MessageRefused: no call has its id, or the call needs an answer of another type.
        """
        if not 0 <= answer.call_id <= self.newest:
            raise MessageRefused(f"an answer to call {answer.call_id}, which was never made")
        answer_type, future = self._pending.get(answer.call_id, (None, None))
        if answer_type is None or future is None or future.done():
            return
        if isinstance(answer, CallFailed) and answer.is_lost:
            future.set_exception(WorkerLost(answer.message))
        elif isinstance(answer, CallFailed):
            failure = RolloutFailed(answer.message, kind=answer.kind, is_infrastructure=answer.is_infrastructure)
            future.set_exception(failure)
        elif isinstance(answer, answer_type):
            future.set_result(answer)
        else:
            raise MessageRefused(
                f"a {type(answer).__name__} in answer to call {answer.call_id}, which needs a {answer_type.__name__}"
            )

    def lose(self, call_id: int, loss: str) -> None:
        """Make one call fail with WorkerLost, if it is still in flight. `loss` says which worker ended and how."""
        _, future = self._pending.get(call_id, (None, None))
        if future is not None and not future.done():
            future.set_exception(WorkerLost(loss))

    def fail_all(self, loss: str) -> None:
        """Make every call in flight, and every later call, fail with WorkerLost. `loss` says which worker ended and how."""
        self._loss = loss
        for call_id in self.ids:
            self.lose(call_id, loss)


def find_fault(rollouts: Sequence[Rollout], request: GroupRequest) -> str | None:
    """Return the fault of the answer to `request`, as the end of a sentence; None when the answer is valid."""
    if [rollout.index for rollout in rollouts] != list(range(request.num_rollouts)):
        return f"has {len(rollouts)} rollouts, where {request.num_rollouts} in order were asked for"
    for rollout in rollouts:
        numbers = {"reward": rollout.reward, **rollout.scores}
        faults = [f"with {name} = {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if len(rollout.turn_rewards) not in (0, rollout.num_turns):
            faults.append(f"with {rollout.num_turns} turns and {len(rollout.turn_rewards)} turn rewards")
        faults += [f"with a turn reward of {value}" for value in rollout.turn_rewards if not abs(value) <= MAX_REWARD]
        faults += [fault for sample in rollout.samples for fault in _find_sample_faults(sample)]
        if faults:
            return f"has a rollout (index {rollout.index}) {faults[0]}"
    return None


def _find_sample_faults(sample: Sample) -> Iterator[str]:
    shape, num_versioned = sample.token_ids_T.shape[:1], count_tokens(sample.versions)
    for name, dtype in _DTYPES.items():
        array = getattr(sample, name)
        if array.dtype != dtype or array.shape != shape:
            yield f"whose {name} has the shape {array.shape} and dtype {array.dtype}, where its tokens need {shape} and {dtype}"
    # The first token of a sample is never trained on. If the model sampled it, it has a version and is not in the loss mask.
    if num_versioned - sample.num_loss_tokens not in (0, 1):
        yield f"that has {sample.num_loss_tokens} sampled tokens and policy versions for {num_versioned}"
    counts = [run.length for run in sample.turns if run.length >= 0 and 0 <= run.turn < _MAX_TURNS]
    if sample.turns and (len(counts) != len(sample.turns) or sum(counts) != sample.num_loss_tokens):
        yield f"that has {sample.num_loss_tokens} sampled tokens and turns for {sum(counts)}"
    if not np.isfinite(sample.logprobs_T).all():
        yield "with log-probabilities that are no numbers"
