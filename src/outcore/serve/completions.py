"""OpenAI's completions API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from ..checks import COUNT
from .api import HttpRequest, ParsedRequest, Route, WholeChoice, finite
from .events import Ended, Event, TextPart, TokenLogprob
from .openai import MOST_CHOICES, ChatWriter, TextBody
from .requests import UNSUPPORTED, TopLogprobs, read, wrong


class CompletionBody(TextBody):
    refused = {**TextBody.refused, "echo": (False,), "suffix": ("",)}

    prompt: Any
    logprobs: TopLogprobs | Literal[False] | None = None
    best_of: int | None = None


def completion(http: HttpRequest) -> ParsedRequest:
    body = read(CompletionBody, http.body)
    if body.best_of not in (None, 1, body.n):
        raise wrong("best_of", "not supported; leave it out", UNSUPPORTED)
    prompts = _prompts(body.prompt)
    if len(prompts) * body.n > MOST_CHOICES:
        raise wrong("n", f"asks for {len(prompts) * body.n} answers to all prompts; at most {MOST_CHOICES}")
    request = body.request(http.defaults)
    request = replace(request, logprobs=None if body.logprobs is False else body.logprobs)
    writer = CompletionWriter(body, len(prompts) * body.n, logprobs=request.logprobs is not None)
    return ParsedRequest(tuple(replace(request, prompt=prompt) for prompt in prompts), writer)


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    given = value if isinstance(value, list) and not _ids(value) else [value]
    if not 1 <= len(given) <= MOST_CHOICES:
        raise wrong("prompt", f"{len(given)} prompts; give 1 to {MOST_CHOICES}")
    for i, one in enumerate(given):
        if not (isinstance(one, str) and one) and not _ids(one):
            where = "prompt" if len(given) == 1 else f"prompt[{i}]"
            raise wrong(where, "give a string or a list of token ids, not an empty one")
    return [one if isinstance(one, str) else tuple(one) for one in given]


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t <= COUNT for t in value)


class CompletionWriter(ChatWriter):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, body: TextBody, choices: int, *, logprobs: bool = False) -> None:
        super().__init__(body, choices, logprobs=logprobs)
        self._passed = [(0, codecs.getincrementaldecoder("utf-8")("replace")) for _ in range(choices)]

    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:
        if isinstance(event, TextPart) and (event.text or event.reasoning or event.logprobs):
            yield {"index": event.index, **self.content_of(event.index, WholeChoice([event])), "finish_reason": None}
        elif isinstance(event, Ended):
            yield {"index": event.index, "text": "", "logprobs": None, "finish_reason": event.reason}

    def content_of(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        # A continuation is the whole text, reasoning included.
        text, logprobs = "".join(part.reasoning + part.text for part in choice.parts), None
        if self.logprobs:
            tokens = [token for part in choice.parts for token in part.logprobs]
            logprobs = {
                "tokens": [_name(token) for token in tokens],
                "token_logprobs": [finite(token.logprob) for token in tokens],
                "top_logprobs": [{_name(other): finite(other.logprob) for other in t.top} for t in tokens],
                "text_offset": [self._offset(index, token) for token in tokens],
            }
        return {"text": text, "logprobs": logprobs}

    def _offset(self, index: int, token: TokenLogprob) -> int:
        """The character offset of a token; a character of several tokens counts with its last token."""
        at, decoder = self._passed[index]
        self._passed[index] = at + len(decoder.decode(token.data)), decoder
        return at


def _name(token: TokenLogprob) -> str:
    """A token in OpenAI's older form: its text, or its bytes if they are not whole characters."""
    try:
        return token.data.decode() or token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


ROUTES = tuple(Route(path, completion, "POST") for path in ("/v1/completions", "/completions"))
