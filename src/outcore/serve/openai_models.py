"""OpenAI's list of models: ``/v1/models``."""

from __future__ import annotations

from typing import Any

from .endpoint import HttpRequest, Route
from .exchange import ModelCard, Service


async def models(request: HttpRequest, service: Service) -> dict[str, Any]:
    """All models."""
    return {"object": "list", "data": [_model(card) for card in service.models()]}


async def model(request: HttpRequest, service: Service) -> dict[str, Any]:
    """One of them.

    Raises:
        RequestError: there is none of that name (404).
    """
    return _model(service.card(request.params["model"]))


def _model(card: ModelCard) -> dict[str, Any]:
    """``max_model_len`` is vLLM's word for the context, ``meta`` is llama.cpp's."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "outcore",
        "max_model_len": card.context,
        "loaded": card.loaded,
        "meta": {"n_ctx_train": card.context, "n_params": card.parameters, "size": card.nbytes},
    }


ROUTES = tuple(
    Route(f"{prefix}/models{path}", handle, summary=summary)
    for prefix in ("/v1", "")
    for path, handle, summary in (("", models, "List the models"), ("/{model:path}", model, "One of the models"))
)
