"""llama.cpp's own addresses: ``/completion`` and those around its tokenizer, as programs made for llama-server ask."""

from __future__ import annotations

from typing import Any

from . import openai_chat, openai_completions
from .endpoint import Api, Direct, Endpoint, HttpRequest, ParsedRequest, Route
from .exchange import GenerationRequest, Service
from .fields import Fields
from .llama_answer import Completion
from .llama_request import completion, prompt_of
from .openai_fields import FINGERPRINT, body_schema, error_body


def parse(request: HttpRequest) -> ParsedRequest:
    """A completion in llama.cpp's form.

    Raises:
        RequestError: it is malformed, or asks for what is not supported.
    """
    asked = completion(Fields(request.body), request.defaults)
    answer = Completion(
        asked.streams, asked.asks, asked.ignored, asked.settings, asked.several, asked.return_tokens, asked.n_probs,
        asked.response_fields, asked.prompts,
    )  # fmt: skip
    return ParsedRequest(asked.asks, answer)


def either(request: HttpRequest) -> ParsedRequest | Direct:
    """``/completions`` without a version is llama.cpp's; but OpenAI's clients, which always name a model, come here
    too, where their base address has none.

    Raises:
        RequestError: as above.
    """
    return openai_completions.parse(request) if "model" in request.body else parse(request)


async def tokenize(request: HttpRequest, service: Service) -> dict[str, Any]:
    """Ids of a text's tokens; with ``with_pieces`` the text of each."""
    fields = Fields(request.body)
    content, special = fields.text("content"), fields.flag("add_special")
    fields.ignore("parse_special")
    model = fields.text("model")
    if not content:
        return {"tokens": []}
    tokens = (await service.rendered(GenerationRequest(model=model, prompt=content), special)).tokens
    if not fields.flag("with_pieces"):
        return {"tokens": list(tokens)}
    pieces = [(await service.rendered(GenerationRequest(model=model, prompt=(token,)))).text for token in tokens]
    return {"tokens": [{"id": token, "piece": piece} for token, piece in zip(tokens, pieces, strict=True)]}


async def detokenize(request: HttpRequest, service: Service) -> dict[str, Any]:
    """The text of tokens."""
    fields = Fields(request.body)
    tokens = prompt_of(fields.take("tokens") or [], "tokens")
    if not tokens:
        return {"content": ""}
    return {"content": (await service.rendered(GenerationRequest(model=fields.text("model"), prompt=tokens))).text}


async def apply_template(request: HttpRequest, service: Service) -> dict[str, Any]:
    """The text that a chat comes to."""
    return {"prompt": (await service.rendered(await request.read(_chat))).text}


async def input_tokens(request: HttpRequest, service: Service) -> dict[str, Any]:
    """How many tokens a chat comes to."""
    return {"object": "response.input_tokens", "input_tokens": await service.count(await request.read(_chat))}


async def props(request: HttpRequest, service: Service) -> dict[str, Any]:
    """What is served: of a named model, or the first."""
    card = service.card(request.query["model"]) if request.query.get("model") else service.models()[0]
    return {
        "default_generation_settings": {"n_ctx": card.context},
        "total_slots": service.state().get("most", 1),
        "model_alias": card.name,
        "model_path": card.name,
        "chat_template": card.template,
        "modalities": {"vision": False, "audio": False},
        "build_info": FINGERPRINT,
    }


async def slots(request: HttpRequest, service: Service) -> list[dict[str, Any]]:
    """The places for answers that share sweeps, and which of them are taken."""
    state = service.state()
    running = state.get("running", 0)
    return [{"id": n, "is_processing": n < running} for n in range(state.get("most", 1))]


def _chat(request: HttpRequest) -> GenerationRequest:
    return openai_chat.parse(request).asks[0]


SUMMARY = "Continue a text, as llama.cpp's completion"

BODY = body_schema(
    "prompt", prompt="", n_predict="integer", stop="array", n_probs="integer", json_schema="object", grammar="string",
    return_tokens="boolean", response_fields="array",
)  # fmt: skip

API = Api(
    "llama.cpp",
    error_body,
    (
        Endpoint("/completion", parse, summary=SUMMARY, schema=BODY),
        Endpoint("/completions", either, summary=SUMMARY, schema=BODY),
    ),
    (
        Route("/props", props, summary="What is served"),
        Route("/slots", slots, summary="Places for answers"),
        Route("/tokenize", tokenize, "POST", "Ids of a text's tokens"),
        Route("/detokenize", detokenize, "POST", "The text of tokens"),
        Route("/apply-template", apply_template, "POST", "The prompt that a chat comes to"),
        *(
            Route(f"{prefix}/chat/completions/input_tokens", input_tokens, "POST", "Count the tokens of a chat")
            for prefix in ("", "/v1")
        ),
    ),
)
