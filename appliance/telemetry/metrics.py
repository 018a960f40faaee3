"""Everything that `/metrics` shows, in one registry of this daemon."""

from __future__ import annotations

from prometheus_client import GC_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from inferd.appliance.memory.planner import MemoryPlanner
from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.appliance.telemetry.engines import EngineCollector
from inferd.appliance.telemetry.latency import LatencyMetrics, ModelLatency

HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MEMORY_PARTS = ("weights", "kv", "graphs", "workspace", "sleeping", "other", "free")


class Metrics:
    """No label holds anything that a client wrote: routes are templates, models are those of the library."""

    def __init__(self, supervisor: Supervisor[ServedModel], planner: MemoryPlanner) -> None:
        self._registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, GC_COLLECTOR, EngineCollector(supervisor), MemoryCollector(planner)):
            self._registry.register(collector)
        self._latency = LatencyMetrics(self._registry)
        self._requests = Counter(
            "http_requests", "Requests by route", ("method", "handler", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Until the last byte",
            ("method", "handler"),
            buckets=HTTP_S,
            registry=self._registry,
        )
        self._rejected = Counter(
            "inferd_requests_rejected", "Requests that were not let in", ("reason",), registry=self._registry
        )
        self._incidents = Counter("inferd_incidents", "What went wrong", ("kind",), registry=self._registry)

    def latency_of(self, model: str) -> ModelLatency:
        return self._latency.of_model(model)

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """`handler`: the route's template."""
        self._requests.labels(method, handler, str(status)).inc()
        self._seconds.labels(method, handler).observe(seconds)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def incident(self, kind: str) -> None:
        self._incidents.labels(kind).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class MemoryCollector(Collector):
    """The ledger of main memory, part by part."""

    def __init__(self, planner: MemoryPlanner) -> None:
        self._planner = planner

    def collect(self) -> list[Metric]:
        ledger = self._planner.host_ledger()
        family = GaugeMetricFamily("inferd_memory_bytes", "Who has the memory", labels=("device", "part"))
        for part in MEMORY_PARTS:
            family.add_metric(("host", part), getattr(ledger, part))
        return [family]
