"""A service that answers what a test has written down, behind the real HTTP application, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from starlette.applications import Starlette

from fake_service import FakeService
from outcore.serve.api import Api
from outcore.serve.app import application
from outcore.serve.connection import ClientLimits
from outcore.serve.events import (
    Begun,
    Called,
    Ended,
    Event,
    Finished,
    GenerationRequest,
    ModelCard,
    RequestError,
    TextPart,
)
from outcore.serve.site import Site

CARD = ModelCard(
    "demo", created=1_700_000_000, loaded=True, memory_bytes=3_000_000, expires_at=1_800_000_000.5, nbytes=5_000_000,
    family="qwen3", parameters=8_030_000_000, quantization="4-bit", context=4096, template="{{ messages }}", tools=True,
    thinking=True, digest="ab" * 32,
    config={"num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 9728, "vocab_size": 151936},
)  # fmt: skip
OTHER = ModelCard("folder/other:4b", family="llama", parameters=135_000_000)


def said(*pieces: Event, reason: Any = "stop", stop: str | None = None, tokens: int = 5) -> list[Event]:
    """All events of an answer, from what is said in it: 12 tokens of prompt, 4 of them cached."""
    return [
        Begun("demo", 12, 4, load_s=0.25),
        *pieces,
        Ended(0, reason, tokens, 2, stop),
        Finished(12, tokens, 4, 2, queued_s=0.5, prompt_s=1.5, generation_s=2.0),
    ]


HELLO = said(TextPart(0, "Hel"), TextPart(0, "lo"))
THOUGHT = said(TextPart(0, reasoning="Hm"), TextPart(0, reasoning="m."), TextPart(0, "Yes"))
CALLS = said(
    TextPart(0, "Let me look."),
    Called(0, "weather", '{"city":"Paris"}', "call_1", 0),
    Called(0, "clock", "{}", "call_2", 1),
    reason="tool_calls",
)


class Scripted(FakeService):
    """Answers with the same events each time.

    Args:
        error: raised after the events.
        pause_s: before each of them.

    Attributes:
        asks: what was asked; ``loads``: what was to be loaded, and for how long.
    """

    def __init__(self, events: Sequence[Event], error: RequestError | None = None, pause_s: float = 0.0) -> None:
        super().__init__()
        self.events, self.error, self.pause_s = events, error, pause_s
        self.asks: list[GenerationRequest] = []
        self.loads: list[tuple[str, float | None]] = []

    async def answer(self, *asks: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events as they are written."""
        self.asks += asks
        self.card(asks[0].model)
        for event in self.events:
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            yield event
        if self.error is not None:
            raise self.error

    async def prompt(self, ask: GenerationRequest) -> Any:
        """A token for each character of the messages and tools."""
        self.asks.append(ask)
        return SimpleNamespace(tokens=json.dumps(ask.messages) + json.dumps(ask.tools))

    def models(self) -> Sequence[ModelCard]:
        """One that is loaded, and one that is not."""
        return [CARD, OTHER]

    def card(self, name: str) -> ModelCard:
        """One of those; the first for an empty name."""
        for card in self.models():
            if name in ("", card.name):
                return card
        raise RequestError(f"no model {name}", "model_not_found", status=404)

    async def load(self, name: str, keep_alive: float | None) -> ModelCard:
        """It is written down."""
        self.loads.append((name, keep_alive))
        return self.card(name)


def served(service: FakeService, *apis: Api, keepalive_s: float = 10.0) -> Starlette:
    """The application, to be called without a socket."""
    return application(Site(cast(Any, service), apis, ClientLimits(keepalive_s=keepalive_s)))
