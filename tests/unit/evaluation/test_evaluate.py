"""Test an evaluation over a scripted environment: its files, its failures and its resume."""

import asyncio
import json

import msgspec
import pytest

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig
from trivet.errors import ConfigError, RolloutFailed
from trivet.evaluation.evaluate import EvalSeries, Evaluator
from trivet.evaluation.results import EarlierResults, ResultsFile, read_summary
from trivet.wire.groups import EnvironmentInfo, SamplingArguments, Split
from trivet.wire.rollouts import Rollout

SAMPLING = SamplingArguments(temperature=1.0)
ENV = EnvConfig(id="letters")
LARGE = EnvironmentInfo(num_examples=100, num_eval_examples=100)
INFO = EnvironmentInfo(num_examples=100, num_eval_examples=6)


def series(**changes):
    fields = {"num_examples": 4, "rollouts_per_example": 2, "interval": 1, "sampling": lambda step: SAMPLING} | changes
    return EvalSeries(name="letters", env=ENV, pool_name="letters", **fields)


def task(*, info=INFO, digest="d3", **changes):
    return series(**changes).make_task(info, step=3, digest=digest)


class OneServer:
    """A server that is always free and never at fault."""

    def pick(self, *, num_rollouts):
        return "http://a"

    def release(self, root, *, num_rollouts):
        pass

    async def is_at_fault(self, root):
        return False


class Script:
    """Rewards are 1 and 0 for even examples, 0 and 0 for odd ones. Examples in `fails` raise, `stops_at` ends the
    evaluation."""

    def __init__(self, *, fails=(), stops_at=None, scale=1.0, delays=None, info=INFO):
        self.infos = {"letters": info}
        self.fails, self.stops_at, self.asked = fails, stops_at, []
        self.scale, self.delays = scale, delays or {}

    async def run_group(self, request):
        self.asked.append(request.example_id)
        await asyncio.sleep(self.delays.get(request.example_id, 0))
        if request.example_id == self.stops_at:
            self.main.cancel()
            await asyncio.sleep(10)
        if request.example_id in self.fails:
            raise RolloutFailed("boom")
        rewards = [self.scale**request.example_id * (request.example_id % 2 == 0), 0.0]
        return [Rollout(index=i, reward=reward, scores={"letters": reward}) for i, reward in enumerate(rewards)]


def run(tmp_path, script, *, earlier=EarlierResults.REPLACE, slots=1, digest="d3", **changes):
    async def go():
        script.main = asyncio.current_task()
        engine = Evaluator(pool=script, servers=OneServer(), layout=RunLayout(tmp_path), max_concurrent=2 * slots)
        return (await engine.evaluate([series(**changes)], step=3, digest=digest, earlier=earlier))[0]

    return asyncio.run(go())


def results_in(tmp_path):
    return RunLayout(tmp_path).evals_step(3, "letters")


def lines(tmp_path):
    return [json.loads(line) for line in (results_in(tmp_path) / "results.jsonl").read_text().splitlines()]


def test_scores_and_results_are_written_in_the_order_of_the_examples(tmp_path):
    summary = run(tmp_path, Script())
    assert (summary.avg, summary.pass_at_k, summary.num_failed) == (0.25, 0.5, 0)
    assert summary.scores == {"letters": 0.25}
    assert [(line["example_id"], line["index"]) for line in lines(tmp_path)] == [(e, i) for e in range(4) for i in range(2)]
    assert read_summary(results_in(tmp_path)) == summary


def test_scores_do_not_depend_on_which_example_ends_first(tmp_path):
    last_first = {example: 0.002 * (30 - example) for example in range(30)}
    for name, delays in (("first", {}), ("last", last_first)):
        run(tmp_path / name, Script(scale=0.7, delays=delays, info=LARGE), slots=30, num_examples=30)
    first, last = (
        msgspec.structs.replace(read_summary(results_in(tmp_path / name)), seconds=0.0) for name in ("first", "last")
    )
    assert first == last


def test_an_example_that_fails_is_counted_named_and_in_no_score(tmp_path):
    summary = run(tmp_path, Script(fails=(1, 3)))
    assert (summary.num_failed, summary.first_error, summary.avg) == (2, "RolloutFailed: boom", 0.5)


def test_when_all_fail_there_is_no_score(tmp_path):
    summary = run(tmp_path, Script(fails=range(4)))
    assert (summary.num_failed, summary.avg, summary.pass_at_k, summary.truncated) == (4, None, None, None)


def test_an_evaluation_cut_short_goes_on_with_what_is_left(tmp_path):
    with pytest.raises(asyncio.CancelledError):
        run(tmp_path, Script(stops_at=2))
    assert read_summary(results_in(tmp_path)) is None
    with (results_in(tmp_path) / "results.jsonl").open("a") as file:
        file.write('{"example_id": 2, "ind')
    script = Script()
    summary = run(tmp_path, script, earlier=EarlierResults.REQUIRE_SAME)
    assert script.asked == [2, 3]
    assert summary.avg == 0.25
    assert run(tmp_path, script, earlier=EarlierResults.REQUIRE_SAME) == summary
    assert script.asked == [2, 3], "a complete evaluation is not run again"


def test_examples_come_from_the_evaluation_data_or_else_from_the_training_data():
    assert (task(num_examples=-1).split, task(num_examples=-1).num_examples) == (Split.EVAL, 6)
    only_train = task(info=EnvironmentInfo(num_examples=3))
    assert (only_train.split, only_train.num_examples) == (Split.TRAIN, 3)
    skipping = task(skip_first=5)
    assert (skipping.first_example, skipping.num_examples) == (5, 1)


def test_nothing_left_to_evaluate_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="'letters' has nothing to evaluate on: 6 examples, skip_first = 6"):
        task(skip_first=6)


@pytest.mark.parametrize(
    "content", [b"{", b'{"avg": 1.0, "env": "\xff"}', b'{"scores": ' + b"[" * 100_000], ids=["torn", "no-text", "deep"]
)
def test_a_summary_that_cannot_be_read_is_refused(content, tmp_path):
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(ConfigError, match="move the directory away to evaluate anew"):
        read_summary(tmp_path)


def test_results_of_other_examples_are_not_continued(tmp_path):
    first, other = (msgspec.structs.replace(INFO, eval_digest=digest) for digest in ("one", "two"))
    ResultsFile(tmp_path, task(info=first), EarlierResults.REPLACE).close()
    with pytest.raises(ConfigError, match="holds results of another evaluation: data_digest was one and is two now"):
        ResultsFile(tmp_path, task(info=other), EarlierResults.REQUIRE_SAME)
