"""Answers of llama.cpp's ``/completion``: a list of objects, of which one stands by itself; or events, a token each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .endpoint import EVENT_STREAM, JSON, server_sent
from .exchange import Begun, Called, Ended, Event, Finished, GenerationRequest, RequestError, TextPart, TokenLogprob
from .openai_fields import error_body, finite, timings

STOPS = {"length": "limit", "stop": "eos", "tool_calls": "eos"}


@dataclass
class _LlamaChoice:
    """What was said of a prompt's answer."""

    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    ended: Ended | None = None


@dataclass
class Completion:
    """The answers to all prompts of a request.

    Attributes:
        several: the body is a list. ``prompts``: as the client gave them.
    """

    streams: bool
    asks: tuple[GenerationRequest, ...]
    ignored: tuple[str, ...]
    settings: Mapping[str, Any]
    several: bool
    return_tokens: bool
    n_probs: int
    response_fields: tuple[str, ...]
    prompts: tuple[Any, ...]
    model: str = ""
    _choices: list[_LlamaChoice] = field(init=False)

    def __post_init__(self) -> None:
        self._choices = [_LlamaChoice() for _ in self.asks]

    @property
    def media_type(self) -> str:
        return EVENT_STREAM if self.streams else JSON

    def opening(self) -> bytes:
        return b""

    def event(self, event: Event) -> bytes:
        self._hear(event)
        if isinstance(event, TextPart):
            return b"".join(server_sent(chunk) for chunk in self._chunks(event))
        if isinstance(event, Finished):
            return b"".join(server_sent(self._told(i, event, last=True)) for i in range(len(self._choices)))
        return b""

    def closing(self) -> bytes:
        return b""

    def failed(self, error: RequestError) -> bytes:
        return server_sent(error_body(error))

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def whole(self, events: Sequence[Event]) -> dict[str, Any] | list[Any]:
        for event in events:
            self._hear(event)
        finished = next((e for e in events if isinstance(e, Finished)), Finished(0, 0))
        told = [self._chosen(self._told(i, finished)) for i in range(len(self._choices))]
        return told if self.several else told[0]

    def _hear(self, event: Event) -> None:
        if isinstance(event, Begun):
            self.model = event.model
        elif isinstance(event, TextPart):
            choice = self._choices[event.index]
            choice.text += event.reasoning + event.text
            choice.tokens += event.logprobs
        elif isinstance(event, Ended):
            self._choices[event.index].ended = event
        else:
            assert not isinstance(event, Called)  # a prompt has no tools

    def _chunks(self, piece: TextPart) -> list[dict[str, Any]]:
        """One for each token; the text is the last one's."""
        text, tokens = piece.reasoning + piece.text, list(piece.logprobs)
        parts = [(token, "") for token in tokens[:-1]] + [(tokens[-1] if tokens else None, text)]
        counts = {"tokens_predicted": len(self._choices[piece.index].tokens)}
        chunks: list[dict[str, Any]] = []
        for token, said in parts:
            chunk: dict[str, Any] = {"index": piece.index, "content": said, "stop": False, **counts}
            chunk["tokens"] = [] if token is None else [token.token]
            if self.n_probs and token is not None:
                chunk["completion_probabilities"] = [_entry(token)]
            chunks.append(chunk)
        return chunks

    def _told(self, index: int, finished: Finished, last: bool = False) -> dict[str, Any]:
        """All of an answer; or what is told last of one that streamed."""
        choice = self._choices[index]
        ended = choice.ended or Ended(index, "stop", 0)
        told: dict[str, Any] = {
            "index": index,
            "content": "" if last else choice.text,
            "tokens": [token.token for token in choice.tokens] if self.return_tokens and not last else [],
            "id_slot": -1,
            "stop": True,
            "model": self.model,
            "tokens_predicted": ended.tokens,
            "tokens_evaluated": finished.prompt_tokens,
            "generation_settings": dict(self.settings),
            "prompt": self.prompts[index],
            "has_new_line": "\n" in choice.text,
            "truncated": False,
            "stop_type": "word" if ended.stop is not None else STOPS[ended.reason],
            "stopping_word": ended.stop or "",
            "tokens_cached": finished.cached_tokens,
            "timings": timings(finished),
        }
        if self.n_probs and not last:
            told["completion_probabilities"] = [_entry(token) for token in choice.tokens]
        return told

    def _chosen(self, told: dict[str, Any]) -> dict[str, Any]:
        """What the client wants of it; ``a/b`` is b within a."""
        if not self.response_fields:
            return told
        found = {}
        for name in self.response_fields:
            value: Any = told
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {**_named(token), "top_logprobs": [_named(other) for other in token.top]}


def _named(token: TokenLogprob) -> dict[str, Any]:
    return {
        "id": token.token,
        "token": token.text,
        "logprob": finite(token.logprob),
        "bytes": list(token.data),
    }
