"""Sends spans and metrics of each step to a collector of OpenTelemetry, by OTLP over HTTP. Imported only when it is configured."""

import re
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from trivet.config.schema.shared import OpenTelemetryConfig
from trivet.telemetry.sinks import Sink

_NOT_IN_NAMES = re.compile(r"[^\w\-./]")
"""Characters that OpenTelemetry allows in no name of a metric."""
_NANOSECONDS = 10**9
_TIMEOUT_S = 10
"""Longest time for one delivery, seconds."""


class OpenTelemetrySink(Sink):
    """Sends one role's steps."""

    def __init__(self, config: OpenTelemetryConfig, *, role: str, run_id: str) -> None:
        """Connect to nobody yet: a collector that is down loses numbers, and no error follows."""
        url = config.endpoint.rstrip("/")
        names = {"service.name": config.service_name, "service.instance.id": f"{run_id}/{role}", "trivet.role": role}
        resource = Resource.create(names)
        self._role = role
        # Spans and metrics are delivered after each step, by `force_flush`, so the reader's own interval does not matter.
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/v1/metrics", timeout=_TIMEOUT_S), float("inf"))
        self._metrics = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter: Meter = self._metrics.get_meter("trivet")
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces", timeout=_TIMEOUT_S)))

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        """Send a gauge for each metric. If the role measured the step's duration, send a span with its parts too."""
        self._meter.create_gauge(f"{self._role}/step").set(step)
        for name, value in values.items():
            self._meter.create_gauge(_NOT_IN_NAMES.sub("_", name)).set(value)
        prefix = f"{self._role}/time/"
        durations = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        if (whole := durations.pop("step", None)) is not None:
            self._write_spans(step, whole, durations, end=round(time * _NANOSECONDS))
        self._metrics.force_flush()
        self._spans.force_flush()

    def close(self) -> None:
        """Deliver what is left."""
        self._spans.shutdown()
        self._metrics.shutdown()

    def _write_spans(self, step: int, whole: float, parts: Mapping[str, float], *, end: int) -> None:
        """Add a span for the step, and one for each part in the order of measuring. A part begins where the one before ended.

        Args:
            whole, parts: durations in seconds.
            end: end of the step, Unix nanoseconds.
        """
        tracer = self._spans.get_tracer("trivet")
        begin = end - round(whole * _NANOSECONDS)
        span = tracer.start_span(f"{self._role} step", start_time=begin, attributes={"trivet.step": step})
        context = trace.set_span_in_context(span)
        for name, duration in parts.items():
            part_end = min(end, begin + round(duration * _NANOSECONDS))
            tracer.start_span(name, context=context, start_time=begin).end(part_end)
            begin = part_end
        span.end(end)
