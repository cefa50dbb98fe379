import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from support.groups import make_draw, make_group
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import BatchError, InferenceError
from trivet.orchestrator.buffer import FinishedGroup, GroupCounters
from trivet.orchestrator.filters import FilterReason
from trivet.orchestrator.prompts import PromptLimits, check_prompts, limits_of, with_question
from trivet.wire.groups import Example

LIMITS = PromptLimits(seq_len=256, max_tokens={"toy": 16})


class Prompts:
    """A pool whose prompt of example n is n words, and a server with a context of 64 that reads a word as a token."""

    async def example(self, env: str, *, split: object, example_id: int) -> Example:
        return Example(prompt=[{"role": "user", "content": "a " * example_id}])

    async def count_tokens(self, messages: Sequence[dict[str, Any]], *, model: str) -> tuple[int, int | None]:
        return len(messages[0]["content"].split()), 64


def check(lengths: Sequence[int], **changes: Any) -> PromptLimits:
    asked: Any = Prompts()
    draws = [make_draw(index, example_id=length) for index, length in enumerate(lengths)]
    return asyncio.run(check_prompts(draws, limits=LIMITS, pool=asked, client=changes.get("client", asked), model="m"))


def test_prompts_that_do_not_fit_are_counted_and_named_with_the_arithmetic(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        limits = check([48, 49, 404, 49])  # an example that comes again counts once
    assert "2 of 3 prompts looked at do not fit (example 49 of toy: 49 tokens, example 404 of toy: 404 tokens)" in caplog.text
    assert "48 tokens at most" in caplog.text
    assert "max_model_len 64 - sampling.max_tokens 16" in caplog.text
    assert limits.context == 64


def test_a_run_in_which_none_of_the_first_prompts_fits_is_refused() -> None:
    with pytest.raises(BatchError, match=r"2 of 2 prompts looked at do not fit .*max_model_len 64 - sampling\.max_tokens 16"):
        check([49, 50])


def test_a_server_that_counts_no_tokens_leaves_the_lengths_unknown() -> None:
    class Deaf:
        async def count_tokens(self, messages: object, *, model: str) -> tuple[int, int | None]:
            raise InferenceError("404")

    assert check([400], client=Deaf()) == LIMITS


def test_an_example_whose_first_message_comes_in_play_is_not_measured_and_gets_a_question_for_the_probe() -> None:
    class Silent(Prompts):
        async def example(self, env: str, *, split: object, example_id: int) -> Example:
            return Example(prompt=[] if example_id == 0 else [{"role": "user", "content": "a " * example_id}])

    asked: Any = Silent()
    draws = [make_draw(0, example_id=0), make_draw(1, example_id=7)]
    assert asyncio.run(check_prompts(draws, limits=LIMITS, pool=asked, client=asked, model="m")).context == 64
    assert [message["role"] for message in with_question([{"role": "system", "content": "Play."}])] == ["system", "user"]
    assert [message["role"] for message in with_question([])] == ["user"]
    question = [{"role": "user", "content": "why"}]
    assert with_question(question) == question


def test_each_environment_reserves_its_own_completion() -> None:
    config = OrchestratorConfig.model_validate(
        {"sampling": {"max_tokens": 8}, "env": [{"id": "a"}, {"id": "b", "sampling": {"max_tokens": 32}}]}
    )
    assert limits_of(config).max_tokens == {"a": 8, "b": 32}
    assert limits_of(OrchestratorConfig()).max_tokens == {"reverse-text": 1}


def test_a_step_names_the_examples_whose_prompts_did_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    counters = GroupCounters()
    counters.finished.append(FinishedGroup.of(make_group(0, (1.0, 0.0))))
    with caplog.at_level(logging.WARNING):
        counters.report_overlong(step=3)
        assert caplog.text == ""
        for example_id in range(7):
            group = make_group(example_id, (0.0, 0.0))
            group.example_id = example_id
            counters.finished.append(FinishedGroup.of(group, filtered=FilterReason.OVERLONG_PROMPT))
        counters.report_overlong(step=3)
    assert "step=3 groups=7 of 8 examples=0 of toy, 1 of toy, 2 of toy, 3 of toy, 4 of toy, ..." in caplog.text
