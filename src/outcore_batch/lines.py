"""Lines of a batch's input; their bodies are read as the server's API reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from outcore.checks import COUNT
from outcore.decode.request import Request
from outcore.decode.request_text import checked_text
from outcore.errors import RequestError
from outcore.serve import completions, openai
from outcore.serve.api import HttpRequest
from outcore.serve.choice import request_of
from outcore.serve.prompting import Prompter
from outcore.serve.requests import UNSUPPORTED, wrong

from .files import CHAT, BatchRequest


def line_request(uid: int, line: BatchRequest, prompter: Prompter, max_tokens: int) -> Request:
    """The engine's request for a line.

    Args:
        max_tokens: of its answer, where its body has none.

    Raises:
        RequestError: its body is malformed, or asks for what a batch does not support.
    """
    if not isinstance(line.body, dict):
        raise RequestError("body: not a JSON object")
    read = openai.chat if line.url == CHAT else completions.completion
    parsed = read(HttpRequest(cast(Any, None), line.body))
    (request, *more), writer = parsed.requests, parsed.writer
    given = {
        "stream": writer.streams,
        "n": request.choices > 1,
        "prompt": more,
        "tools": request.tools,
        "logprobs": request.logprobs is not None,
        "response_format": request.schema is not None,
    }
    for name in (name for name, value in given.items() if value):
        raise wrong(name, "not supported; leave it out", UNSUPPORTED)
    for name in writer.ignored:
        raise wrong(name, "no such parameter", "unknown_parameter")
    if request.max_tokens == COUNT:
        raise wrong("max_tokens", "a batch's answers need a limit")
    if isinstance(request.prompt, str):
        checked_text(request.prompt, "prompt")
    return request_of(uid, prompter.prepare(request), replace(request, max_tokens=request.max_tokens or max_tokens))
