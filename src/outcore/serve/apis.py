"""The APIs that are served. Errors of addresses that belong to none are told in the words of the first."""

from __future__ import annotations

from . import anthropic, anthropic_answers, ollama, ollama_answers, openai, responses
from .api import Api
from .openai_answers import error_body

OPENAI = Api("openai", error_body, (*openai.ROUTES, *responses.ROUTES))
ANTHROPIC = Api("anthropic", anthropic_answers.error_body, anthropic.ROUTES, header="anthropic-version")
OLLAMA = Api("ollama", ollama_answers.error_body, ollama.ROUTES)
APIS = (OPENAI, ANTHROPIC, OLLAMA)
