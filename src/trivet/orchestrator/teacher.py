"""Gets a teacher's log-probabilities for the rollouts of a group before the group becomes ready. The dispatcher's tasks call it.

consumes: the rollouts of a group
produces: the same rollouts, with `teacher_logprobs_T` on every sample that has a loss token
waits for: the teacher's servers, at most `client.timeout` a request, and `client.wait_for_ready_timeout` while none answers
unblocked by: a server's answer; if the teacher does not answer, the group fails with the reason

This module must never change sampled tokens, nor send more than `max_concurrent` requests at one time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trivet.algorithms.packing import truncate
from trivet.backoff import backoff_s
from trivet.client.inference_client import InferenceClient
from trivet.config.schema.orchestrator import TeacherModelConfig
from trivet.errors import ConfigError, InferenceError, RolloutFailed
from trivet.wire.rollouts import Group, Rollout, Sample

logger = logging.getLogger(__name__)

_MAX_TRIES = 5
"""Requests for one sample before its group fails. Each goes to another server if there are several."""
_PAUSE_S = 1.0
"""Pause before the second try. It doubles with each further one."""
_IMPOSSIBLE = -9999.0
"""Number in vLLM's answer for a log-probability of minus infinity."""
_TOKENIZER_TEXTS = (
    "The quick brown fox jumps over 1234567890 lazy dogs!",
    "def f(x):\n    return {'a': [x**2 + 0.5]}  # \t<tag/>",
    "Größe, naïveté, 東京で42回, привет \U0001f642",
)
"""Texts that different tokenizers split differently: words, digits, code and whitespace, other scripts."""


class Teacher:
    """Scores samples with the teacher's servers."""

    def __init__(
        self,
        config: TeacherModelConfig,
        clients: Sequence[InferenceClient],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make a teacher. No request is sent yet.

        Args:
            clients: one for each server of the teacher.
        """
        self._name = config.model.name
        self._ready_timeout_s = config.client.wait_for_ready_timeout
        self._clients = list(clients)
        self._in_flight = dict.fromkeys(range(len(self._clients)), 0)
        """Number of requests in flight at each server, by its index in `clients`."""
        self._request_slots = asyncio.Semaphore(config.max_concurrent)
        self._sleep = sleep
        self._score_seconds: list[float] = []
        """Seconds for each sample that was scored since `take_metrics` was last called."""

    async def wait_ready(self) -> None:
        """Wait until every server answers."""
        await asyncio.gather(*(client.wait_ready(self._ready_timeout_s) for client in self._clients))

    async def require_same_tokens(
        self, policy: InferenceClient, *, model: str, messages: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Check that the teacher has the policy's tokenizer.

        Args:
            policy: client of a server of the policy.
            model: the policy's name at that server.
            messages: a prompt of an environment. Its chat template adds special tokens, which are compared too.

        Raises:
            ConfigError: the two split a text into different tokens, or read different texts from equal tokens.
        """

        def make_error(difference: str) -> ConfigError:
            return ConfigError(
                f"orchestrator.teacher_model.model.name {self._name!r} has not the tokens of the policy {model!r}: {difference}; "
                "a teacher scores the policy's token ids, take one of the same family and vocabulary"
            )

        for teacher in self._clients:
            for text in _TOKENIZER_TEXTS:
                expected, found = await policy.tokenize(text, model=model), await teacher.tokenize(text, model=self._name)
                if found != expected:
                    shown = [f"{ids[:8]}{' …' if len(ids) > 8 else ''}" for ids in (expected, found)]
                    raise make_error(f"{text!r} is {shown[0]} to the policy and {shown[1]} to it")
            if messages is not None:
                ids = await policy.tokenize(messages, model=model)
                teacher_text, policy_text = (
                    await teacher.detokenize(ids, model=self._name),
                    await policy.detokenize(ids, model=model),
                )
                if teacher_text != policy_text:
                    raise make_error(f"it reads a prompt as {teacher_text[:200]!r}, the policy as {policy_text[:200]!r}")
        logger.info("teacher model=%s servers=%s reads the policy's tokens", self._name, len(self._clients))

    async def score(self, sample: Sample) -> np.ndarray:
        """Return the teacher's log-probability of each token of `sample`, float32 [T]; 0 for tokens that are not trained on.

        Raises:
            RolloutFailed: no server answered, or a token is impossible for the teacher.
        """
        started = time.monotonic()
        token_ids: list[int] = sample.token_ids_T.tolist()
        last_error: InferenceError | None = None
        for number in range(_MAX_TRIES):
            if number:
                await self._sleep(backoff_s(number, first_s=_PAUSE_S))
            try:
                async with self._request_slots:
                    # The server with the fewest requests; among several, each try starts with another one.
                    index = min(self._in_flight, key=lambda i: (self._in_flight[i], (i - number) % len(self._clients)))
                    client = self._clients[index]
                    self._in_flight[index] += 1
                    try:
                        logprobs = await client.score(token_ids, model=self._name)
                    except InferenceError:
                        # With several servers the next try goes to another one at once. Otherwise wait for this server, which
                        # may be restarting; if it answers, only the try is lost.
                        if number or len(self._clients) == 1:
                            await client.wait_ready(self._ready_timeout_s)
                        raise
                    finally:
                        self._in_flight[index] -= 1
            except InferenceError as exc:
                last_error = exc
                continue
            self._score_seconds.append(time.monotonic() - started)
            values_T = np.where(sample.loss_mask_T, np.array(logprobs, dtype=np.float32), np.float32(0.0))
            if np.isfinite(values_T).all() and values_T.min(initial=0.0) > _IMPOSSIBLE:
                return values_T
            token = token_ids[int(np.argmin(np.nan_to_num(values_T, nan=-np.inf)))]
            raise RolloutFailed(
                f"the teacher holds token {token} for impossible: its vocabulary is not the policy's", kind="TeacherFailed"
            )
        raise RolloutFailed(f"teacher {self._name}: {last_error}", kind="TeacherFailed") from last_error

    async def score_rollouts(self, rollouts: Sequence[Rollout], *, seq_len: int) -> None:
        """Set the teacher's log-probabilities in the samples of a group, of up to `seq_len` tokens each."""
        for rollout in rollouts:
            rollout.samples = [truncate(sample, seq_len=seq_len) for sample in rollout.samples]
        samples = [sample for rollout in rollouts for sample in rollout.samples if sample.num_loss_tokens]
        try:
            async with asyncio.TaskGroup() as tasks:
                scoring = [tasks.create_task(self.score(sample), name="teacher") for sample in samples]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        for sample, scored in zip(samples, scoring, strict=True):
            sample.teacher_logprobs_T = scored.result()

    def take_metrics(self) -> dict[str, float]:
        """Return `time/teacher_logprobs`: mean seconds to score a sample since the last call, with the wait for a request slot."""
        seconds, self._score_seconds = self._score_seconds, []
        return {"time/teacher_logprobs": sum(seconds) / len(seconds)} if seconds else {}

    async def aclose(self) -> None:
        """Close every client."""
        for client in self._clients:
            await client.aclose()


def is_scored(group: Group) -> bool:
    """Return whether the teacher has scored everything in `group` that can be trained on."""
    samples = [sample for rollout in group.rollouts for sample in rollout.samples]
    return all(sample.teacher_logprobs_T is not None for sample in samples if sample.num_loss_tokens)
