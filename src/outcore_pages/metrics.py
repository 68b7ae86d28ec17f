"""``/metrics`` in Prometheus's format: counters of requests, and the state of the engine and its models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from outcore.serve.events import Event, Finished
from outcore.serve.site import Observer, Site

FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)

STATE = {
    "running": "Answers being generated",
    "waiting": "Answers waiting to start",
    "memory_held_bytes": "Bytes that MLX holds, cached memory included, as the budget counts them",
    "memory_peak_bytes": "Peak of outcore_memory_held_bytes",
}
OF_MODELS = {
    "memory_bytes": "Bytes of a loaded model's plan",
    "sweeps": "Forward passes",
    "bytes_read": "Bytes of weights read from disk",
    "tokens": "Tokens generated",
    "drafted": "Tokens proposed by the drafter",
    "accepted": "Proposed tokens that were accepted",
}
OF_CONNECTIONS = {
    "turned_away": "Connections refused at the limit",
    "dropped": "Connections closed to make room for others",
    "late": "Connections closed because of a time-out",
}


class ServerMetrics(Collector, Observer):
    def __init__(self, site: Site) -> None:
        self._site, self._registry = site, CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self._requests = Counter("outcore_requests", "Requests answered", ("route", "status"), **own)
        self._prompt_tokens = Counter("outcore_prompt_tokens", "Tokens of answered prompts", **own)
        self._cached_tokens = Counter("outcore_prompt_tokens_cached", "Cached tokens of answered prompts", **own)
        text = "Seconds from a request to the first text of its answer"
        self._first_token = Histogram("outcore_first_token_seconds", text, buckets=FIRST_TOKEN_S, **own)
        self._registry.register(self)

    def responded(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def happened(self, event: Event, first_s: float | None) -> None:
        if first_s is not None:
            self._first_token.observe(first_s)
        if isinstance(event, Finished):
            self._prompt_tokens.inc(event.prompt_tokens)
            self._cached_tokens.inc(event.cached_tokens)

    def response(self, accept: str) -> Response:
        encode, media_type = choose_encoder(accept)
        return Response(encode(self._registry), headers={"content-type": media_type})

    def collect(self) -> Iterable[Metric]:
        state = self._site.service.state()
        for name, text in STATE.items():
            if name in state:
                yield GaugeMetricFamily(f"outcore_{name}", text, state[name])
        for name, text in OF_CONNECTIONS.items():
            yield CounterMetricFamily(f"outcore_connections_{name}", text, getattr(self._site, name))
        for name, text in OF_MODELS.items():
            kind = GaugeMetricFamily if name == "memory_bytes" else CounterMetricFamily
            family = kind(f"outcore_{name}", text, labels=["model"])
            for model, counters in state.get("models", {}).items():
                family.add_metric([model], counters[name])
            yield family
