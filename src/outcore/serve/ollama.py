"""Ollama's API: bodies of chats and completions to what the engine is asked, and its addresses."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ..checks import COUNT
from ..decode.request_values import LARGE
from .api import Defaults, Handled, HttpRequest, ParsedRequest, Route, refused
from .events import GenerationRequest, Sampling, Service
from .ollama_answers import OllamaWriter, timestamp
from .ollama_models import Named, plain_name, pull, running, show, tags
from .openai import NO_EMBEDDINGS
from .requests import (
    MOST_TOOLS,
    UNSUPPORTED,
    Body,
    Change,
    Factor,
    Function,
    Needed,
    Part,
    Seed,
    Share,
    Stops,
    Temperature,
    TopLogprobs,
    opaque,
    read,
    sampling_of,
    wrong,
)

VERSION = "0.13.0"
"""Of Ollama's API that this follows. Clients compare it to decide what they may ask for."""

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
DURATION = re.compile(rf"([+-]?)((?:{PART})+|\d+\.?\d*)", re.ASCII)

Message = dict[str, Any]


def _seconds(value: Any) -> Any:
    """Of a number, in quotes or not, or of one of Go's durations, such as ``1h30m``."""
    if not isinstance(value, str):
        return value
    if len(value) > 40 or (match := DURATION.fullmatch(value.strip())) is None:
        raise PydanticCustomError("value", "seconds, or a duration such as 5m or 1h30m, are needed")
    sign, rest = match.group(1), match.group(2)
    parts = re.findall(PART, rest) or [(rest, "s")]
    return sum(float(count) * UNITS[unit] for count, unit in parts) * (-1 if sign == "-" else 1)


def _whole(value: Any) -> Any:
    """Ollama takes 40.0 for 40."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stops(value: Any) -> Any:
    """Empty strings are passed over: they say nothing."""
    stops = [value] if isinstance(value, str) else value
    return [stop for stop in stops if stop != ""] if isinstance(stops, list) else stops


def _neutral(value: float) -> float:
    if value != 1:
        raise PydanticCustomError(UNSUPPORTED, "not supported; leave it out, or use top_p or min_p")
    return value


Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-COUNT, le=COUNT)]
"""Of the sampler: numbers below 0 mean none of it, or any."""


class Options(Body):
    temperature: Temperature | None = None
    top_k: Whole | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    seed: Annotated[Seed, BeforeValidator(_whole)] | None = None
    repeat_penalty: Factor | None = None
    presence_penalty: Change | None = None
    frequency_penalty: Change | None = None
    repeat_last_n: Annotated[int, BeforeValidator(_whole), Field(ge=-1, le=COUNT)] | None = None
    num_predict: Whole | None = None
    stop: Annotated[Stops, BeforeValidator(_stops)] = ()
    typical_p: Annotated[float, AfterValidator(_neutral)] | None = None

    def sampling(self, base: Sampling) -> Sampling:
        """What is not given is the server's: not Ollama's temperature of 0.8."""
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
        return replace(sampling_of(self, base), **given)


class Call(Part):
    name: Needed
    arguments: dict[str, Any] = {}


class ToolCall(Part):
    id: str = ""
    function: Call


class Turn(Part):
    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
    ]
    content: str = ""
    images: list[Any] = []
    thinking: str = ""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] = []
    tool_call_id: str = ""
    tool_name: str = ""
    name: str = ""


class Tool(Part):
    type: Literal["function"] = "function"
    function: Function


class OllamaBody(Named):
    """What chats and completions have in common."""

    stream: bool = True
    options: Options = Options()
    format: dict[str, Any] | Literal["", "json"] = ""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: Annotated[float, BeforeValidator(_seconds), Field(ge=-LARGE, le=LARGE)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0

    def request(self, defaults: Defaults, **changes: Any) -> GenerationRequest:
        """What is asked; the prompt is among the changes."""
        tokens, template = self.options.num_predict, dict(defaults.template_options)
        if self.think is not None:
            template["enable_thinking"] = self.think is not False
        if isinstance(self.think, str):
            template["reasoning_effort"] = "high" if self.think == "max" else self.think
        return GenerationRequest(
            model=plain_name(self.called),
            template_options=template,
            max_tokens=defaults.max_tokens if tokens is None else tokens if tokens > 0 else COUNT,
            sampling=self.options.sampling(defaults.sampling),
            stop=self.options.stop,
            logprobs=self.top_logprobs if self.logprobs else None,
            schema=self.format if isinstance(self.format, dict) else {} if self.format else None,
            keep_alive=self.keep_alive,
            **changes,
        )

    def writer(self, chat: bool) -> OllamaWriter:
        """What writes the answer."""
        options = [f"options.{name}" for name in self.options.ignored()]
        return OllamaWriter(self.stream, self.ignored(*options), chat=chat, model=self.called)


class ChatBody(OllamaBody):
    messages: list[Turn] = []
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []


class GenerateBody(OllamaBody):
    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: list[Any] = []
    suffix: str = ""
    template: str = ""
    context: list[Any] = []


INSTEAD = {
    "suffix": "write the model's own tokens for filling in into a prompt, with raw true",
    "template": "the model's own is used; or send a prompt that is written out, with raw true",
    "context": "Ollama has deprecated it; send the messages so far to /api/chat",
}
"""Fields of a completion that are not supported, and what to do."""


def chat(request: HttpRequest, service: Service) -> Handled:
    """``/api/chat``; without messages the model is loaded, or unloaded."""
    body = read(ChatBody, request.body)
    messages = _conversation(body.messages)
    if not messages:
        return _loaded(body, service, {"message": {"role": "assistant", "content": ""}})
    last = messages[-1]
    begun = bool(last["content"] or last.get("reasoning_content")) and "tool_calls" not in last
    nothing = {"type": "object", "properties": {}}
    tools = tuple(t.function.tool(parameters=nothing | (t.function.parameters or {})) for t in body.tools)
    continued = last["role"] == "assistant" and begun
    ask = body.request(request.defaults, messages=tuple(messages), continued=continued, tools=tools)
    return ParsedRequest((ask,), body.writer(chat=True))


def generate(request: HttpRequest, service: Service) -> Handled:
    """``/api/generate``; without a prompt the model is loaded, or unloaded."""
    body = read(GenerateBody, request.body)
    for name, why in INSTEAD.items():
        if getattr(body, name):
            raise wrong(name, f"not supported: {why}", UNSUPPORTED)
    if body.images:
        raise opaque("image", "images", ("prompt",))
    if body.raw and body.system:
        raise wrong("system", "a raw prompt is taken as it is; write it into the prompt")
    if not body.prompt:
        return _loaded(body, service, {"response": ""})
    first = [{"role": "system", "content": body.system}] if body.system else []
    asked: Any = {"messages": (*first, {"role": "user", "content": body.prompt})}
    ask = body.request(request.defaults, **({"prompt": body.prompt} if body.raw else asked))
    return ParsedRequest((ask,), body.writer(chat=False))


def _loaded(body: OllamaBody, service: Service, empty: dict[str, Any]) -> Awaitable[dict[str, Any]]:
    """Load a model, or unload it if it is to be kept for 0 seconds."""

    async def load() -> dict[str, Any]:
        card = await service.load(plain_name(body.called), body.keep_alive)
        done = {"done": True, "done_reason": "unload" if body.keep_alive == 0 else "load"}
        return {"model": body.called or card.name, "created_at": timestamp(datetime.now(UTC)), **empty, **done}

    return load()


def _conversation(turns: Sequence[Turn]) -> list[Message]:
    """As chat templates take them. Calls have ids, which Ollama's clients mostly leave out, in their order."""
    messages: list[Message] = []
    unanswered, calls = list[Message](), 0
    for i, turn in enumerate(turns):
        if turn.images:
            raise opaque("image", f"messages[{i}].images", ("content",))
        made: Message = {"role": turn.role, "content": turn.content}
        if turn.role == "assistant":
            if turn.thinking:
                made["reasoning_content"] = turn.thinking
            if turn.tool_calls:
                made["tool_calls"] = [
                    {
                        "id": call.id or f"call{calls + n:05d}",
                        "type": "function",
                        "function": call.function.model_dump(),
                    }
                    for n, call in enumerate(turn.tool_calls)
                ]
                calls, unanswered = calls + len(turn.tool_calls), list(made["tool_calls"])
        elif turn.role == "tool":
            name = turn.tool_name or turn.name
            if (call := _answered(unanswered, turn.tool_call_id, name)) is not None:
                made |= {"tool_call_id": call["id"], "name": name or call["function"]["name"]}
            else:
                made |= {k: v for k, v in (("tool_call_id", turn.tool_call_id), ("name", name)) if v}
        messages.append(made)
    return messages


def _answered(unanswered: list[Message], call_id: str, name: str) -> Message | None:
    """The call that a result belongs to, which is answered then: the first of this id, else of this name, else at
    all."""
    for n, call in enumerate(unanswered):
        if call["id"] == call_id if call_id else name in ("", call["function"]["name"]):
            return unanswered.pop(n)
    return None


FILES = "models are folders of files; put one where the server finds it, or start it with --model"

ROUTES = (
    Route("/api/chat", chat, "POST", "Answer a conversation", ChatBody),
    Route("/api/generate", generate, "POST", "Answer a prompt", GenerateBody),
    Route("/api/tags", tags, summary="List the models"),
    Route("/api/show", show, "POST", "One of the models", Named),
    Route("/api/ps", running, summary="The models that are in memory"),
    Route("/api/version", lambda request, service: {"version": VERSION}, summary="Of Ollama's API"),
    Route("/api/pull", pull, "POST", "Succeeds for a model that is there", Named),
    refused("/api/embed", NO_EMBEDDINGS),
    refused("/api/embeddings", NO_EMBEDDINGS),
    refused("/api/create", "use a Modelfile: outcore serve --modelfile FILE"),
    refused("/api/push", "nothing is sent anywhere from here"),
    refused("/api/copy", FILES),
    refused("/api/delete", FILES, "DELETE"),
    refused("/api/blobs/{digest}", FILES),
)
