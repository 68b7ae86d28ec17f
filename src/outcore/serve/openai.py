"""OpenAI's family of addresses."""

from __future__ import annotations

from . import openai_chat, openai_completions, openai_models, openai_responses
from .endpoint import Api, refused
from .openai_fields import NO_EMBEDDINGS, error_body

API = Api(
    "openai",
    error_body,
    (*openai_chat.ENDPOINTS, *openai_completions.ENDPOINTS, *openai_responses.ENDPOINTS),
    (*openai_models.ROUTES, *(refused(f"{prefix}/embeddings", NO_EMBEDDINGS) for prefix in ("/v1", ""))),
)
