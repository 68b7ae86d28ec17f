"""Requests through an API's translation, and what a scripted answer becomes, without a server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from fake_service import FakeService
from outcore.serve.api import Api, Defaults, HttpRequest, ParsedRequest, ResponseWriter
from outcore.serve.events import Begun, Ended, Event, Finished, GenerationRequest, TokenLogprob


def asked(api: Api, path: str, body: Mapping[str, Any], defaults: Defaults | None = None) -> ParsedRequest:
    """What a body comes to at an address."""
    route = next(route for route in api.routes if route.path == path)
    found = route.handle(HttpRequest(cast(Any, FakeService()), body, defaults=defaults or Defaults()))
    assert isinstance(found, ParsedRequest)
    return found


def events(*said: Event, reason: Any = "stop", tokens: int = 7, thought: int = 0, choices: int = 1) -> list[Event]:
    """An answer: the model ``m``, a prompt of 5 tokens of which 2 were cached, and what is said."""
    ends = [Ended(i, reason, tokens, thought) for i in range(choices)]
    total = Finished(5, tokens * choices, 2, thought, 0.1, 0.5, 2.0)
    return [Begun("m", 5, 2), *said, *ends, total]


def sent(answering: ResponseWriter, said: Sequence[Event]) -> bytes:
    """Everything that is streamed for these events."""
    return b"".join(answering.sent(answering.steps(e)) for e in said) + answering.closing()


def lines(data: bytes) -> list[Any]:
    """The data of server-sent events: JSON, or ``[DONE]``. Each is one line, between empty ones."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        line = block.split("\n")[-1]
        assert line.startswith("data: "), block
        found.append(line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]))
    return found


def streamed(answering: ResponseWriter, said: Sequence[Event]) -> list[Any]:
    """The same, read again."""
    assert answering.streams
    return lines(sent(answering, said))


def token(text: str, logprob: float = -0.5, *top: TokenLogprob, data: bytes | None = None) -> TokenLogprob:
    """A token of an answer."""
    return TokenLogprob(len(text), text, text.encode() if data is None else data, logprob, top)


class Said:
    """Says the same to every request, and keeps what was asked."""

    def __init__(self, *said: Event, **more: Any) -> None:
        self.events = events(*said, **more)
        self.asks: list[GenerationRequest] = []

    async def __call__(self, ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.asks.append(ask)
        for event in self.events:
            yield event
