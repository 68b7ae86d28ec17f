"""What all addresses of a server share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .delivery import Delivery
from .endpoint import Api, Defaults
from .exchange import RequestError, Service
from .json_body import Bodies
from .limits import ClientLimits, ConnectionGate
from .metrics import ServerMetrics
from .responses import Errors, error_response

__all__ = ["Site"]

RETRY_S = 5.0
"""Seconds after which a client may ask again: by then another server may be there."""


class Site:
    """One server's state.

    Args:
        apis: the first one's words are those of errors that belong to none.
        clock: seconds, by which clients are late.

    Attributes:
        closing: no request is answered any more, but those under way.
        under_way: requests that were begun and not yet answered; ``deliveries`` are those that a model answers.
        answered: requests, errors among them.
    """

    def __init__(
        self,
        service: Service,
        apis: Sequence[Api],
        limits: ClientLimits | None = None,
        defaults: Defaults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service, self.apis = service, tuple(apis)
        self.limits, self.defaults = limits or ClientLimits(), defaults or Defaults()
        self.errors = Errors(self.apis)
        self.gate = ConnectionGate(self.limits, self._refusal, clock)
        self.bodies = Bodies(self.limits)
        self.metrics = ServerMetrics(service, self.gate)
        self.closing = False
        self.under_way = 0
        self.answered = 0
        self.deliveries: set[Delivery] = set()

    def check_open(self) -> None:
        """Refuse requests while the server shuts down.

        Raises:
            RequestError: it does (503).
        """
        if self.closing:
            raise shutting_down()

    def end_all(self) -> None:
        """End the answers under way, each with an error."""
        for delivery in self.deliveries:
            delivery.end(shutting_down())

    def _refusal(self, path: str | None, status: int, message: str) -> bytes:
        error = RequestError(message, "connection", status=status)
        return bytes(error_response(self.errors.api(path or "/", {}), error).body)


def shutting_down() -> RequestError:
    """What a request is told that comes too late, or takes too long then."""
    return RequestError("the server is shutting down", "shutting_down", status=503, retry_after=RETRY_S)
