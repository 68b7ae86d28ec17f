"""A line of a batch file: read as the server reads its requests, and refused if it asks for what a batch cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import RequestError
from .api import HttpRequest, ParsedRequest
from .body import read_json
from .events import GenerationRequest
from .openai import chat, completion
from .prompting import Prompt, Prompter
from .requests import UNSUPPORTED, wrong

READERS: Mapping[str, Callable[[HttpRequest, Any], ParsedRequest]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
}


def read_line(body: Any, url: str, prompter: Prompter) -> tuple[GenerationRequest, Prompt]:
    """What a line asks for, and the prompt that the model is given.

    Raises:
        RequestError: the body is malformed, has a field that is not known, or asks for what is not supported.
    """
    if not isinstance(body, dict):
        raise RequestError("body: not a JSON object")
    other = {"/v1/chat/completions": "prompt", "/v1/completions": "messages"}[url]
    body = read_json(json.dumps(body).encode())  # of whole characters and finite numbers
    if other in body:
        raise wrong(other, f"not for {url}")
    parsed = READERS[url](HttpRequest(body), None)
    ask, *more = parsed.asks
    for name, asked in {
        "n": ask.choices != 1, "stream": parsed.answering.streams, "tools": ask.tools, "grammar": ask.grammar,
        "logprobs": ask.logprobs is not None, "response_format": ask.schema is not None,
    }.items():  # fmt: skip
        if asked:
            raise wrong(name, "not supported; leave it out", UNSUPPORTED)
    if more:
        raise wrong("prompt", "one string, or one list of token ids, is needed")
    for name in parsed.answering.ignored:
        raise wrong(name, "no such parameter", "unknown_parameter")
    ask = replace(ask, continued=False)
    return ask, prompter.prepare(ask)
