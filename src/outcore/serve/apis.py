"""The APIs that are served. Errors of addresses that belong to none are told in the words of the first."""

from __future__ import annotations

from . import anthropic, completions, ollama, openai, responses
from .api import Api

OPENAI = Api("openai", openai.error_body, (*openai.ROUTES, *completions.ROUTES, *responses.ROUTES))
ANTHROPIC = Api("anthropic", anthropic.error_body, anthropic.ROUTES, header="anthropic-version")
OLLAMA = Api("ollama", ollama.error_body, ollama.ROUTES)
APIS = (OPENAI, ANTHROPIC, OLLAMA)
