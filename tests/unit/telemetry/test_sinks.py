"""Trackers get a run's metrics. Each is tried with its own library, offline; those that are not installed are skipped."""

import logging
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trivet.config.check_files import file_problems
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.shared import (
    MlflowConfig,
    OpenTelemetryConfig,
    RunIdentity,
    SteppingRoleConfig,
    TensorBoardConfig,
    TrackingConfig,
    TrackioConfig,
)
from trivet.errors import ConfigError
from trivet.telemetry import sinks
from trivet.telemetry.sinks import Sink, SinkFeed
from trivet.telemetry.telemetry import Telemetry


def write_steps(directory: Path, tracking: TrackingConfig, *, steps: Sequence[int], role="trainer", resume_step=0) -> None:
    """Write steps in one attempt of the run, each with the loss `step / 4`."""
    telemetry = Telemetry(
        role,
        SteppingRoleConfig(output_dir=directory, run=RunIdentity(id="abc", attempt=1 + resume_step), tracking=tracking),
        resume_step=resume_step,
    )
    for step in steps:
        telemetry.write_step(step, {"loss/mean": step / 4, "time/wait": 0.5, "time/step": 2.0, "kl": float("nan")})
    if role == "orchestrator":
        telemetry.write_eval(2, {"eval/words/avg@2": 0.75})
    telemetry.close()


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="in the group dev")
    tracking = TrackingConfig(tensorboard=TensorBoardConfig())
    write_steps(tmp_path, tracking, steps=[1, 2, 3])
    write_steps(tmp_path, tracking, steps=[3, 4], resume_step=2)
    read = events.EventAccumulator(str(tmp_path / "tensorboard" / "trainer"))
    read.Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("trainer/loss/mean")] == [
        (step, step / 4) for step in (1, 2, 3, 4)
    ]
    assert "trainer/kl" not in read.Tags()["scalars"]


def test_a_resumed_run_goes_on_in_its_run_of_mlflow(tmp_path: Path):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed: 40 MB that one test needs")
    tracking = TrackingConfig(mlflow=MlflowConfig(experiment="e", name="n"))
    write_steps(tmp_path, tracking, steps=[1, 2])
    write_steps(tmp_path, tracking, steps=[3], resume_step=2)
    write_steps(tmp_path, tracking, steps=[1], role="orchestrator")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert sorted((run.info.run_name, run.info.status) for run in runs) == [
        ("n-orchestrator", "FINISHED"),
        ("n-trainer", "FINISHED"),
    ]
    ids = {run.info.run_name: run.info.run_id for run in runs}
    history = client.get_metric_history(ids["n-trainer"], "trainer/loss/mean")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [metric.step for metric in client.get_metric_history(ids["n-orchestrator"], "eval/words/avg_2")] == [2]


def test_a_resumed_run_goes_on_in_its_run_of_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip(
        "trackio", reason="the extra trackio is not installed: it asks for an older pillow than the suite has"
    )
    tracking = TrackingConfig(trackio=TrackioConfig(project="p", name="n"))
    write_steps(tmp_path, tracking, steps=[1, 2])
    write_steps(tmp_path, tracking, steps=[3], resume_step=2)
    write_steps(tmp_path, tracking, steps=[1], role="orchestrator")
    assert sorted(run.name for run in trackio.Api().runs("p")) == ["n-orchestrator", "n-trainer"]
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    assert [row["step"] for row in storage.get_logs("p", "n-trainer")] == [1, 2, 3]


class Collector(BaseHTTPRequestHandler):
    """Keeps the bodies of requests by their path."""

    bodies: dict[str, list[bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.setdefault(self.path, []).append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, dict[str, list[bytes]]]]:
    handler = type("Handler", (Collector,), {"bodies": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.bodies
        server.shutdown()
        thread.join()


def test_a_collector_gets_the_numbers_of_each_step_and_a_span_with_its_parts(tmp_path: Path, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason="vLLM brings it")
    traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="vLLM brings it")
    url, bodies = collector
    write_steps(tmp_path, TrackingConfig(opentelemetry=OpenTelemetryConfig(endpoint=url)), steps=[1, 2])
    resources = [
        resource
        for body in bodies["/v1/metrics"]
        for resource in metrics.ExportMetricsServiceRequest.FromString(body).resource_metrics
    ]
    losses = [
        metric.gauge.data_points[0].as_double
        for resource in resources
        for metric in resource.scope_metrics[0].metrics
        if metric.name == "trainer/loss/mean"
    ]
    assert losses[:2] == [0.25, 0.5]
    names = {attribute.key: attribute.value.string_value for attribute in resources[0].resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("trivet", "abc/trainer")
    spans = [
        span
        for body in bodies["/v1/traces"]
        for resource in traces.ExportTraceServiceRequest.FromString(body).resource_spans
        for span in resource.scope_spans[0].spans
    ]
    whole, part = (next(span for span in spans if span.name == name) for name in ("trainer step", "wait"))
    assert part.parent_span_id == whole.span_id
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == 2_000_000_000
    assert (part.start_time_unix_nano, part.end_time_unix_nano - part.start_time_unix_nano) == (
        whole.start_time_unix_nano,
        500_000_000,
    )


class Scripted(Sink):
    """Waits for `may_go` at the first step, and fails in each."""

    def __init__(self) -> None:
        self.may_go, self.steps = threading.Event(), list[int]()

    def write(self, step, values, *, time) -> None:
        self.may_go.wait()
        self.steps.append(step)
        raise RuntimeError("the service is down")


def test_a_tracker_that_hangs_and_fails_stops_no_step_and_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(sinks, "_CLOSE_TIMEOUT_S", 0.01)
    sink = Scripted()
    feed = SinkFeed("tracking.x", lambda: sink, role="trainer", is_first_attempt=True)
    with caplog.at_level(logging.WARNING):
        for step in range(2 * sinks._MAX_QUEUED):
            feed.write_step(step, {"loss/mean": 1.0})
        feed.close()
        sink.may_go.set()
        monkeypatch.setattr(sinks, "_CLOSE_TIMEOUT_S", 20)
        feed.close()
    assert sink.steps[: sinks._MAX_QUEUED] == list(range(sinks._MAX_QUEUED))
    assert len(sink.steps) < 2 * sinks._MAX_QUEUED
    assert [record.getMessage() for record in caplog.records] == [
        "[tracking.x] misses metrics, metrics/ has them: it is 256 steps behind; the run goes on without further warnings"
    ]


def test_a_tracker_that_refuses_to_start_ends_a_new_run_and_not_one_that_goes_on(caplog):
    def refuse() -> Sink:
        raise ValueError("no login")

    with pytest.raises(ConfigError, match=r"^\[wandb\] cannot start: ValueError: no login$"):
        SinkFeed("wandb", refuse, role="trainer", is_first_attempt=True)
    with caplog.at_level(logging.WARNING):
        feed = SinkFeed("wandb", refuse, role="trainer", is_first_attempt=False)
        feed.write_step(1, {"loss/mean": 1.0})
        feed.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_package_that_a_tracker_needs_and_that_is_absent_is_named_before_the_start(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = EvalConfig(tracking=TrackingConfig(mlflow=MlflowConfig()))
    assert list(file_problems(config)) == [
        "[tracking.mlflow] needs a package that is not installed: `uv pip install mlflow-skinny`, or remove the section"
    ]
