"""Serves the numbers of the last step over HTTP, in the text form of Prometheus. Opened by the trainer's telemetry on rank 0.

Must never hold up a step: a step leaves its numbers here, and threads of the server's own answer whoever asks.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from trivet.config.schema.shared import MetricsServerConfig
from trivet.errors import ConfigError

logger = logging.getLogger(__name__)

GAUGES: dict[str, tuple[str, str]] = {
    "loss/mean": ("trainer_loss", "Loss of the last step"),
    "entropy/mean": ("trainer_entropy", "Mean entropy of the loss tokens, nats"),
    "mismatch_kl/mean": ("trainer_mismatch_kl", "Mean divergence between sampler and trainer, nats"),
    "optim/grad_norm": ("trainer_grad_norm", "Gradient norm before clipping"),
    "optim/lr": ("trainer_learning_rate", "Learning rate"),
    "perf/throughput": ("trainer_throughput_tokens_per_sec", "Tokens trained per second"),
    "perf/mfu": ("trainer_mfu_percent", "Share of the devices' peak, percent"),
    "perf/peak_memory": ("trainer_peak_memory_gib", "Peak memory of the main rank, GiB"),
}
"""Gauge and its help, by the metric it shows. Names: prime-rl's trainer of early 2026."""

_POLL_INTERVAL_S = 0.05
"""Seconds between two looks whether the server should end: `close` waits that long at most."""


class _LastStep(Collector):
    """Hands over finished numbers. A `Gauge` would keep its own, in files where PROMETHEUS_MULTIPROC_DIR is set for vLLM."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class MetricsServer:
    """Answers with the gauges of the last step."""

    def __init__(self, config: MetricsServerConfig, *, clock: Callable[[], float] = lambda: time.time()) -> None:
        """Listen, and answer in threads from now on.

        Raises:
            ConfigError: the port is taken, or the host is none of this machine's.
        """
        self._clock = clock
        self._text = b""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers = {"/metrics": server._text, "/health": b"ok\n"}
                body = answers.get(self.path.partition("?")[0])
                self.send_response(HTTPStatus.OK if body is not None else HTTPStatus.NOT_FOUND)
                body = body if body is not None else b"GET /metrics or /health\n"
                self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                logger.debug("metrics server: %s", format % args)

        try:
            self._http = ThreadingHTTPServer((config.host, config.port), Handler)
        except OSError as exc:
            raise ConfigError(
                f"metrics_server cannot listen on {config.host}:{config.port}: {exc.strerror or exc}; set metrics_server.port to "
                "a free port (0 takes any) and metrics_server.host to an address of this machine"
            ) from exc
        self._http.daemon_threads = True
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": _POLL_INTERVAL_S}, name="metrics-server", daemon=True
        )
        self._thread.start()
        self._is_open = True
        logger.info("metrics server url=http://%s:%s/metrics", config.host, self.port)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._http.server_address[1])

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Answer with the metrics of `step` until the next call. One that does not exist in it is absent, as in metrics/."""
        shown = {
            "trainer_step": ("Last finished step", float(step)),
            "trainer_last_step_timestamp_seconds": ("When the last step was finished, Unix seconds", self._clock()),
            **{name: (help_text, values[metric]) for metric, (name, help_text) in GAUGES.items() if metric in values},
        }
        finite = [
            GaugeMetricFamily(name, help_text, value) for name, (help_text, value) in shown.items() if math.isfinite(value)
        ]
        registry = CollectorRegistry()
        registry.register(_LastStep(finite))
        self._text = generate_latest(registry)

    def close(self) -> None:
        """Free the port. May be called again."""
        if self._is_open:
            self._is_open = False
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()
