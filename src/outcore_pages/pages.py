"""The routes of this package."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from outcore.monitoring.publisher import board
from outcore.serve.site import Site, json_response

from . import page
from .description import described
from .metrics import ServerMetrics


def routes(site: Site) -> Sequence[Route]:
    counted = ServerMetrics(site)
    site.observers.append(counted)

    async def front(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):  # programs that probe for a server send */*
            return page.page()
        return PlainTextResponse("Outcore is running", headers={"Vary": "Accept"})

    async def metrics(request: Request) -> Response:
        return counted.response(request.headers.get("accept", ""))

    async def openapi(_: Request) -> Response:
        return json_response(described(site.apis))

    watched = page.Events(board.snapshot, lambda: site.closing).response
    answers = {"/": front, page.EVENTS: watched, "/metrics": metrics, "/openapi.json": openapi}
    return [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]
