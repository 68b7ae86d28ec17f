"""OpenAI's completions, of one prompt or several."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from ..checks import COUNT
from .api import HttpRequest, ParsedRequest, Route, WholeChoice, finite
from .events import Ended, Event, TextPart, TokenLogprob
from .openai import CHOICES, ChatWriter, TextBody
from .requests import UNSUPPORTED, TopLogprobs, read, wrong


class CompletionBody(TextBody):
    """A completion of one prompt or several."""

    refused = {**TextBody.refused, "echo": (False,), "suffix": ("",)}

    prompt: Any
    logprobs: TopLogprobs | Literal[False] | None = None
    best_of: int | None = None


def completion(http: HttpRequest) -> ParsedRequest:
    """``/v1/completions``: each prompt is asked by itself."""
    body = read(CompletionBody, http.body)
    if body.best_of not in (None, 1, body.n):
        raise wrong("best_of", "not supported; leave it out", UNSUPPORTED)
    prompts = _prompts(body.prompt)
    if len(prompts) * body.n > CHOICES:
        raise wrong("n", f"{len(prompts) * body.n} answers; at most {CHOICES} over all prompts")
    request = body.request(http.defaults)
    request = replace(request, logprobs=None if body.logprobs is False else body.logprobs)
    writer = CompletionWriter(body, len(prompts) * body.n, logprobs=request.logprobs is not None)
    return ParsedRequest(tuple(replace(request, prompt=prompt) for prompt in prompts), writer)


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    """One prompt or several: a string, token ids, or a list of those."""
    given = value if isinstance(value, list) and not _ids(value) else [value]
    if not 1 <= len(given) <= CHOICES:
        raise wrong("prompt", f"{len(given)} of them; from 1 to {CHOICES} are needed")
    for i, one in enumerate(given):
        if not (isinstance(one, str) and one) and not _ids(one):
            where = "prompt" if len(given) == 1 else f"prompt[{i}]"
            raise wrong(where, "a string, or a list of token ids, that is not empty, is needed")
    return [one if isinstance(one, str) else tuple(one) for one in given]


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t <= COUNT for t in value)


class CompletionWriter(ChatWriter):
    """Writes the texts that prompts are continued with."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, body: TextBody, choices: int, *, logprobs: bool = False) -> None:
        super().__init__(body, choices, logprobs=logprobs)
        self._passed = [(0, codecs.getincrementaldecoder("utf-8")("replace")) for _ in range(choices)]

    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:
        if isinstance(event, TextPart) and (event.text or event.reasoning or event.logprobs):
            yield {"index": event.index, **self.said(event.index, WholeChoice([event])), "finish_reason": None}
        elif isinstance(event, Ended):
            yield {"index": event.index, "text": "", "logprobs": None, "finish_reason": event.reason}

    def said(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        # Whoever continues a text wants all of it, what was thought too.
        text, told = "".join(part.reasoning + part.text for part in choice.parts), None
        if self.logprobs:
            tokens = [token for part in choice.parts for token in part.logprobs]
            told = {
                "tokens": [_name(token) for token in tokens],
                "token_logprobs": [finite(token.logprob) for token in tokens],
                "top_logprobs": [{_name(other): finite(other.logprob) for other in t.top} for t in tokens],
                "text_offset": [self._offset(index, token) for token in tokens],
            }
        return {"text": text, "logprobs": told}

    def _offset(self, index: int, token: TokenLogprob) -> int:
        """Where in the text a token begins; a character of several tokens counts with its last."""
        at, decoder = self._passed[index]
        self._passed[index] = at + len(decoder.decode(token.data)), decoder
        return at


def _name(token: TokenLogprob) -> str:
    """A token in OpenAI's older form: its bytes, if it is no text by itself."""
    try:
        return token.data.decode() or token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


ROUTES = tuple(
    Route(path, completion, "POST", "Continue a text, or several", CompletionBody)
    for path in ("/v1/completions", "/completions")
)
