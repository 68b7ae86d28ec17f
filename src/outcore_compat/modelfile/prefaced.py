"""A service that begins every conversation with the Modelfile's system prompt and messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outcore.serve.events import Event, GenerationRequest
from outcore.serve.prompting import Prompt
from outcore.serve.service import ModelService


@dataclass(frozen=True)
class Prefaced:
    """Wraps a service: adds a Modelfile's texts to requests that leave them out, by Ollama's rules.

    Attributes:
        system: for conversations that do not begin with a system message; None: no system prompt.
        messages: go before a conversation's own.
        stop: for requests without stop strings.
    """

    service: ModelService
    system: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()

    def prefaced(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with system prompt, messages and stop strings added."""
        messages = request.messages
        if messages is not None:
            own = bool(messages) and messages[0].get("role") == "system"
            system = [{"role": "system", "content": self.system}] if self.system is not None and not own else []
            # The client's own system message stays first.
            messages = (*messages[:own], *system, *self.messages, *messages[own:])
        return replace(request, messages=messages, stop=request.stop or self.stop)

    def answer(self, *requests: GenerationRequest) -> AsyncGenerator[Event, None]:
        return self.service.answer(*map(self.prefaced, requests))

    async def prompt(self, request: GenerationRequest) -> Prompt:
        return await self.service.prompt(self.prefaced(request))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)
