"""The APIs that this package brings to the server, in the order in which ``/openapi.json`` lists them."""

from outcore.serve.api import Api
from outcore.serve.openai import error_body

from . import anthropic, ollama, responses

RESPONSES = Api("openai", error_body, responses.ROUTES)
ANTHROPIC = Api("anthropic", anthropic.error_body, anthropic.ROUTES, header="anthropic-version")
OLLAMA = Api("ollama", ollama.error_body, ollama.ROUTES)
APIS = (RESPONSES, ANTHROPIC, OLLAMA)
