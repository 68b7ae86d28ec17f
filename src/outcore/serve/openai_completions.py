"""OpenAI's completions, of one prompt or several: ``/v1/completions``."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..decode.request_values import whole_text
from ..options import COUNT
from .endpoint import Endpoint, HttpRequest, ParsedRequest
from .exchange import Ended, Event, GenerationRequest, RequestError, TextPart, TokenLogprob
from .fields import Fields
from .openai_chunks import Chunked, reason, streaming
from .openai_fields import CHOICES, TOP_LOGPROBS, body_schema, finite, format_schema, length, speaks_of

MOST_PROMPTS = 128

Prompt = str | tuple[int, ...]


def parse(request: HttpRequest) -> ParsedRequest:
    """A completion of each prompt.

    Raises:
        RequestError: it is malformed, or asks for what is not supported.
    """
    fields, defaults = Fields(request.body), request.defaults
    stream, include_usage = streaming(fields)
    speaks_of(fields)
    each = fields.number("n", CHOICES) or 1
    fields.refuse(best_of=(1, each), echo=(False,), suffix=("",))
    prompts = _prompts(fields.take("prompt"))
    if len(prompts) * each > CHOICES[2]:
        raise fields.error("n", f"{len(prompts) * each} answers; at most {CHOICES[2]} over all prompts")
    ask = GenerationRequest(
        model=fields.text("model"),
        max_tokens=length(fields, defaults, "max_tokens", "max_completion_tokens"),
        sampling=fields.sampling(defaults.sampling),
        stop=fields.stops(),
        logprobs=None if fields.take("logprobs") is False else fields.number("logprobs", TOP_LOGPROBS),
        schema=format_schema(fields, "response_format"),
        grammar=fields.text("grammar"),
        choices=each,
    )
    answer = CompletionAnswer(
        each * len(prompts), stream, include_usage, fields.unused(), ask.model, logprobs=ask.logprobs
    )
    return ParsedRequest(tuple(replace(ask, prompt=prompt) for prompt in prompts), answer)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One or several: a string, token ids, or a list of those."""
    if isinstance(value, str) or _ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RequestError("prompt: a string, a list of token ids, or a list of those, is needed", param="prompt")
    if len(value) > MOST_PROMPTS:
        raise RequestError(f"prompt: {len(value)} of them; at most {MOST_PROMPTS}", param="prompt")
    return tuple(_prompt(one, "prompt" if len(value) == 1 else f"prompt[{i}]") for i, one in enumerate(value))


def _prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str) and value:
        return whole_text(value, where)
    if _ids(value):
        return tuple(value)
    empty = value in ("", [])
    raise RequestError(
        f"{where}: {'it is empty' if empty else 'a string, or a list of token ids, is needed'}", param=where
    )


def _ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t <= COUNT for t in value)
    )


@dataclass
class CompletionAnswer(Chunked):
    """The answers to all prompts.

    Attributes:
        logprobs: as in ``GenerationRequest``.
    """

    logprobs: int | None = None
    _offsets: dict[int, _Offsets] = field(default_factory=dict, init=False)

    prefix = "cmpl-"
    kinds = ("text_completion", "text_completion")

    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:
        if isinstance(event, TextPart) and (_text(event) or event.logprobs):
            yield self._choice(event.index, _text(event), self._told(event.index, event.logprobs), None)
        elif isinstance(event, Ended):
            yield self._choice(event.index, "", None, event.reason)

    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        pieces = [e for e in events if isinstance(e, TextPart)]
        told = self._told(index, [token for piece in pieces for token in piece.logprobs])
        return self._choice(index, "".join(_text(p) for p in pieces), told, reason(events))

    def _choice(self, index: int, text: str, told: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": told, "finish_reason": ended}

    def _told(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        offsets = self._offsets.setdefault(index, _Offsets())
        return {
            "tokens": [_name(token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [{_name(other): finite(other.logprob) for other in t.top} for t in tokens],
            "text_offset": [offsets.next(token.data) for token in tokens],
        }


class _Offsets:
    """Characters before each token of a choice. A character of several tokens counts with its last."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._passed = 0

    def next(self, data: bytes) -> int:
        """Characters before this token."""
        before = self._passed
        self._passed += len(self._decoder.decode(data))
        return before


def _text(piece: TextPart) -> str:
    # Whoever continues a text wants all of it.
    return piece.reasoning + piece.text


def _name(token: TokenLogprob) -> str:
    """A token in OpenAI's older form: of one that is no text by itself its bytes."""
    try:
        return token.data.decode() or token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


SUMMARY = "Continue a text, or several, as OpenAI's completions"

BODY = body_schema(
    "prompt", prompt="", max_tokens="integer", stop="", n="integer", logprobs="integer", response_format="object",
    stream_options="object",
)  # fmt: skip

ENDPOINTS = (Endpoint("/v1/completions", parse, summary=SUMMARY, schema=BODY),)
