"""``/openapi.json``: the addresses of all APIs in OpenAPI 3.1, made of the tables that they are answered by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from ..version import __version__
from .api import Api, Route
from .page import EVENTS

PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")

OWN = {
    "/": ("Says that the server runs", "text/plain"),
    "/health": ("Whether it answers, and how many requests run and wait", "application/json"),
    "/metrics": ("Counters in Prometheus's text", "text/plain"),
    EVENTS: ("Snapshots of what the server does, four a second", "text/event-stream"),
    "/openapi.json": ("This description", "application/json"),
}


def described(apis: Sequence[Api], key: bool) -> dict[str, Any]:
    """The description.

    Args:
        key: requests must carry one.
    """
    bodies = dict.fromkeys(route.body for api in apis for route in api.routes if route.body is not None)
    named, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for path, (summary, media_type) in OWN.items():
        operation = {"summary": summary, "operationId": _id("get", path), "responses": _responses(media_type)}
        paths[path] = {"get": operation | ({"security": []} if path in ("/", "/health") else {})}
    for api in apis:
        for route in api.routes:
            operation = _operation(api, route)
            if route.body is not None:
                content = {"application/json": {"schema": named[route.body, "validation"]}}
                operation["requestBody"] = {"required": True, "content": content}
            # Where two families have one address, a header says which is meant; a description has room for one.
            paths.setdefault(PARAMETER.sub(r"{\1}", route.path), {}).setdefault(route.method.lower(), operation)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    security: dict[str, Any] = {"security": [{name: []} for name in schemes]} if key else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outcore", "version": __version__},
        "tags": [{"name": api.name} for api in apis],
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {}), "securitySchemes": schemes if key else {}},
        **security,
    }


def _operation(api: Api, route: Route) -> dict[str, Any]:
    return {
        "tags": [api.name],
        "summary": route.summary,
        "operationId": _id(route.method, route.path),
        "responses": _responses("application/json"),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in PARAMETER.findall(route.path)
        ],
    }


def _responses(media_type: str) -> dict[str, Any]:
    schema = {"type": "string"} if media_type.startswith("text/") else {"type": "object"}
    error = {"description": "Why not", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"200": {"description": "The answer", "content": {media_type: {"schema": schema}}}, "default": error}


def _id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", PARAMETER.sub(r"\1", path))])
