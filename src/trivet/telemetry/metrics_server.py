"""Serves the metrics of the last step over HTTP, in the text format of Prometheus. The trainer's telemetry on rank 0 opens it.

It must never delay a step: a step only stores its metrics here, and threads of the HTTP server answer the requests.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
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
"""Name and help text of each gauge, by the metric that it shows. The names are those of prime-rl's trainer in early 2026."""


class MetricsServer(Collector):
    """Answers with the gauges of the last step; before the first step there are none.

    It is a collector, because a `Gauge` of prometheus_client would store its number in files when PROMETHEUS_MULTIPROC_DIR is set
    for vLLM.
    """

    def __init__(self, config: MetricsServerConfig, *, clock: Callable[[], float] = lambda: time.time()) -> None:
        """Listen, and start to answer in threads.

        Raises:
            ConfigError: the port is in use, or the host is not an address of this machine.
        """
        self._clock = clock
        self._gauges: list[GaugeMetricFamily] = []
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._http, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as exc:
            raise ConfigError(
                f"metrics_server cannot listen on {config.host}:{config.port}: {exc.strerror or exc}; set metrics_server.port to "
                "a free port (0 takes any) and metrics_server.host to an address of this machine"
            ) from exc
        logger.info("metrics server url=http://%s:%s/metrics", config.host, self.port)

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._http.server_port)

    def collect(self) -> Iterable[Metric]:
        """Return the gauges of the last step."""
        return self._gauges

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Answer with the metrics of `step` until the next call. A metric without a finite value in this step is left out."""
        shown = {
            "trainer_step": ("Last finished step", float(step)),
            "trainer_last_step_timestamp_seconds": ("When the last step was finished, Unix seconds", self._clock()),
            **{name: (help_text, values[metric]) for metric, (name, help_text) in GAUGES.items() if metric in values},
        }
        self._gauges = [
            GaugeMetricFamily(name, help_text, value) for name, (help_text, value) in shown.items() if math.isfinite(value)
        ]

    def close(self) -> None:
        """Free the port. May be called again."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()
