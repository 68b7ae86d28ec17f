"""``/openapi.json``: the addresses of all APIs in OpenAPI 3.1, made of the tables that they are answered by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .. import __version__
from .endpoint import Api, Endpoint, Route
from .page import EVENTS
from .responses import addresses

__all__ = ["described"]

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
    paths: dict[str, dict[str, Any]] = {}
    for path, (summary, media_type) in OWN.items():
        operation = {"summary": summary, "operationId": _id("get", path), "responses": _responses(media_type)}
        paths[path] = {"get": operation | ({"security": []} if path in ("/", "/health") else {})}
    for api in apis:
        for there in addresses(api):
            operations = paths.setdefault(PARAMETER.sub(r"{\1}", there.path), {})
            # Where two families have one address, a header says which is meant; a description has room for one.
            operations.setdefault(there.method.lower(), _operation(api, there))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Outcore", "version": __version__},
        "tags": [{"name": api.name} for api in apis],
        "paths": paths,
    }
    if key:
        schemes = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document |= {"components": {"securitySchemes": schemes}, "security": [{name: []} for name in schemes]}
    return document


def _operation(api: Api, there: Endpoint | Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [api.name],
        "operationId": _id(there.method, there.path),
        "responses": _responses("application/json"),
    }
    if there.summary:
        operation["summary"] = there.summary
    if names := PARAMETER.findall(there.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if there.schema:
        content = {"application/json": {"schema": there.schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(media_type: str) -> dict[str, Any]:
    schema = {"type": "string"} if media_type.startswith("text/") else {"type": "object"}
    error = {"description": "Why not", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"200": {"description": "The answer", "content": {media_type: {"schema": schema}}}, "default": error}


def _id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", PARAMETER.sub(r"\1", path))])
