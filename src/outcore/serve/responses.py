"""Answers of JSON, and errors in the words of the API that a path belongs to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from .endpoint import JSON, Api, Endpoint, Route, encoded
from .exchange import RequestError

__all__ = ["IGNORED", "Errors", "addresses", "error_response", "ignored_header", "json_response"]

IGNORED = "x-outcore-ignored"
"""The header that names fields of a request that say nothing here."""


class Errors:
    """Knows which API's words an error is told in."""

    def __init__(self, apis: Sequence[Api]) -> None:
        self.apis = apis

    def api(self, path: str, headers: Mapping[str, str]) -> Api:
        """That one which has the path, or else most of its beginning; of several, that whose header is there."""

        def likeness(api: Api) -> tuple[int, bool]:
            shared = max((_shared(path, there.path) for there in addresses(api)), default=0)
            return shared, api.header is not None and api.header in headers

        return max(self.apis, key=likeness)

    def response(self, path: str, headers: Mapping[str, str], error: RequestError) -> Response:
        """The answer that tells of an error at a path."""
        return error_response(self.api(path, headers), error)


def error_response(api: Api, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer that tells of an error in an API's words; with further ``headers``."""
    sent = dict(headers or {})
    if error.retry_after is not None:
        sent["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        sent["www-authenticate"] = "Bearer"
    return Response(encoded(api.error_body(error)), error.status, sent, media_type=JSON)


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON."""
    return Response(encoded(value), 200, headers, media_type=JSON)


def ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """The header that names them, if there are any; names are the client's, so not all that they hold may be sent."""
    named = ", ".join(quote(f[:60], safe="_.-[]/") for f in fields[:20])
    return {IGNORED: named} if named else {}


def addresses(api: Api) -> list[Endpoint | Route]:
    """All that it answers."""
    return [*api.endpoints, *api.routes]


def _shared(path: str, known: str) -> int:
    """Segments that two paths begin with; a parameter is any."""
    count = 0
    for a, b in zip(path.strip("/").split("/"), known.strip("/").split("/"), strict=False):
        if a != b and not b.startswith("{"):
            break
        count += 1
    return count
