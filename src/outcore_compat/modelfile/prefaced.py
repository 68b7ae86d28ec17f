"""A service whose conversations begin with what its owner said: a system prompt, and messages before the first one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outcore.serve.events import Event, GenerationRequest
from outcore.serve.service import ModelService


@dataclass(frozen=True)
class Prefaced:
    """Another service's answers, to asks with what they do not say themselves; of Ollama's rule for a model of its own.

    Attributes:
        system: of conversations that do not begin with a system message; None: none.
        messages: that stand before a conversation's own.
        stop: where an ask has no stop strings.
    """

    service: ModelService
    system: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        """The ask with all that is said before it."""
        messages = request.messages
        if messages is not None:
            own = bool(messages) and messages[0].get("role") == "system"
            system = [{"role": "system", "content": self.system}] if self.system is not None and not own else []
            # What a client says to the model stays the first word.
            messages = (*messages[:own], *system, *self.messages, *messages[own:])
        return replace(request, messages=messages, stop=request.stop or self.stop)

    def answer(self, *requests: GenerationRequest) -> AsyncGenerator[Event, None]:
        """As ``ModelService`` has it."""
        return self.service.answer(*map(self.asked, requests))

    async def count(self, request: GenerationRequest) -> int:
        """As ``ModelService`` has it."""
        return await self.service.count(self.asked(request))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)
