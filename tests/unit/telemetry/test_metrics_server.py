"""Prometheus gets the last step's numbers over a real socket, in a form that its own parser reads."""

import os
import socket
import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.processes import find_free_port
from trivet.config.schema.shared import MetricsServerConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError
from trivet.telemetry.metrics_server import MetricsServer
from trivet.telemetry.telemetry import Telemetry


@pytest.fixture
def server():
    server = MetricsServer(MetricsServerConfig(port=0), clock=lambda: 1234.5)
    yield server
    server.close()


def read(server: MetricsServer) -> dict[str, float]:
    answer = httpx.get(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": "text/plain"})
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.type == "gauge" and family.documentation for family in families)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_gauges_are_those_of_the_last_step_that_are_numbers_and_none_before_it(server):
    assert read(server) == {}
    assert httpx.get(f"http://127.0.0.1:{server.port}/health").status_code == 200
    server.update(1, {"loss/mean": 9.0})
    server.update(2, {"loss/mean": 0.25, "optim/lr": 1e-6, "perf/mfu": float("nan"), "reward/mean": 1.0})
    assert read(server) == {
        "trainer_step": 2.0,
        "trainer_last_step_timestamp_seconds": 1234.5,
        "trainer_loss": 0.25,
        "trainer_learning_rate": 1e-6,
    }


def test_a_port_that_is_taken_is_named_with_the_key_that_changes_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use; set metrics_server.port"):
            MetricsServer(MetricsServerConfig(port=port))


def test_the_port_is_free_again_once_telemetry_is_closed(tmp_path):
    port = find_free_port()
    for step in (1, 2):
        telemetry = Telemetry("trainer", TrainerConfig(output_dir=tmp_path, metrics_server=MetricsServerConfig(port=port)))
        telemetry.write_step(step, {"time/step": 2.0, "loss/mean": 0.5})
        assert f"trainer_step {step}.0" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
        telemetry.close()
        telemetry.close()


def test_a_variable_that_is_meant_for_vllm_does_not_end_the_training(tmp_path):
    program = (
        "from trivet.config.schema.shared import MetricsServerConfig\n"
        "from trivet.telemetry.metrics_server import MetricsServer\n"
        "server = MetricsServer(MetricsServerConfig(port=0))\n"
        "server.update(1, {'loss/mean': 0.5})\n"
        "server.close()\n"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
