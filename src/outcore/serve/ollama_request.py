"""Bodies of Ollama's API for chats and completions: what of them is understood, and what is refused with its reason."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..decode.request_values import LARGE, NUMBERS, Bounds, number
from ..options import COUNT
from .endpoint import Defaults
from .exchange import GenerationRequest, Sampling
from .fields import UNSUPPORTED, Fields, check_count

__all__ = ["OllamaRequest", "chat", "completion", "model_name", "plain_name"]

NAMES: dict[str, tuple[str, Bounds]] = {
    "temperature": ("temperature", NUMBERS["temperature"]),
    "top_k": ("top_k", (int, -COUNT, COUNT)),
    "top_p": ("top_p", NUMBERS["top_p"]),
    "min_p": ("min_p", NUMBERS["min_p"]),
    "seed": ("seed", NUMBERS["seed"]),
    "repeat_penalty": ("repetition_penalty", NUMBERS["repetition_penalty"]),
    "presence_penalty": ("presence_penalty", NUMBERS["presence_penalty"]),
    "frequency_penalty": ("frequency_penalty", NUMBERS["frequency_penalty"]),
}
"""Ollama's options, ``Sampling``'s names of them, and their bounds. Numbers below 0 mean: none of it, or any."""

THINK = (True, False, "low", "medium", "high", "max")
ROLES = ("system", "user", "assistant", "tool")

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
DURATION = re.compile(rf"([+-]?)((?:{PART})+|\d+\.?\d*)", re.ASCII)

Message = dict[str, Any]


def plain_name(name: str) -> str:
    """The model's name without the tag that Ollama takes for granted."""
    return name.removesuffix(":latest")


def model_name(fields: Fields) -> str:
    """The model as the client names it; ``name`` is an older word for ``model``."""
    older = fields.text("name")
    return fields.text("model") or older


def duration(fields: Fields, name: str) -> float | None:
    """Seconds: a number, in quotes or not, or one of Go's durations, such as ``1h30m``; None: it is not given."""
    value = fields.take(name)
    if isinstance(value, str) and len(value) <= 40 and (match := DURATION.fullmatch(value.strip())):
        sign, rest = match.group(1), match.group(2)
        parts = re.findall(PART, rest) or [(rest, "s")]
        return sum(float(count) * UNITS[unit] for count, unit in parts) * (-1 if sign == "-" else 1)
    if isinstance(value, str):
        raise fields.error(name, "seconds, or a duration such as 5m or 1h30m, are needed")
    return None if value is None else float(number(fields.at(name), value, (float, -LARGE, LARGE)))


@dataclass(frozen=True)
class OllamaRequest:
    """A request.

    Attributes:
        name: the model's, as the client gave it.
        ask: what the engine is asked; None: nothing, so the model is loaded or unloaded.
        ignored: fields and options that are unknown, or say nothing here.
    """

    name: str
    streams: bool
    keep_alive: float | None
    ask: GenerationRequest | None
    ignored: tuple[str, ...]


def chat(fields: Fields, defaults: Defaults) -> OllamaRequest:
    """A body of ``/api/chat``.

    Raises:
        RequestError: it is malformed, or asks for what is not supported.
    """
    messages = _conversation(fields)
    changes: dict[str, Any] = {"tools": _tools(fields)}
    if messages:
        last = messages[-1]
        begun = bool(last["content"] or last.get("reasoning_content")) and "tool_calls" not in last
        changes |= {"messages": tuple(messages), "continued": last["role"] == "assistant" and begun}
    return _parsed(fields, defaults, changes, empty=not messages)


def completion(fields: Fields, defaults: Defaults) -> OllamaRequest:
    """A body of ``/api/generate``.

    Raises:
        RequestError: it is malformed, or asks for what is not supported.
    """
    prompt, system, raw = fields.text("prompt"), fields.text("system"), fields.flag("raw")
    _no_images(fields)
    for name, neutral, why in (
        ("suffix", "", "write the model's own tokens for filling in into a prompt, with raw true"),
        ("template", "", "the model's own is used; or send a prompt that is written out, with raw true"),
        ("context", [], "Ollama has deprecated it; send the messages so far to /api/chat"),
    ):
        if fields.take(name) not in (None, neutral):
            raise fields.error(name, f"not supported: {why}", UNSUPPORTED)
    if raw and system:
        raise fields.error("system", "a raw prompt is taken as it is; write it into the prompt")
    first = [{"role": "system", "content": system}] if system else []
    messages = (*first, {"role": "user", "content": prompt})
    return _parsed(fields, defaults, {"prompt": prompt} if raw else {"messages": messages}, empty=not prompt)


def _parsed(fields: Fields, defaults: Defaults, changes: Mapping[str, Any], empty: bool) -> OllamaRequest:
    options = fields.inner("options") or Fields({}, "options")
    tokens = _number(options, "num_predict", (int, -COUNT, COUNT))
    top, name = fields.number("top_logprobs", (int, 0, 20)) or 0, model_name(fields)
    ask = GenerationRequest(
        model=plain_name(name), template_options={**defaults.template_options, **_think(fields)},
        max_tokens=defaults.max_tokens if tokens is None else tokens if tokens > 0 else COUNT,
        sampling=_sampling(options, defaults.sampling), stop=_stop(options),
        logprobs=top if fields.flag("logprobs") else None, schema=_format(fields),
        keep_alive=duration(fields, "keep_alive"), **changes,
    )  # fmt: skip
    if options.take("typical_p") not in (None, 1):
        raise options.error("typical_p", "not supported; leave it out, or use top_p or min_p", UNSUPPORTED)
    streams = fields.flag("stream", True)
    return OllamaRequest(name, streams, ask.keep_alive, None if empty else ask, fields.unused(*options.rest()))


def _number(options: Fields, name: str, bounds: Bounds) -> Any:
    """Ollama takes 40.0 for 40."""
    value = options.take(name)
    if bounds[0] is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value is None else number(options.at(name), value, bounds)


def _stop(options: Fields) -> tuple[str, ...]:
    """Empty strings are passed over: they say nothing."""
    value = options.take("stop")
    stops = [value] if isinstance(value, str) else value
    return Fields({"stop": [s for s in stops if s != ""] if isinstance(stops, list) else stops}, "options").stops()


def _sampling(options: Fields, base: Sampling) -> Sampling:
    """What is not given is the server's: not Ollama's temperature of 0.8."""
    found = {to: _number(options, name, bounds) for name, (to, bounds) in NAMES.items()}
    given = {name: value for name, value in found.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = max(0, given["top_k"])
    if given.get("seed", 0) < 0:
        given["seed"] = None
    if given.get("repetition_penalty") == 0:
        given["repetition_penalty"] = 1.0
    last = _number(options, "repeat_last_n", (int, -1, COUNT))
    if last == 0:
        given |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    elif last is not None:
        size = COUNT if last < 0 else last
        given |= {f"{kind}_context_size": size for kind in ("repetition", "presence", "frequency")}
    return replace(base, **given)


def _think(fields: Fields) -> dict[str, Any]:
    value = fields.take("think")
    if value is None:
        return {}
    if not any(value == word and type(value) is type(word) for word in THINK):
        raise fields.error("think", "true, false, low, medium, high or max is needed")
    level = {} if isinstance(value, bool) else {"reasoning_effort": "high" if value == "max" else value}
    return {"enable_thinking": value is not False, **level}


def _format(fields: Fields) -> Mapping[str, Any] | None:
    value = fields.take("format")
    if value in ("", "json"):
        return {} if value else None
    if value is not None and not isinstance(value, dict):
        raise fields.error("format", "json, or a JSON schema, is needed")
    return fields.sound("format")


def _no_images(fields: Fields) -> None:
    if fields.take("images") not in (None, []):
        raise fields.error("images", "image input is not supported: models here read text only", UNSUPPORTED)


def _tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    given = fields.objects("tools")
    check_count(given, "tools")
    return tuple(_tool(tool) for tool in given)


def _tool(fields: Fields) -> dict[str, Any]:
    inner = fields.inner("function")
    if fields.take("type") not in (None, "function") or inner is None:
        raise fields.error("function", "type function, and an object with a name and parameters, are needed")
    function: dict[str, Any] = {"name": inner.needed("name")}
    if description := inner.text("description"):
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {}} | (inner.sound("parameters") or {})
    return {"type": "function", "function": function}


def _conversation(fields: Fields) -> list[Message]:
    """As chat templates take them. Calls have ids, which Ollama's clients mostly leave out, in their order."""
    messages: list[Message] = []
    unanswered, calls = _Unanswered([]), 0
    for message in fields.objects("messages"):
        role = message.take("role")
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise message.error("role", f"one of {', '.join(ROLES)} is needed")
        _no_images(message)
        turn: Message = {"role": role.lower(), "content": message.text("content")}
        if turn["role"] == "assistant":
            if thinking := message.text("thinking"):
                turn["reasoning_content"] = thinking
            if called := [_call(call, calls + i) for i, call in enumerate(message.objects("tool_calls"))]:
                turn["tool_calls"] = called
                calls, unanswered = calls + len(called), _Unanswered(called)
        elif turn["role"] == "tool":
            turn |= _answers(message, unanswered)
        messages.append(turn)
    return messages


def _call(fields: Fields, place: int) -> dict[str, Any]:
    function = fields.inner("function")
    if function is None:
        raise fields.error("function", "an object with a name and arguments is needed")
    called = {"name": function.needed("name"), "arguments": function.sound("arguments") or {}}
    return {"id": fields.text("id") or f"call{place:05d}", "type": "function", "function": called}


class _Unanswered:
    """Calls whose results have not come."""

    def __init__(self, calls: Sequence[dict[str, Any]]) -> None:
        self._open = dict(enumerate(calls))
        self._places: dict[tuple[str, str], deque[int]] = {}
        for place, call in self._open.items():
            for key in (("id", call["id"]), ("name", call["function"]["name"]), ("any", "")):
                self._places.setdefault(key, deque()).append(place)

    def first(self, call_id: str, name: str) -> dict[str, Any] | None:
        """The first of this id, else of this name, else at all; it is answered then."""
        places = self._places.get(("id", call_id) if call_id else ("name", name) if name else ("any", ""), deque())
        while places:
            if (call := self._open.pop(places.popleft(), None)) is not None:
                return call
        return None


def _answers(fields: Fields, unanswered: _Unanswered) -> dict[str, str]:
    """Which call this is the result of: the one of its id, else the first of its name, else the first."""
    call_id, older = fields.text("tool_call_id"), fields.text("name")
    name = fields.text("tool_name") or older
    if (call := unanswered.first(call_id, name)) is not None:
        return {"tool_call_id": call["id"], "name": name or call["function"]["name"]}
    return {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value}
