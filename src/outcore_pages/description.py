"""``/openapi.json``: all routes in OpenAPI 3.1, made from the APIs' tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from outcore.serve.api import Api
from outcore.version import __version__

from .page import EVENTS

PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")

OWN = {
    "/": ("The server's page, or a line of text", "text/plain"),
    "/health": ("Status, and numbers of running and waiting requests", "application/json"),
    "/metrics": ("Metrics in Prometheus's format", "text/plain"),
    EVENTS: ("Snapshots of the server's activity, four a second", "text/event-stream"),
    "/openapi.json": ("This description", "application/json"),
}


def described(apis: Sequence[Api]) -> dict[str, Any]:
    """The OpenAPI document."""
    bodies = dict.fromkeys(route.body for api in apis for route in api.routes if route.body is not None)
    named, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {
        path: {"get": _operation("get", path, summary, media_type)} for path, (summary, media_type) in OWN.items()
    }
    for api, route in [(a, route) for a in apis for route in a.routes]:
        operation = _operation(route.method.lower(), route.path, route.summary) | {"tags": [api.name]}
        if route.body is not None:
            content = {"application/json": {"schema": named[route.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        # Two APIs may share a path and differ by a header; OpenAPI can describe only one of them.
        paths.setdefault(PARAMETER.sub(r"{\1}", route.path), {}).setdefault(route.method.lower(), operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outcore", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _operation(method: str, path: str, summary: str, media_type: str = "application/json") -> dict[str, Any]:
    schema = {"type": "string"} if media_type.startswith("text/") else {"type": "object"}
    error = {"description": "The error", "content": {"application/json": {"schema": {"type": "object"}}}}
    names = PARAMETER.findall(path)
    return {
        "summary": summary,
        "operationId": "_".join([method, *re.findall(r"\w+", PARAMETER.sub(r"\1", path))]),
        "responses": {
            "200": {"description": "The answer", "content": {media_type: {"schema": schema}}},
            "default": error,
        },
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names],
    }
