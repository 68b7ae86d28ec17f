"""``/metrics``, in Prometheus's text: what clients asked and how that went, and what the engine says of itself."""

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
    "waiting": "Requests that wait for their turn",
    "memory_held_bytes": "Bytes that MLX holds, freed memory that it keeps for reuse included, as budgets count them",
    "memory_peak_bytes": "The most of them",
}
"""What the service's state says of the process, where it does."""

OF_MODELS = {
    "memory_bytes": "Bytes of a loaded model's plan",
    "sweeps": "Passes over the weights",
    "bytes_read": "Bytes of weights read from the disk",
    "tokens": "Tokens generated",
    "drafted": "Tokens drafted",
    "accepted": "Drafted tokens that stayed",
}
"""Of each loaded model, under ``models``."""

OF_CONNECTIONS = {
    "turned_away": "Connections that there was no room for",
    "dropped": "Connections that made room for others",
    "late": "Connections closed because of a time-out",
}


class ServerMetrics(Collector, Observer):
    """What is counted here, and where the rest is asked for."""

    def __init__(self, site: Site) -> None:
        self._site, self._registry = site, CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self._requests = Counter("outcore_requests", "Requests answered", ("route", "status"), **own)
        self._prompt_tokens = Counter("outcore_prompt_tokens", "Tokens of prompts answered", **own)
        text = "Of those, tokens that were not computed again"
        self._cached_tokens = Counter("outcore_prompt_tokens_cached", text, **own)
        text = "Seconds from a request to the first of its answer"
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
        """The page, in the form of Prometheus or, where that is accepted, of OpenMetrics."""
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
