"""Ollama's API: chats and completions as lines of JSON, and what its clients ask beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from . import ollama_models as models
from .endpoint import (
    JSON,
    JSON_LINES,
    Api,
    Direct,
    Endpoint,
    HttpRequest,
    ParsedRequest,
    Route,
    decoded,
    encoded,
    refused,
)
from .exchange import Begun, Called, Ended, Event, Finished, RequestError, Service, TextPart, TokenLogprob
from .fields import Fields
from .ollama_request import OllamaRequest, chat, completion, plain_name
from .openai_fields import NO_EMBEDDINGS, logprob_entries

__all__ = ["API", "VERSION", "OllamaAnswer", "error_body"]

VERSION = "0.13.0"
"""Of Ollama's API that this follows. Clients compare it to decide what they may ask for."""

Shape = Literal["chat", "generate"]


class OllamaAnswer:
    """An answer, as lines of JSON or as one object.

    Args:
        model: its name as the client gave it.
        clock: seconds, of which the whole time that an answer took is made.
    """

    def __init__(
        self, shape: Shape, model: str, *, streams: bool = True, ignored: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._shape, self._model, self._streams, self._ignored = shape, model, streams, tuple(ignored)
        self._clock, self._start = clock, clock()
        self._begun = Begun(model, 0)
        self._reason = "stop"

    @property
    def streams(self) -> bool:
        return self._streams

    @property
    def media_type(self) -> str:
        return JSON_LINES if self._streams else JSON

    @property
    def ignored(self) -> tuple[str, ...]:
        return self._ignored

    def opening(self) -> bytes:
        return b""

    def event(self, event: Event) -> bytes:
        record = self._record(event)
        return encoded(record) + b"\n" if record else b""

    def closing(self) -> bytes:
        return b""

    def failed(self, error: RequestError) -> bytes:
        return encoded(error_body(error)) + b"\n"

    def keepalive(self) -> bytes:
        """A record without text: clients parse every line, an empty one too."""
        return encoded(self._part()) + b"\n"

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The last record, with all that those before it said."""
        texts: dict[str, list[str]] = {"text": [], "thinking": []}
        calls: list[dict[str, Any]] = []
        logprobs: list[TokenLogprob] = []
        last: dict[str, Any] = {}
        for event in events:
            if isinstance(event, TextPart):
                texts["text"].append(event.text)
                texts["thinking"].append(event.reasoning)
                logprobs += event.logprobs
            elif isinstance(event, Called):
                calls.append(_call(event))
            else:
                last = self._record(event) or last
        return last | self._part("".join(texts["text"]), "".join(texts["thinking"]), calls, logprobs, done=True)

    def _record(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Begun():
                self._begun = event
            case TextPart():
                return self._part(event.text, event.reasoning, logprobs=event.logprobs)
            case Called():
                return self._part(calls=[_call(event)])
            case Ended():
                self._reason = "length" if event.reason == "length" else "stop"
            case Finished():
                return self._part(done=True) | self._figures(event)
        return None

    def _part(
        self, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[TokenLogprob] = (), done: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        said: dict[str, Any] = {"role": "assistant", "content": text} if self._shape == "chat" else {"response": text}
        if thinking:
            said["thinking"] = thinking
        if calls:
            said["tool_calls"] = list(calls)
        record: dict[str, Any] = {"model": self._model or self._begun.model,
                                  "created_at": models.timestamp(datetime.now(UTC))}  # fmt: skip
        record |= {"message": said} if self._shape == "chat" else said
        if logprobs:
            record["logprobs"] = logprob_entries(logprobs)
        return record | {"done": done}

    def _figures(self, finished: Finished) -> dict[str, Any]:
        """Nanoseconds and tokens. What the cache had of the prompt counts to it."""
        return {
            "done_reason": self._reason, "total_duration": _nanoseconds(self._clock() - self._start),
            "load_duration": _nanoseconds(self._begun.load_s), "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(finished.prompt_s), "eval_count": finished.tokens,
            "eval_duration": _nanoseconds(finished.generation_s),
        }  # fmt: skip


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _call(called: Called) -> dict[str, Any]:
    function = {"index": called.number, "name": called.name, "arguments": decoded(called.arguments)}
    return {"id": called.id, "function": function}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error as the API tells it."""
    return {"error": str(error)}


def _chat(request: HttpRequest) -> ParsedRequest | Direct:
    return _asked("chat", chat(Fields(request.body), request.defaults))


def _generate(request: HttpRequest) -> ParsedRequest | Direct:
    return _asked("generate", completion(Fields(request.body), request.defaults))


def _asked(shape: Shape, parsed: OllamaRequest) -> ParsedRequest | Direct:
    if parsed.ask is None:
        return _loading(parsed.name, parsed.keep_alive, shape)
    return ParsedRequest(
        (parsed.ask,), OllamaAnswer(shape, parsed.name, streams=parsed.streams, ignored=parsed.ignored)
    )


def _loading(name: str, keep_alive: float | None, shape: Shape) -> Direct:
    """Without a prompt a model is loaded, or unloaded if it shall be kept for 0 seconds."""

    async def handle(service: Service) -> dict[str, Any]:
        card = await service.load(plain_name(name), keep_alive)
        empty: dict[str, Any] = {"response": ""}
        if shape == "chat":
            empty = {"message": {"role": "assistant", "content": ""}}
        return {"model": name or card.name, "created_at": models.timestamp(datetime.now(UTC)), **empty,
                "done": True, "done_reason": "unload" if keep_alive == 0 else "load"}  # fmt: skip

    return Direct(handle)


async def _version(request: HttpRequest, service: Service) -> dict[str, Any]:
    return {"version": VERSION}


FILES = "models are folders of files; put one where the server finds it, or start it with --model"

API = Api(
    "ollama",
    error_body,
    endpoints=(
        Endpoint("/api/chat", _chat, summary="Answer a conversation"),
        Endpoint("/api/generate", _generate, summary="Answer a prompt"),
    ),
    routes=(
        Route("/api/tags", models.tags, summary="List the models"),
        Route("/api/show", models.show, "POST", "One of the models"),
        Route("/api/ps", models.running, summary="The models that are in memory"),
        Route("/api/version", _version, summary="Of Ollama's API"),
        Route("/api/pull", models.pull, "POST", "Succeeds for a model that is there"),
        refused("/api/embed", NO_EMBEDDINGS),
        refused("/api/embeddings", NO_EMBEDDINGS),
        refused("/api/create", "use a Modelfile: outcore serve --modelfile FILE"),
        refused("/api/push", "nothing is sent anywhere from here"),
        refused("/api/copy", FILES),
        refused("/api/delete", FILES, "DELETE"),
        refused("/api/blobs/{digest}", FILES),
    ),
)
