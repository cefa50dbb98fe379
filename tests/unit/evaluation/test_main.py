"""Evaluate policies one after the other over scripted environments, on fake servers over real sockets."""

import asyncio
import json
import shutil
from contextlib import contextmanager
from io import StringIO
from typing import NamedTuple

import pytest
from rich.console import Console

from support.fake_inference import FakeInference
from support.http_fake import serve_fake
from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.evaluation import EvalConfig, EvalRetryConfig
from trivet.errors import ConfigError, RolloutFailed
from trivet.evaluation.main import evaluate_targets
from trivet.evaluation.plan import check_servers, make_plan, require_resumable
from trivet.evaluation.results import read_summary
from trivet.evaluation.scores import Summary
from trivet.evaluation.servers import connect
from trivet.weights.manifest import read_manifest
from trivet.weights.publish import publish
from trivet.weights.retention import LiveReaders
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.rollouts import Rollout


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr("trivet.evaluation.plan.require_environment", lambda env: None)


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path / "run")
    for version in (1, 2, 4):
        publish_policy(layout, version)
    layout.readers.mkdir()
    return layout


def publish_policy(layout, version, **files):
    def write(path):
        (path / "model.safetensors").write_bytes(bytes([version]))
        for name, text in files.items():
            (path / f"{name}.json").write_text(text)

    publish(layout, version=version, run_id="run", write=write)


class Pool:
    """Environments whose reward is half of the server's version. They record their calls."""

    def __init__(self, fake, *, fails=None, on_group=lambda request: None):
        self.fake, self.fails, self.on_group, self.asked = fake, dict(fails or {}), on_group, []
        self.infos = {name: EnvironmentInfo(num_examples=3, num_eval_examples=6) for name in ("a", "b")}

    async def run(self):
        await asyncio.Event().wait()

    async def run_group(self, request):
        self.asked.append((self.fake.version, request.env, request.example_id))
        self.on_group(request)
        await asyncio.sleep(0)
        if self.fails.get(request.example_id, 0) > 0:
            self.fails[request.example_id] -= 1
            raise RolloutFailed("boom")
        return [Rollout(index=i, reward=self.fake.version / 2, counted_tokens=7) for i in range(request.num_rollouts)]


@contextmanager
def served(fake=None):
    fake = fake or FakeInference()
    with serve_fake(fake) as url:
        yield fake, url


def config_for(url, layout, **changes):
    fields = {"weights_dir": layout.weights, "env": [EvalEnvConfig(id="a")], "num_examples": 3, "use_tqdm": False}
    fields["client"] = {"base_url": [url], "wait_for_ready_timeout": 5.0}
    fields["retry"] = EvalRetryConfig(wait_min=0.0, wait_max=0.0)
    return EvalConfig.model_validate(fields | changes)


class Evaluation(NamedTuple):
    exit_code: int
    summaries: list[Summary]
    """By policy and environment."""
    scores: dict[int, dict[str, float]]
    """The metrics of each policy."""
    model_name: str
    shown: str


def evaluate(config, pool):
    scores, out = {}, StringIO()

    async def scenario():
        plan = make_plan(config, environ={})
        servers = await connect(plan.client, environ={}, weights_dir=config.weights_dir)
        try:
            name, base_digest = await check_servers(plan, servers)
            require_resumable(plan, pool, base_digest=base_digest)
            exit_code = await evaluate_targets(plan, servers, pool, Console(file=out), scores.__setitem__)
        finally:
            await servers.aclose()
        paths = [plan.layout.evals_step(step, env.label) for step in scores for env in plan.envs]
        return Evaluation(exit_code, [found for path in paths if (found := read_summary(path))], scores, name, out.getvalue())

    return asyncio.run(scenario())


def everything_in(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_each_policy_is_measured_on_the_server_that_holds_it(layout):
    with served() as (fake, url):
        pool = Pool(fake, on_group=lambda request: needed.append(LiveReaders(layout).versions()))
        needed = []
        evaluation = evaluate(config_for(url, layout, rollouts_per_example=2), pool)
    assert [(one.step, one.avg, one.completion_tokens) for one in evaluation.summaries] == [
        (0, 0.0, 42),
        (1, 0.5, 42),
        (2, 1.0, 42),
        (4, 2.0, 42),
    ]
    assert (evaluation.exit_code, evaluation.model_name, fake.version) == (0, "fake-model", 0)
    assert [summary.digest for summary in evaluation.summaries][1:] == [
        read_manifest(layout.weights_step(step)).digest for step in (1, 2, 4)
    ]
    assert evaluation.scores[4]["eval/a/avg@2"] == 2.0
    assert [list(versions.values()) for versions in needed] == [[step] for step in (0, 1, 2, 4) for _ in range(3)]
    assert LiveReaders(layout).versions() == {}
    assert "base │ a" in evaluation.shown
    lines = [json.loads(line) for line in (layout.evals_step(4, "a") / "results.jsonl").read_text().splitlines()]
    assert [(line["example_id"], line["index"], line["reward"]) for line in lines] == [
        (e, i, 2.0) for e in range(3) for i in (0, 1)
    ]


def test_environments_are_measured_side_by_side_each_with_its_own_numbers_and_steps(layout):
    envs = [EvalEnvConfig(id="a", num_examples=2, skip_first=4), EvalEnvConfig(id="b", rollouts_per_example=3, interval=2)]
    with served() as (fake, url):
        pool = Pool(fake)
        evaluation = evaluate(config_for(url, layout, env=envs, eval_base=False, max_concurrent=3), pool)
    assert [(one.step, one.env, one.num_examples, one.rollouts_per_example) for one in evaluation.summaries] == [
        (1, "a", 2, 1),
        (2, "a", 2, 1),
        (2, "b", 3, 3),
        (4, "a", 2, 1),
        (4, "b", 3, 3),
    ]
    assert [example for _, env, example in pool.asked if env == "a"] == [4, 5, 4, 5, 4, 5]


def test_an_example_that_fails_is_tried_again_and_then_counted(layout):
    with served() as (fake, url):
        evaluation = evaluate(config_for(url, layout, steps=[2], eval_base=False), Pool(fake, fails={0: 2, 1: 99}))
    [summary] = evaluation.summaries
    assert (summary.num_failed, summary.first_error, summary.avg) == (1, "RolloutFailed: boom", 1.0)


def test_with_reraise_the_first_example_that_fails_ends_it_and_the_server_is_put_back(layout):
    retry = EvalRetryConfig(max_attempts=1, reraise=True)
    with served() as (fake, url), pytest.raises(ExceptionGroup) as failed:
        evaluate(config_for(url, layout, retry=retry), Pool(fake, fails={1: 1}))
    assert failed.group_contains(RolloutFailed, match="boom")
    assert fake.version == 0


def test_what_was_cut_short_goes_on_with_what_is_left_and_what_failed(layout):
    with served() as (fake, url):
        evaluate(config_for(url, layout, steps=[2]), Pool(fake, fails={1: 99}))
        shutil.rmtree(layout.evals_step(2, "a"))
        pool = Pool(fake)
        evaluation = evaluate(config_for(url, layout, steps=[2], resume_path=layout.root), pool)
        assert pool.asked == [(0, "a", 1), (2, "a", 0), (2, "a", 1), (2, "a", 2)]
        assert [summary.num_failed for summary in evaluation.summaries] == [0, 0]
        for path in (layout.evals, layout.evals_step(2, "a"), layout.evals_step(2, "a") / "results.jsonl"):
            again = Pool(fake)
            evaluate(config_for(url, layout, steps=[2], resume_path=path), again)
            assert again.asked == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollouts_per_example": 5}, "rollouts_per_example was 1 and is 5 now"),
        ({"sampling": {"temperature": 0.5}}, "sampling was .* and is .*temperature=0.5.* now"),
        (
            {"env": [EvalEnvConfig(id="b")]},
            r"none of the evaluations asked for; in .* there are: evals/step_0/a, evals/step_1/a",
        ),
    ],
)
def test_results_of_another_evaluation_are_refused_and_stay_as_they_are(layout, changes, said):
    with served() as (fake, url):
        evaluate(config_for(url, layout, steps=[1]), Pool(fake))
        before = everything_in(layout.root)
        with pytest.raises(ConfigError, match=said):
            evaluate(config_for(url, layout, steps=[1], resume_path=layout.root, **changes), Pool(fake))
        with pytest.raises(ConfigError, match=r"resume_path .* holds no evaluation"):
            evaluate(config_for(url, layout, resume_path=layout.weights), Pool(fake))
    assert everything_in(layout.root) == before
    assert fake.version == 0


def test_results_of_another_run_are_refused_and_stay_as_they_are(layout, tmp_path):
    other = RunLayout(tmp_path / "other")
    publish_policy(other, 1, note="another run")
    with served() as (fake, url):
        evaluate(config_for(url, layout, steps=[1]), Pool(fake))
        before = everything_in(tmp_path)
        with pytest.raises(ConfigError, match=r"holds results of another evaluation: digest was \w+ and is \w+ now"):
            evaluate(config_for(url, other, steps=[1], resume_path=layout.root), Pool(fake))
        foreign = tmp_path / "foreign" / "evals" / "step_1" / "a"
        foreign.mkdir(parents=True)
        (foreign / "results.jsonl").write_text("{}\n")
        with pytest.raises(ConfigError, match=r"results.jsonl was not written by `uv run eval`"):
            evaluate(config_for(url, layout, steps=[1], resume_path=tmp_path / "foreign"), Pool(fake))
    (foreign / "results.jsonl").unlink()
    assert everything_in(tmp_path) == before


def test_results_of_another_evaluation_are_replaced_only_without_resume_path_and_that_is_said(layout, caplog):
    with served() as (fake, url):
        evaluate(config_for(url, layout, steps=[1]), Pool(fake))
        evaluation = evaluate(config_for(url, layout, steps=[1], num_examples=2), Pool(fake))
    assert [summary.num_examples for summary in evaluation.summaries] == [2, 2]
    assert caplog.text.count("results of another evaluation in") == 2


def test_an_adapter_of_another_base_is_refused_before_anything_is_written(layout, tmp_path):
    publish_policy(layout, 5, adapter_config='{"base_model_name_or_path": "other/base"}')
    before = everything_in(layout.root)
    said = r"step_5 is an adapter for other/base, and the server serves fake-model"
    with served() as (fake, url), pytest.raises(ConfigError, match=said):
        evaluate(config_for(url, layout), Pool(fake))
    assert everything_in(layout.root) == before
    assert [path for _, path, _ in fake.requests if path == "/update_weights"] == []


def test_weights_that_the_server_refuses_are_found_before_anything_is_written(layout):
    (layout.weights_step(1) / "model.safetensors").write_bytes(b"altered")
    before = everything_in(layout.root)
    with served() as (fake, url), pytest.raises(ConfigError, match=r"409: .*model\.safetensors"):
        evaluate(config_for(url, layout), Pool(fake))
    assert everything_in(layout.root) == before


@pytest.mark.parametrize(
    ("asked", "of_the_run", "said"),
    [
        ("none/such", None, r"model\.name \(none/such\) is not served by http.*, which serves: fake-model"),
        (None, "the/start", r"started from the/start, and http.* serves fake-model; .* add --model\.name fake-model if"),
    ],
)
def test_a_model_that_is_not_served_is_refused(layout, asked, of_the_run, said):
    if of_the_run:
        layout.configs.mkdir()
        (layout.configs / "trainer.toml").write_text(f'model.name = "{of_the_run}"\n')
    with served() as (fake, url):
        with pytest.raises(ConfigError, match=said):
            evaluate(config_for(url, layout, model={"name": asked}), Pool(fake))
        evaluate(config_for(url, layout, model={"name": "fake-model"}), Pool(fake))


def test_without_environments_and_without_a_run_that_names_some_it_is_refused(layout):
    with pytest.raises(ConfigError, match=r"no environment to evaluate on .*: add --env\.id ID"):
        make_plan(config_for("http://x", layout, env=[]), environ={})


def test_a_policy_that_is_removed_meanwhile_is_left_out_and_counted(layout, caplog):
    with served() as (fake, url):
        pool = Pool(fake, on_group=lambda request: shutil.rmtree(layout.weights_step(2), ignore_errors=True))
        evaluation = evaluate(config_for(url, layout), pool)
    assert [summary.step for summary in evaluation.summaries] == [0, 1, 4]
    assert evaluation.exit_code == 1
    assert "was removed before it could be evaluated" in caplog.text


def test_a_policy_that_comes_while_another_is_evaluated_is_evaluated_too(layout):
    def publish_once(request):
        if not layout.weights_step(5).exists():
            publish_policy(layout, 5)

    with served() as (fake, url):
        config = config_for(url, layout, watcher=True, steps=[4, 5], eval_base=False)
        evaluation = evaluate(config, Pool(fake, on_group=publish_once))
    assert [(summary.step, summary.avg) for summary in evaluation.summaries] == [(4, 2.0), (5, 2.5)]
