"""``/metrics``, in Prometheus's text: what clients asked and how that went, and what the engine says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .connection import ConnectionGate
from .events import Event, Finished, Service

FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)

OF_MODELS = {
    "sweeps": "Passes over the weights",
    "bytes_read": "Bytes of weights read from the disk",
    "tokens": "Tokens generated",
    "drafted": "Tokens drafted",
    "accepted": "Drafted tokens that stayed",
}
"""Counters that the service's state has of each loaded model, under ``models``; those that it has not are left out."""

OF_MEMORY = {
    "memory_held_bytes": "Bytes that MLX holds, freed memory that it keeps for reuse included, as budgets count them",
    "memory_peak_bytes": "The most of them",
}
"""What the service's state says of the process, where it does."""


class ServerMetrics:
    """What is counted here, and where the rest is asked for."""

    def __init__(self, service: Service, gate: ConnectionGate) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self.requests = Counter("outcore_requests", "Requests answered", ("route", "status"), **own)
        self.prompt_tokens = Counter("outcore_prompt_tokens", "Tokens of prompts answered", **own)
        text = "Of those, tokens that were not computed again"
        self.cached_tokens = Counter("outcore_prompt_tokens_cached", text, **own)
        text = "Seconds from a request to the first of its answer"
        self.first_token = Histogram("outcore_first_token_seconds", text, buckets=FIRST_TOKEN_S, **own)
        self._registry.register(_Engine(service, gate))

    def event(self, event: Event) -> None:
        """Count what an event says."""
        if isinstance(event, Finished):
            self.prompt_tokens.inc(event.prompt_tokens)
            self.cached_tokens.inc(event.cached_tokens)

    def response(self, accept: str) -> Response:
        """The page, in the form of Prometheus or, where that is accepted, of OpenMetrics."""
        encode, media_type = choose_encoder(accept)
        return Response(encode(self._registry), headers={"content-type": media_type})


class Counted:
    """ASGI middleware that counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # What a client calls its path is not counted by: there is no end of those.
                route = getattr(scope.get("endpoint"), "path", "none")
                self.metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counting if scope["type"] == "http" else send)


class _Engine(Collector):
    def __init__(self, service: Service, gate: ConnectionGate) -> None:
        self._service, self._gate = service, gate

    def collect(self) -> Iterable[Metric]:
        state, gate = self._service.state(), self._gate
        yield GaugeMetricFamily("outcore_running", "Answers being generated", state.get("running", 0))
        yield GaugeMetricFamily("outcore_waiting", "Requests that wait for their turn", state.get("waiting", 0))
        for name, text, value in (
            ("turned_away", "Connections that there was no room for", gate.turned_away),
            ("dropped", "Connections that made room for others", gate.dropped),
            ("late", "Connections closed because of a time-out", gate.late),
        ):
            yield CounterMetricFamily(f"outcore_connections_{name}", text, value)
        models: Mapping[str, Mapping[str, Any]] = state.get("models", {})
        memory = GaugeMetricFamily("outcore_memory_bytes", "Bytes of a loaded model's plan", labels=["model"])
        for model, counters in models.items():
            memory.add_metric([model], counters.get("memory_bytes", 0))
        yield memory
        for name, text in OF_MEMORY.items():
            if name in state:
                yield GaugeMetricFamily(f"outcore_{name}", text, state[name])
        for name, text in OF_MODELS.items():
            family = CounterMetricFamily(f"outcore_{name}", text, labels=["model"])
            for model, counters in models.items():
                if name in counters:
                    family.add_metric([model], counters[name])
            yield family
