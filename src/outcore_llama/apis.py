"""llama.cpp's own addresses, and its fields of OpenAI's chats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outcore.serve import completions, openai
from outcore.serve.api import Api, Handled, HttpRequest, ParsedRequest, Route, counted
from outcore.serve.events import GenerationRequest
from outcore.serve.requests import Body, read

from .completion import completion, plain_text, text_of, tokens_of


class TokenizeBody(Body):
    silent = frozenset({"parse_special"})

    model: str = ""
    content: str = ""
    add_special: bool = False
    with_pieces: bool = False
    tokens: list[Any] = []


class ChatBody(openai.ChatBody):
    refused = {name: values for name, values in openai.ChatBody.refused.items() if name != "grammar"}

    grammar: str = ""
    verbose: bool = False


def either(http: HttpRequest) -> Handled:
    """``/completions`` is llama.cpp's, but clients of OpenAI's, which always name a model, may ask it too."""
    return completions.completion(http) if "model" in http.body else completion(http)


def chat(http: HttpRequest) -> Handled:
    if not http.body.get("grammar") and not http.body.get("verbose"):
        return openai.chat(http)
    body = read(ChatBody, http.body)
    others = {name: value for name, value in http.body.items() if name != "grammar"}
    (request,) = openai.chat(replace(http, body=others)).requests
    return _chat(http, body, replace(request, form=body.grammar or request.form))


async def _chat(http: HttpRequest, body: ChatBody, request: GenerationRequest) -> ParsedRequest:
    writer = openai.ChatWriter(body, body.n, logprobs=body.logprobs)
    if body.verbose:
        writer.head["__verbose"] = {"prompt": text_of(await http.service.prompt(request))}
    return ParsedRequest((request,), writer)


async def tokenize(http: HttpRequest) -> dict[str, Any]:
    body = read(TokenizeBody, http.body)
    tokens = await tokens_of(http.service, body.model, body.content, special=body.add_special)
    if not body.with_pieces or not tokens:
        return {"tokens": tokens}
    tokenizer = (await http.service.prompt(GenerationRequest(body.model, prompt=tuple(tokens)))).tokenizer
    return {"tokens": [{"id": token, "piece": tokenizer.decode([token])} for token in tokens]}


async def detokenize(http: HttpRequest) -> dict[str, Any]:
    body = read(TokenizeBody, http.body)
    tokens = await tokens_of(http.service, body.model, plain_text(body.tokens, "tokens")) if body.tokens else []
    request = GenerationRequest(body.model, prompt=tuple(tokens))
    return {"content": text_of(await http.service.prompt(request)) if tokens else ""}


async def apply_template(http: HttpRequest) -> dict[str, Any]:
    return {"prompt": text_of(await http.service.prompt(openai.chat(http).requests[0]))}


async def count(http: HttpRequest) -> dict[str, Any]:
    return await counted(http, openai.chat(http).requests[0])


async def slots(http: HttpRequest) -> list[dict[str, Any]]:
    """The places for answers that share a forward pass; those who wait for one count as having it."""
    state = http.service.state()
    taken = state["running"] + state["waiting"]
    return [{"id": n, "is_processing": n < taken} for n in range(http.service.options.most)]


ROUTES = (
    Route("/completion", completion, "POST"),
    Route("/completions", either, "POST"),
    *(Route(f"{at}/chat/completions", chat, "POST") for at in ("/v1", "")),
    *(Route(f"{at}/chat/completions/input_tokens", count, "POST") for at in ("/v1", "")),
    Route("/tokenize", tokenize, "POST"),
    Route("/detokenize", detokenize, "POST"),
    Route("/apply-template", apply_template, "POST"),
    Route("/slots", slots),
)

# The addresses that are OpenAI's too are taken by every request with this header, as those with a body have.
APIS = (Api("llama.cpp", openai.error_body, ROUTES, header="content-type"),)
