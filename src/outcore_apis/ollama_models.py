"""Ollama's API about models: ``/api/tags``, ``/api/show``, ``/api/ps``, ``/api/pull``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from outcore.serve.api import HttpRequest
from outcore.serve.events import ModelCard, RequestError
from outcore.serve.requests import Body, read
from outcore.text import shortened

# ``expires_at`` of a model that stays loaded; clients show this date as forever.
FOR_GOOD = "9999-12-31T23:59:59Z"

LENGTHS = {"context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
           "embedding_length": "hidden_size"}  # fmt: skip


class Named(Body):
    """A body that names a model; ``name`` is the older field."""

    model: str = ""
    name: str = ""

    @property
    def called(self) -> str:
        return self.model or self.name


def timestamp(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def plain_name(name: str) -> str:
    return name.removesuffix(":latest")


def tags(http: HttpRequest) -> dict[str, Any]:
    models = [
        _listed(card) | {"modified_at": _at(card.created), "size": card.nbytes, "capabilities": _capabilities(card)}
        for card in http.service.models()
    ]
    return {"models": models}


def running(http: HttpRequest) -> dict[str, Any]:
    """Models in memory; their size is the planned memory, not all weights."""
    models = [
        _listed(card) | {"size": card.memory_bytes, "size_vram": card.memory_bytes, "expires_at": _at(card.expires_at),
                         "context_length": _length(card, "context_length")}
        for card in http.service.models() if card.loaded
    ]  # fmt: skip
    return {"models": sorted(models, key=lambda model: model["expires_at"], reverse=True)}


def show(http: HttpRequest) -> dict[str, Any]:
    card = http.service.card(plain_name(read(Named, http.body).called))
    info: dict[str, Any] = {"general.architecture": card.family, "general.basename": card.name.rpartition("/")[2],
                            "general.parameter_count": card.parameters}  # fmt: skip
    info |= {f"{card.family}.{name}": length for name in LENGTHS if (length := _length(card, name))}
    temperature = f"temperature {http.defaults.sampling.temperature:g}"
    return {
        "modelfile": f"FROM {card.name}\nPARAMETER {temperature}\n", "parameters": temperature, "license": "",
        "template": card.template, "details": _details(card), "model_info": info, "capabilities": _capabilities(card),
        "modified_at": _at(card.created),
    }  # fmt: skip


def pull(http: HttpRequest) -> dict[str, Any]:
    """Succeeds for a model that is served; downloads no other."""
    name = read(Named, http.body).called
    # Not ``service.card``, which accepts any name where only one model is served.
    served = {called for card in http.service.models() for called in (card.name, card.name.rpartition("/")[2])}
    if name not in served and plain_name(name) not in served:
        why = "this server downloads no models; start it with the model: outcore serve --model NAME"
        raise RequestError(f"{shortened(name)}: {why}", "not_implemented", param="model", status=501)
    return {"status": "success"}


def _listed(card: ModelCard) -> dict[str, Any]:
    name = card.name if ":" in card.name.rpartition("/")[2] else f"{card.name}:latest"
    return {"name": name, "model": name, "digest": card.digest, "details": _details(card)}


def _details(card: ModelCard) -> dict[str, Any]:
    details: dict[str, Any] = {
        "parent_model": "", "format": "safetensors", "family": card.family, "families": [card.family],
        "parameter_size": _parameter_size(card.parameters), "quantization_level": card.quantization or "unknown",
    }  # fmt: skip
    lengths = {name: _length(card, name) for name in ("context_length", "embedding_length")}
    return details | {name: length for name, length in lengths.items() if length}


def _capabilities(card: ModelCard) -> list[str]:
    more = {"vision": card.images, "tools": card.tools, "thinking": card.thinking}
    return ["completion", *(name for name, has in more.items() if has)]


def _length(card: ModelCard, name: str) -> int:
    if name == "context_length" and card.context:
        return card.context
    text = card.config.get("text_config")
    value = (text if isinstance(text, Mapping) else card.config).get(LENGTHS[name])
    return value if type(value) is int and value > 0 else 0


def _parameter_size(number: int) -> str:
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{unit}"
    return str(number)


def _at(seconds: float | None) -> str:
    return FOR_GOOD if seconds is None else timestamp(datetime.fromtimestamp(seconds, UTC))
