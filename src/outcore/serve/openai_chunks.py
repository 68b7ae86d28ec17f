"""What the answers of chats and of completions have in common: chunks of one id, usage at the end, ``[DONE]``."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .endpoint import EVENT_STREAM, JSON, server_sent
from .exchange import Begun, Ended, Event, Finished, RequestError
from .fields import UNSUPPORTED, Fields
from .openai_fields import FINGERPRINT, error_body, new_id, timings, usage

COMMENT = b": keepalive\n\n"


@dataclass
class Chunked(ABC):
    """An answer of choices, whole or in chunks.

    Attributes:
        choices: so many, over all prompts.
        include_usage: a last chunk counts the tokens.
    """

    choices: int = 1
    streams: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    model: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(init=False)

    prefix = ""
    kinds = ("", "")
    """``object`` of a whole answer, and of a chunk."""

    def __post_init__(self) -> None:
        self.id = new_id(self.prefix)

    @property
    def media_type(self) -> str:
        return EVENT_STREAM if self.streams else JSON

    def opening(self) -> bytes:
        return b""

    def event(self, event: Event) -> bytes:
        if isinstance(event, Begun):
            self.model = event.model
        if isinstance(event, Finished):
            more = {"usage": usage(event), "timings": timings(event)}
            return server_sent(self._head(1) | {"choices": []} | more) if self.include_usage else b""
        return b"".join(self._chunk(choice) for choice in self.deltas(event))

    def closing(self) -> bytes:
        return b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        return server_sent(error_body(error))

    def keepalive(self) -> bytes:
        return COMMENT

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        self.model = next((e.model for e in events if isinstance(e, Begun)), self.model)
        finished = next((e for e in events if isinstance(e, Finished)), Finished(0, 0))
        said: list[list[Event]] = [[] for _ in range(self.choices)]
        for event in events:
            if not isinstance(event, Begun | Finished):
                said[event.index].append(event)
        choices = [self.choice(i, own) for i, own in enumerate(said)]
        return self._head(0) | {"choices": choices, "usage": usage(finished), "timings": timings(finished)}

    @abstractmethod
    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:
        """Choices of the chunks that an event comes to."""

    @abstractmethod
    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """A whole choice, of its own events."""

    def _head(self, kind: int) -> dict[str, Any]:
        return {"id": self.id, "object": self.kinds[kind], "created": self.created, "model": self.model,
                "system_fingerprint": FINGERPRINT}  # fmt: skip

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        more = {"usage": None} if self.include_usage else {}
        return server_sent(self._head(1) | {"choices": [choice]} | more)


def streaming(fields: Fields) -> tuple[bool, bool]:
    """Whether an answer streams, and whether it ends with its usage then.

    Raises:
        RequestError: ``stream_options`` for an answer that does not.
    """
    stream, options = fields.flag("stream"), fields.inner("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise fields.error("stream_options", "only where stream is true", UNSUPPORTED)
    options.flag("include_obfuscation")
    return True, options.flag("include_usage")


def reason(events: Sequence[Event]) -> str:
    """Why a choice ended."""
    return next((e.reason for e in events if isinstance(e, Ended)), "stop")
