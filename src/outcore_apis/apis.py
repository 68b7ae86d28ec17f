"""This package's APIs."""

from outcore.serve.api import Api
from outcore.serve.openai import error_body

from . import anthropic, ollama, responses

RESPONSES = Api("openai", error_body, responses.ROUTES)
ANTHROPIC = Api("anthropic", anthropic.error_body, anthropic.ROUTES, header="anthropic-version")
OLLAMA = Api("ollama", ollama.error_body, ollama.ROUTES)
APIS = (RESPONSES, ANTHROPIC, OLLAMA)
