"""Ollama's chat and completion; a streamed answer is lines of JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from outcore.checks import COUNT
from outcore.errors import RequestError
from outcore.serve import requests
from outcore.serve.api import (
    JSON_LINES,
    Defaults,
    Handled,
    HttpRequest,
    ParsedRequest,
    ResponseWriter,
    Route,
    Whole,
    WholeChoice,
    encoded,
    logprob_entries,
    refused,
)
from outcore.serve.events import Begun, Called, Ended, Event, Finished, GenerationRequest, Sampling, TextPart

from .ollama_models import Named, plain_name, pull, running, show, tags, timestamp

# The version of Ollama's API. Clients compare it to find out which features they may use.
VERSION = "0.13.0"

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
TIME = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h|$)", re.ASCII)


def _seconds(value: Any) -> Any:
    """Seconds of a number, which may be a string, or of a Go duration such as ``1h30m``."""
    if not isinstance(value, str):
        return value
    text = value.strip()[:40]
    parts = TIME.findall(text)
    if not parts or text not in {sign + "".join(map("".join, parts)) for sign in ("", "+", "-")}:
        raise PydanticCustomError("value", "give seconds, or a duration such as 5m or 1h30m")
    seconds: float = sum(float(count) * UNITS[unit or "s"] for count, unit in parts)
    return -seconds if text.startswith("-") else seconds


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    return [stop for stop in stops if stop != ""] if isinstance(stops, list) else stops


# May be negative, for none or for no limit.
Integer = Annotated[int, BeforeValidator(_whole), Field(ge=-COUNT, le=COUNT)]


class Options(requests.SamplerFields):
    top_k: Integer | None = None
    seed: Annotated[requests.Seed, BeforeValidator(_whole)] | None = None
    repeat_penalty: requests.Factor | None = None
    repeat_last_n: Annotated[int, BeforeValidator(_whole), Field(ge=-1, le=COUNT)] | None = None
    num_predict: Integer | None = None
    stop: Annotated[requests.Stops, BeforeValidator(_stops)] = ()

    def sampling(self, base: Sampling) -> Sampling:
        """The server's defaults (not Ollama's temperature of 0.8) with the options given."""
        given: dict[str, Any] = {}
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        if self.seed is not None:
            given["seed"] = self.seed if self.seed >= 0 else None
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty or 1.0
        if self.repeat_last_n == 0:
            given |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        elif self.repeat_last_n is not None:
            size = COUNT if self.repeat_last_n < 0 else self.repeat_last_n
            given |= {f"{kind}_context_size": size for kind in ("repetition", "presence", "frequency")}
        return replace(requests.sampling_of(self, base), **given)


class OllamaFunctionCall(requests.Part):
    name: requests.Needed
    arguments: dict[str, Any] = {}


class OllamaToolCall(requests.Part):
    id: str = ""
    function: OllamaFunctionCall


class OllamaMessage(requests.Part):
    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
    ]
    content: str = ""
    images: list[Any] = []
    thinking: str = ""
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=requests.MOST_TOOLS)] = []
    tool_call_id: str = ""
    tool_name: str = ""
    name: str = ""


class OllamaTool(requests.Part):
    type: Literal["function"] = "function"
    function: requests.Function


class OllamaBody(Named):
    stream: bool = True
    options: Options = Options()
    format: dict[str, Any] | Literal["", "json"] = ""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: Annotated[float, BeforeValidator(_seconds), Field(ge=-requests.LARGE, le=requests.LARGE)] | None = None
    logprobs: bool = False
    top_logprobs: requests.TopLogprobs = 0

    def parsed(self, defaults: Defaults, chat: bool, **changes: Any) -> ParsedRequest:
        tokens, think = self.options.num_predict, self.think
        effort = think if isinstance(think, str) else None
        request = GenerationRequest(
            model=plain_name(self.called),
            template_options=defaults.options(None if think is None else think is not False, effort),
            max_tokens=defaults.max_tokens if tokens is None else tokens if tokens > 0 else COUNT,
            sampling=self.options.sampling(defaults.sampling),
            stop=self.options.stop,
            logprobs=self.top_logprobs if self.logprobs else None,
            form=self.format if isinstance(self.format, dict) else {} if self.format else None,
            keep_alive=self.keep_alive,
            **changes,
        )
        ignored = self.ignored(*(f"options.{name}" for name in self.options.ignored()))
        return ParsedRequest((request,), OllamaWriter(self.stream, ignored, chat=chat, model=self.called))


class OllamaChatBody(OllamaBody):
    messages: list[OllamaMessage] = []
    tools: Annotated[list[OllamaTool], Field(max_length=requests.MOST_TOOLS)] = []


class GenerateBody(OllamaBody):
    refused = {"suffix": ("",), "template": ("",), "context": ([],)}

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: list[Any] = []


def chat(http: HttpRequest) -> Handled:
    """``/api/chat``; without messages it loads or unloads the model."""
    body = requests.read(OllamaChatBody, http.body)
    messages = requests.conversation(_messages(body.messages))
    if not messages:
        return _loaded(body, http, {"message": {"role": "assistant", "content": ""}})
    last = messages[-1]
    begun = bool(last["content"] or last.get("reasoning_content")) and "tool_calls" not in last
    continued, tools = last["role"] == "assistant" and begun, tuple(tool.function.tool() for tool in body.tools)
    return body.parsed(http.defaults, chat=True, messages=messages, continued=continued, tools=tools)


def generate(http: HttpRequest) -> Handled:
    """``/api/generate``; without a prompt it loads or unloads the model."""
    body = requests.read(GenerateBody, http.body)
    if body.raw and (body.system or body.images):
        raise requests.wrong("system", "not allowed with raw; write it into the prompt")
    if not body.prompt:
        return _loaded(body, http, {"response": ""})
    if body.raw:
        return body.parsed(http.defaults, chat=False, prompt=body.prompt)
    first = [{"role": "system", "content": body.system}] if body.system else []
    user = {"role": "user", "content": _content(body.prompt, body.images, "images")}
    return body.parsed(http.defaults, chat=False, messages=(*first, user))


async def _loaded(body: OllamaBody, http: HttpRequest, empty: dict[str, Any]) -> dict[str, Any]:
    card = await http.service.load(plain_name(body.called), body.keep_alive)
    done = {"done": True, "done_reason": "unload" if body.keep_alive == 0 else "load"}
    return {"model": body.called or card.name, "created_at": timestamp(datetime.now(UTC)), **empty, **done}


def _content(text: str, images: Sequence[Any], where: str) -> Any:
    parts = [{"type": "image", "data": image} for image in images]
    # As in Ollama, they come before the text.
    return requests.joined([*(requests.part_of(part, where, opaque=True) for part in parts), text])


def _messages(turns: Sequence[OllamaMessage]) -> list[requests.Message]:
    """Messages in the form of chat templates. Calls without an id, as Ollama's clients send them, are numbered."""
    messages: list[requests.Message] = []
    unanswered, calls = list[requests.Message](), 0
    for i, turn in enumerate(turns):
        content = _content(turn.content, turn.images, f"messages[{i}].images")
        made: requests.Message = {"role": turn.role, "content": content}
        if turn.role == "assistant" and turn.thinking:
            made["reasoning_content"] = turn.thinking
        if turn.role == "assistant" and turn.tool_calls:
            made["tool_calls"] = [
                requests.called(call.id or f"call{calls + n:05d}", call.function.name, call.function.arguments)
                for n, call in enumerate(turn.tool_calls)
            ]
            calls, unanswered = calls + len(turn.tool_calls), list(made["tool_calls"])
        if turn.role == "tool":
            name = turn.tool_name or turn.name
            call = _answered(unanswered, turn.tool_call_id, name) or {"id": turn.tool_call_id, "function": {"name": ""}}
            given = {"tool_call_id": call["id"], "name": name or call["function"]["name"]}
            made |= {key: value for key, value in given.items() if value}
        messages.append(made)
    return messages


def _answered(unanswered: list[requests.Message], call_id: str, name: str) -> requests.Message | None:
    """Remove and return the call that a result answers: the first with its id, without one the first with its name."""
    for n, call in enumerate(unanswered):
        if call["id"] == call_id if call_id else name in ("", call["function"]["name"]):
            return unanswered.pop(n)
    return None


class OllamaWriter(ResponseWriter):
    """Writes an answer of a chat or a completion as lines of JSON or as one object."""

    media_type = JSON_LINES

    def __init__(self, streams: bool, ignored: Sequence[str] = (), *, chat: bool, model: str) -> None:
        super().__init__(streams, ignored)
        self._chat, self._model, self._began = chat, model, time.monotonic()
        self._begun, self._reason = Begun(model, 0), "stop"

    def sent(self, steps: Any) -> bytes:
        return b"".join(encoded(step) + b"\n" for step in steps)

    def keepalive(self) -> bytes:
        """A record without text, since clients parse every line."""
        return self.sent([self._record(WholeChoice())])

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        (last,) = [step for event in events if not isinstance(event, TextPart | Called) for step in self.steps(event)]
        (choice,) = Whole(events).choices
        return last | self._record(choice, done=True)

    def steps(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Begun():
                self._begun = event
            case TextPart():
                yield self._record(WholeChoice([event]))
            case Called():
                yield self._record(WholeChoice(calls=[event]))
            case Ended():
                self._reason = "length" if event.reason == "length" else "stop"
            case Finished():
                yield self._record(WholeChoice(), done=True) | self._figures(event)

    def _record(self, choice: WholeChoice, done: bool = False) -> dict[str, Any]:
        text = choice.text
        message: dict[str, Any] = {"role": "assistant", "content": text} if self._chat else {"response": text}
        if choice.reasoning:
            message["thinking"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [
                {"id": c.id, "function": {"index": c.number, "name": c.name, "arguments": json.loads(c.arguments)}}
                for c in choice.calls
            ]
        record: dict[str, Any] = {"model": self._model or self._begun.model, "created_at": timestamp(datetime.now(UTC))}
        record |= {"message": message} if self._chat else message
        if logprobs := logprob_entries(choice.parts):
            record["logprobs"] = logprobs
        return record | {"done": done}

    def _figures(self, finished: Finished) -> dict[str, Any]:
        """Nanoseconds and tokens; ``prompt_eval_count`` includes cached tokens."""
        seconds = {"total": time.monotonic() - self._began, "load": self._begun.load_s,
                   "prompt_eval": finished.prompt_s, "eval": finished.generation_s}  # fmt: skip
        return {
            "done_reason": self._reason,
            **{f"{name}_duration": round(value * 1e9) for name, value in seconds.items()},
            "prompt_eval_count": finished.prompt_tokens,
            "eval_count": finished.tokens,
        }


def error_body(error: RequestError) -> dict[str, Any]:
    return {"error": str(error)}


FILES = "models are folders on disk; start the server with --model FOLDER"

ROUTES = (
    Route("/api/chat", chat, "POST"),
    Route("/api/generate", generate, "POST"),
    Route("/api/tags", tags),
    Route("/api/show", show, "POST"),
    Route("/api/ps", running),
    Route("/api/version", lambda http: {"version": VERSION}),
    Route("/api/pull", pull, "POST"),
    refused("/api/create", "use a Modelfile: outcore serve --modelfile FILE"),
    refused("/api/push", "this server uploads no models"),
    refused("/api/copy", FILES),
    refused("/api/delete", FILES, "DELETE"),
    refused("/api/blobs/{digest}", FILES),
)
