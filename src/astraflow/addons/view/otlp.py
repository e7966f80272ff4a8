"""Sends a run's traces and metrics to a collector with OpenTelemetry's own exporters (OTLP over HTTP).

The extra `otel` installs the libraries. They are imported only when a `Collector` is made.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from astraflow.addons.view.traces import Span
from astraflow.errors import ConfigError, UnavailableError
from astraflow.metrics import MetricRow

__all__ = ["Collector"]

_EXPORTERS = "opentelemetry.exporter.otlp.proto.http"


class Collector:
    """Sends spans and metrics to an OTLP collector.

    Example: `collector = Collector("http://localhost:4318", run="quickstart")`; `collector.send(spans)`;
    `collector.close()`.
    """

    def __init__(self, endpoint: str, *, run: str, headers: Mapping[str, str] | None = None) -> None:
        """Connects to a collector by its base URL. `headers`, such as an API key, are sent with each request.

        Raises: ConfigError if the libraries are not installed.
        """
        # The types are Any because the libraries aren't installed where types are checked.
        try:
            span_exporter: Any = import_module(f"{_EXPORTERS}.trace_exporter")
            metric_exporter: Any = import_module(f"{_EXPORTERS}.metric_exporter")
            self._metrics_sdk: Any = import_module("opentelemetry.sdk.metrics.export")
            self._trace_sdk: Any = import_module("opentelemetry.sdk.trace")
            self._trace: Any = import_module("opentelemetry.trace")
            self._resources_sdk: Any = import_module("opentelemetry.sdk.resources")
            scope: Any = import_module("opentelemetry.sdk.util.instrumentation")
        except ImportError as err:
            raise ConfigError('`astraflow traces` needs packages: pip install "astraflow[otel]"') from err
        self._endpoint = endpoint.rstrip("/")
        self._run = run
        self._scope = scope.InstrumentationScope("astraflow")
        options = {"headers": dict(headers or {})}
        self._spans = span_exporter.OTLPSpanExporter(endpoint=f"{self._endpoint}/v1/traces", **options)
        self._metrics = metric_exporter.OTLPMetricExporter(endpoint=f"{self._endpoint}/v1/metrics", **options)
        self._resources: dict[str, Any] = {}

    def send(self, spans: Sequence[Span]) -> None:
        """Sends spans. Raises: UnavailableError if the collector does not accept them."""
        if spans:
            self._check(self._spans.export([*map(self._span, spans)]), "spans")

    def send_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends lines of `metrics.jsonl` as gauges, such as `astraflow.step.loss`.

        Raises: UnavailableError.
        """
        sdk = self._metrics_sdk
        points: dict[str, list[Any]] = {}
        for row in map(MetricRow.from_flat, rows):
            for name, value in row.values.items():
                if value is not None:
                    points.setdefault(f"astraflow.{row.kind}.{name}", []).append(self._point(row, value))
        metrics = [
            sdk.Metric(name=name, description="", unit="", data=sdk.Gauge(data_points=own))
            for name, own in points.items()
        ]
        if not metrics:
            return
        scopes = [sdk.ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")]
        resource = self._resource("dataflow")
        of_run = sdk.ResourceMetrics(resource=resource, scope_metrics=scopes, schema_url="")
        self._check(self._metrics.export(sdk.MetricsData(resource_metrics=[of_run])), "metrics")

    def close(self) -> None:
        """Closes the connections."""
        self._spans.shutdown()
        self._metrics.shutdown()

    def _check(self, result: Any, what: str) -> None:
        if result.name != "SUCCESS":
            raise UnavailableError(
                f"the collector at {self._endpoint} does not take {what}; is it running, and is this its "
                "address for OTLP over HTTP (port 4318 by default)?"
            )

    def _resource(self, service: str) -> Any:
        if service not in self._resources:
            attributes = {
                "service.name": service,
                "service.namespace": "astraflow",
                "astraflow.run": self._run,
            }
            self._resources[service] = self._resources_sdk.Resource(attributes)
        return self._resources[service]

    def _span(self, span: Span) -> Any:
        codes = self._trace.StatusCode
        return self._trace_sdk.ReadableSpan(
            name=span.name,
            context=self._context(span.trace_id, span.span_id),
            parent=self._context(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=self._resource(span.service),
            attributes={
                name if name.startswith("gen_ai.") else f"astraflow.{name}": value
                for name, value in span.attributes.items()
            },
            instrumentation_scope=self._scope,
            status=self._trace.Status(codes.ERROR if span.is_error else codes.UNSET),
            start_time=round(span.start_s * 1e9),
            end_time=round(span.end_s * 1e9),
        )

    def _context(self, trace_id: int, span_id: int) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)

    def _point(self, row: MetricRow, value: float) -> Any:
        at_ns = round(row.at_s * 1e9)
        attributes: dict[str, str | int] = {"policy": row.policy, "step": row.step}
        if row.eval_set:
            attributes["eval_set"] = row.eval_set
        return self._metrics_sdk.NumberDataPoint(
            attributes=attributes, start_time_unix_nano=at_ns, time_unix_nano=at_ns, value=float(value)
        )
