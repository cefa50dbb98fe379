"""Test requests to a teacher over real HTTP, and what becomes of a group when it does not answer."""

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from support.http_fake import serve
from trivet.client.inference_client import InferenceClient
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import TeacherModelConfig, TeacherNameConfig
from trivet.errors import ConfigError, InferenceError, RolloutFailed
from trivet.orchestrator.teacher import Teacher, is_scored
from trivet.wire.rollouts import Group, Rollout, Sample
from trivet.wire.versions import GroupId, PolicyVersion, VersionRun


@dataclass
class Script:
    """A server that gives token t the log-probability -t / 10. The tokens of a text are its bytes."""

    fails: int = 0
    """The number of questions to answer with 500."""
    impossible: int | None = None
    shift: int = 0
    """Added to every byte, as by another tokenizer."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if method == "GET":
            return 200, b"{}"
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        with self.lock:
            status, found = self.answer(path, json.loads(body))
            self.at_once -= 1
        return status, json.dumps(found).encode()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize":
            text = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
            return 200, {"tokens": [byte + self.shift for byte in text.encode()], "count": 1, "max_model_len": 10}
        if path == "/detokenize":
            return 200, {"prompt": bytes(token - self.shift for token in body["tokens"]).decode()}
        self.asked.append(body)
        if self.fails:
            self.fails -= 1
            return 500, {"error": {"message": "the engine is busy"}}
        scored = [{str(token): {"logprob": self.logprob(token), "rank": 1}} for token in body["prompt"][1:]]
        return 200, {"choices": [{"prompt_logprobs": [None, *scored]}]}

    def logprob(self, token: int) -> float:
        return -9999.0 if token == self.impossible else -token / 10


def make_sample(token_ids: list[int], *, num_prompt: int = 2) -> Sample:
    mask_T = np.arange(len(token_ids)) >= num_prompt
    return Sample(
        token_ids_T=np.array(token_ids, dtype=np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.full(len(token_ids), -1.0, dtype=np.float32),
        versions=[VersionRun(PolicyVersion(0), int(mask_T.sum()))] if mask_T.any() else [],
        temperature=1.0,
    )


def with_teacher(urls: list[str], body, *, max_concurrent: int = 4, pauses: list[float] | None = None, ready_s: float = 60.0):
    """Return what `body` returns for a teacher on `urls` whose pauses take no time."""
    slept = pauses if pauses is not None else []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def main():
        config = TeacherModelConfig(
            model=TeacherNameConfig(name="big"),
            client=ClientConfig(base_url=urls, wait_for_ready_timeout=ready_s),
            max_concurrent=max_concurrent,
        )
        teacher = Teacher(config, [InferenceClient(url, timeout_s=60) for url in urls], sleep=sleep)
        try:
            return await body(teacher)
        finally:
            await teacher.aclose()

    return asyncio.run(main())


def score_all(urls: list[str], samples: list[Sample], *, seq_len: int = 64, **options) -> list[Rollout]:
    rollouts = [Rollout(index=index, reward=0.0, samples=[sample]) for index, sample in enumerate(samples)]
    with_teacher(urls, lambda teacher: teacher.score_rollouts(rollouts, seq_len=seq_len), **options)
    return rollouts


def test_every_loss_token_of_a_group_gets_the_teachers_log_probability():
    with serve(Script()) as url:
        rollouts = score_all([url], [make_sample([5, 6, 7, 8]), make_sample([9, 10, 11])])
    scored = [rollout.samples[0].teacher_logprobs_T for rollout in rollouts]
    np.testing.assert_allclose(scored[0], [0, 0, -0.7, -0.8], rtol=1e-6)
    np.testing.assert_allclose(scored[1], [0, 0, -1.1], rtol=1e-6)
    assert {values.dtype for values in scored} == {np.dtype(np.float32)}
    assert is_scored(Group(group_id=GroupId(3), env="e", example_id=0, rollouts=rollouts))


def test_no_more_questions_are_under_way_than_allowed():
    script = Script()
    with serve(script) as url:
        score_all([url], [make_sample([5, 6, index]) for index in range(24)], max_concurrent=3)
    assert len(script.asked) == 24
    assert script.most_at_once <= 3


def test_questions_are_spread_over_the_servers():
    scripts = [Script(), Script()]
    with serve(scripts[0]) as first, serve(scripts[1]) as second:
        score_all([first, second], [make_sample([5, 6, index]) for index in range(24)], max_concurrent=6)
    assert min(len(script.asked) for script in scripts) >= 3  # six are asked at once


def test_a_question_that_failed_is_asked_again_after_a_growing_pause():
    pauses: list[float] = []
    with serve(Script(fails=3)) as url:
        rollouts = score_all([url], [make_sample([5, 6, 7])], pauses=pauses)
    assert rollouts[0].samples[0].teacher_logprobs_T is not None
    assert pauses == [1.0, 2.0, 4.0]


def test_a_server_that_fails_leaves_the_question_to_another():
    broken, well = Script(fails=99), Script()
    with serve(broken) as first, serve(well) as second:
        score_all([first, second], [make_sample([5, 6, 7])])
    assert (len(broken.asked), len(well.asked)) == (1, 1)


@pytest.mark.parametrize(
    ("script", "part"),
    [(Script(fails=99), "teacher big: .*the engine is busy"), (Script(impossible=7), "token 7 for impossible")],
)
def test_a_group_that_the_teacher_cannot_score_fails_with_the_reason(script: Script, part: str):
    with serve(script) as url, pytest.raises(RolloutFailed, match=part) as caught:
        score_all([url], [make_sample([5, 6, 7]), make_sample([5, 6, 8])])
    assert caught.value.kind == "TeacherFailed"


def test_a_teacher_that_stays_away_costs_the_group():
    with serve(Script()) as url:
        pass
    with pytest.raises(RolloutFailed, match="was not ready within"):
        score_all([url], [make_sample([5, 6, 7])], ready_s=0.01)


def test_a_server_that_leaves_tokens_out_is_not_believed():
    script = Script()
    script.answer = lambda path, body: (200, {"choices": [{"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, None]}]})

    async def ask(url: str):
        client = InferenceClient(url, timeout_s=10)
        try:
            await client.score([5, 6, 7], model="big")
        finally:
            await client.aclose()

    with serve(script) as url, pytest.raises(InferenceError, match="scored 1 of 2 tokens"):
        asyncio.run(ask(url))


def meet(policy: Script, teacher: Script) -> None:
    async def body(asked: Teacher, url: str) -> None:
        client = InferenceClient(url, timeout_s=10)
        try:
            await asked.wait_ready()
            await asked.require_same_tokens(client, model="small", messages=[{"role": "user", "content": "2+2?"}])
        finally:
            await client.aclose()

    with serve(policy) as policy_url, serve(teacher) as teacher_url:
        with_teacher([teacher_url], lambda asked: body(asked, policy_url))


class OtherSpecialTokens(Script):
    def answer(self, path, body):
        code, found = super().answer(path, body)
        return (code, {"prompt": found["prompt"].replace("user", "<unused>")}) if path == "/detokenize" else (code, found)


@pytest.mark.parametrize(
    ("teacher", "part"),
    [
        (Script(shift=1), r"'big' has not the tokens of the policy 'small': 'The quick.* is \[84, .* and \[85, "),
        (OtherSpecialTokens(), r"it reads a prompt as .*<unused>"),
    ],
)
def test_a_teacher_of_another_vocabulary_is_refused_with_the_difference(teacher: Script, part: str):
    with pytest.raises(ConfigError, match=part):
        meet(Script(), teacher)
