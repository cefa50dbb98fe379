"""Test which evaluations are due, that one evaluation measures one policy, and what a resume evaluates again."""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager

import pytest

from support.groups import make_sample
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import ConfigError, RolloutFailed, WorkerLost
from trivet.evaluation.evaluate import Evaluator
from trivet.evaluation.scores import Summary
from trivet.orchestrator.online_eval import OnlineEval, schedule_series, val_metrics
from trivet.telemetry.events import read_events
from trivet.telemetry.telemetry import Telemetry
from trivet.wire.events import Evaluate
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import PolicyVersion, VersionRun

CONFIG = {
    "env": [{"id": "letters"}],
    "eval": {"interval": 10, "env": [{"id": "letters"}, {"id": "words", "num_examples": 2, "rollouts_per_example": 2}]},
}


class Policy:
    """Servers whose policy the test moves. `moves` are made whenever nothing is pinned."""

    def __init__(self, version, weights):
        self.version, self.num_pins, self._weights = version, 0, weights
        self.is_free = asyncio.Event()
        self.is_free.set()

    @property
    def digest(self):
        return f"{self._weights}-{self.version}"

    def subscribe(self, on_policy_served):
        self.subscribed = on_policy_served

    @asynccontextmanager
    async def pinned(self):
        self.num_pins += 1
        self.is_free.clear()
        yield self.version
        self.num_pins -= 1
        self.is_free.set()


class Pool:
    def __init__(self, policy):
        self.policy, self.requests = policy, []
        self.infos = {
            "letters": EnvironmentInfo(num_examples=9, num_eval_examples=3),
            "words-eval": EnvironmentInfo(num_examples=9, num_eval_examples=5),
        }

    async def run_group(self, request):
        assert self.policy.num_pins, "an evaluation measures one policy"
        self.requests.append((self.policy.version, request.env, request.example_id))
        await asyncio.sleep(0)
        return [Rollout(index=index, reward=self.policy.version / 100) for index in range(request.num_rollouts)]


class Servers:
    """Two servers. Those in `broken` are at fault."""

    def __init__(self):
        self.broken, self.in_flight = set(), {"http://a": 0, "http://b": 0}

    def pick(self, *, num_rollouts):
        root = min(self.in_flight.keys() - self.broken, key=lambda root: (self.in_flight[root], root))
        self.in_flight[root] += num_rollouts
        return root

    def release(self, root, *, num_rollouts):
        self.in_flight[root] -= num_rollouts

    async def is_at_fault(self, root):
        return root in self.broken


class Bench:
    """The evaluations of an orchestrator, without the orchestrator."""

    def __init__(self, root, *, resumed_from=0, weights="a", **changes):
        self.layout = RunLayout(root)
        self.config = OrchestratorConfig.model_validate({**CONFIG, **changes, "output_dir": root})
        self.policy = Policy(resumed_from, weights)
        self.pool = Pool(self.policy)
        self.servers = Servers()
        series = schedule_series(self.config, self.pool, layout=self.layout, resumed_from=resumed_from)
        self.telemetry = Telemetry("orchestrator", self.config, resume_step=resumed_from)
        self.evals = OnlineEval(
            series,
            evaluator=Evaluator(pool=self.pool, servers=self.servers, layout=self.layout, max_concurrent=4),
            policy=self.policy,
            telemetry=self.telemetry,
        )

    def run(self, *versions):
        """Load `versions`, each after the evaluations before it, and finish with the last."""

        async def go():
            async with asyncio.timeout(240), asyncio.TaskGroup() as tasks:
                running = tasks.create_task(self.evals.run())
                for version in versions:
                    for _ in range(100):
                        await asyncio.sleep(0)
                    await self.policy.is_free.wait()
                    self.policy.version = version
                    self.policy.subscribed(version)
                self.evals.finish(self.policy.version)
                await running

        asyncio.run(go())
        self.telemetry.close()
        return self.evaluated("letters"), self.evaluated("words")

    def evaluated(self, name):
        """Return the versions that were evaluated in this attempt."""
        pool_name = "letters" if name == "letters" else "words-eval"
        return sorted({version for version, env, _ in self.pool.requests if env == pool_name})


@pytest.mark.parametrize(
    ("changes", "versions", "expected"),
    [({}, (4, 9, 11, 19, 25), [0, 11, 25]), ({"eval_base_model": False}, (12, 13), [12, 13])],
)
def test_the_base_model_crossed_multiples_and_the_last_policy_are_evaluated(tmp_path, changes, versions, expected):
    assert Bench(tmp_path, eval=CONFIG["eval"] | changes).run(*versions) == (expected, expected)


def test_an_environment_may_have_its_own_interval_and_size(tmp_path):
    words = {"id": "words", "interval": 20, "num_examples": 1, "skip_first": 4}
    bench = Bench(tmp_path, eval={"interval": 10, "env": [{"id": "letters"}, words]})
    assert bench.run(10, 21) == ([0, 10, 21], [0, 21])
    assert {example for _, env, example in bench.pool.requests if env == "words-eval"} == {4}


def test_scores_reach_the_disk_the_metrics_and_the_history(tmp_path):
    bench = Bench(tmp_path)
    bench.run(50)
    summary = json.loads((bench.layout.evals_step(50, "words") / "summary.json").read_text())
    assert (summary["avg"], summary["digest"], summary["num_examples"]) == (0.5, "a-50", 2)
    lines = [json.loads(line) for line in (bench.layout.metrics / "eval.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 50]
    assert lines[1]["eval/words/avg@2"] == 0.5
    assert lines[1]["eval/words/pass@2"] == 0.0
    events = [(event.version, event.env) for event in read_events(bench.layout.events) if isinstance(event, Evaluate)]
    assert events == [(0, "letters"), (0, "words"), (50, "letters"), (50, "words")]


@pytest.mark.parametrize(
    ("earlier", "resumed_from", "changes", "versions", "expected"),
    [
        ((10, 20), 20, {}, (24, 31), [31]),
        ((10, 20), 20, {"skip_eval_on_resume": False}, (24,), [20, 24]),
        ((), 7, {"eval_base_model": False}, (8, 12, 13), [12, 13]),
    ],
    ids=["what is on disk is not repeated", "it is repeated when asked", "the first multiple is the first to be due"],
)
def test_a_resumed_run_evaluates(tmp_path, earlier, resumed_from, changes, versions, expected):
    if earlier:
        Bench(tmp_path).run(*earlier)
    assert Bench(tmp_path, resumed_from=resumed_from, eval=CONFIG["eval"] | changes).run(*versions) == (expected, expected)


def test_an_evaluation_that_a_crash_cut_short_is_made_up_for(tmp_path):
    Bench(tmp_path).run(10, 20)
    shutil.rmtree(RunLayout(tmp_path).evals_step(20, "words"))
    letters, words = Bench(tmp_path, resumed_from=20).run(21)
    assert (letters, words) == ([21], [20, 21])


def test_evaluations_after_the_step_resumed_from_are_made_again(tmp_path):
    Bench(tmp_path).run(10, 20)
    assert Bench(tmp_path, resumed_from=15, weights="b").run(20) == ([20], [20])
    assert Bench(tmp_path, resumed_from=15, weights="b").run(20) == ([], []), "the same weights have the same scores"


def test_a_group_whose_server_or_worker_was_lost_runs_again_elsewhere(tmp_path):
    bench = Bench(tmp_path, eval={"interval": 10, "env": [{"id": "letters"}]})
    run_group, losses = bench.pool.run_group, [WorkerLost("gone"), RolloutFailed("refused")]

    async def lossy(request):
        if losses:
            error = losses.pop()
            bench.servers.broken |= {request.base_url} if isinstance(error, RolloutFailed) else set()
            raise error
        assert request.base_url == "http://b"
        return await run_group(request)

    bench.pool.run_group = lossy
    bench.run()
    summary = json.loads((bench.layout.evals_step(0, "letters") / "summary.json").read_text())
    assert (summary["num_failed"], bench.servers.in_flight) == (0, {"http://a": 0, "http://b": 0})


def test_tokens_of_another_policy_than_the_one_measured_do_not_count(tmp_path):
    bench = Bench(tmp_path, resumed_from=10, eval={"interval": 10, "env": [{"id": "letters"}]})
    sampled = [[VersionRun(PolicyVersion(0), 3)], [VersionRun(PolicyVersion(10), 2), VersionRun(PolicyVersion(0), 1)]]

    async def restarted_twice(request):
        versions = sampled.pop() if sampled else [VersionRun(PolicyVersion(10), 3)]
        sample = make_sample(completion=3)
        sample.versions = versions
        return [Rollout(index=0, reward=float(versions == [VersionRun(PolicyVersion(10), 3)]), samples=[sample])]

    bench.pool.run_group = restarted_twice
    bench.run()
    summary = json.loads((bench.layout.evals_step(10, "letters") / "summary.json").read_text())
    assert (summary["num_failed"], summary["avg"], sampled) == (0, 1.0, [])


def test_all_environments_together_keep_to_the_limit_of_rollouts_in_flight(tmp_path):
    bench = Bench(tmp_path)
    run_group, most = bench.pool.run_group, 0

    async def watched(request):
        nonlocal most
        most = max(most, sum(bench.servers.in_flight.values()))
        return await run_group(request)

    bench.pool.run_group = watched
    bench.run()
    assert 2 <= most <= 4


def test_an_environment_may_be_sampled_differently(tmp_path):
    words = {"id": "words", "sampling": {"temperature": 0.5, "max_tokens": 7}}
    evals = {"interval": 10, "env": [{"id": "letters"}, words], "sampling": {"temperature": 0.0, "top_p": 0.9}}
    bench = Bench(tmp_path, eval=evals)
    bench.run()
    tasks = {
        name: json.loads((bench.layout.evals_step(0, name) / "task.json").read_text())["sampling"]
        for name in ("letters", "words")
    }
    assert [(task["temperature"], task["fields"]["max_tokens"], task["fields"]["top_p"]) for task in tasks.values()] == [
        (0.0, None, 0.9),
        (0.5, 7, 0.9),
    ]


def test_validation_measures_what_is_trained_on_and_reaches_the_next_step(tmp_path):
    bench = Bench(tmp_path, eval=None, val={"interval": 10, "num_examples": 2})
    assert bench.run(5, 10, 12)[0] == [10, 12], "the start model is not validated"
    assert bench.evals.take_val_metrics() == {"val_reward/mean": 0.1, "val_reward/letters": 0.1}
    assert bench.evals.take_val_metrics() == {}
    assert (bench.layout.evals_step(10, "val/letters") / "summary.json").exists()


def test_the_last_validation_reaches_the_metrics_of_evaluations(tmp_path):
    bench = Bench(tmp_path, eval=None, val={"interval": 10, "num_examples": 2})
    bench.run(10, 15)
    (line,) = [json.loads(line) for line in (bench.layout.metrics / "eval.jsonl").read_text().splitlines()]
    assert (line["step"], line["val_reward/mean"]) == (15, 0.15)


def test_validation_weighs_environments_by_their_examples():
    def summary(avg, num_examples, num_failed=0):
        return Summary(
            env="e", step=1, digest="", num_examples=num_examples, rollouts_per_example=1, num_failed=num_failed,
            avg=avg, ci95=None, pass_at_k=None, truncated=None, completion_tokens=0, seconds=0.0,
        )  # fmt: skip

    found = val_metrics({"a": summary(1.0, 4, num_failed=1), "b": summary(0.0, 1), "c": summary(None, 2, num_failed=2)})
    assert found == {"val_reward/mean": 0.75, "val_reward/a": 1.0, "val_reward/b": 0.0}
    assert val_metrics({"c": summary(None, 2, num_failed=2)}) == {}


def test_an_evaluation_without_data_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="'words' has nothing to evaluate on: 5 examples, skip_first = 5"):
        Bench(tmp_path, eval={"env": [{"id": "words", "skip_first": 5}]})
