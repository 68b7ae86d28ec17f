"""OpenAI's chat completions, completions and models: bodies to what the engine is asked, events to what is sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from ..checks import COUNT
from ..decode.request_values import template_options
from .api import Defaults, HttpRequest, ParsedRequest, Route, refused
from .events import GenerationRequest, ModelCard, Service
from .openai_answers import ChatWriter, CompletionWriter
from .requests import (
    MOST_TOOLS,
    UNSUPPORTED,
    Function,
    Needed,
    Part,
    SamplerFields,
    Stops,
    TopLogprobs,
    once,
    opaque,
    read,
    text_of_json,
    wrong,
)

CHOICES = 128
PROMPTS = 128
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text, in any of OpenAI's APIs."""

Message = dict[str, Any]


def _some(tokens: int) -> int:
    if tokens == 0:
        raise PydanticCustomError("value", "ask for at least one token, or -1 for as many as there is room for")
    # LM Studio's and llama.cpp's word for no limit.
    return COUNT if tokens == -1 else tokens


Tokens = Annotated[int, Field(ge=-1, le=COUNT), AfterValidator(_some)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Schema(Part):
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class Format(Schema):
    """The form of an answer; some clients write the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


def schema_of(form: Format | None, where: str) -> Mapping[str, Any] | None:
    """``GenerationRequest.schema`` of a form that stands there."""
    if form is None or form.type == "text":
        return None
    schema = (form.json_schema or form).schema_ if form.type == "json_schema" else form.schema_
    if schema is None and form.type == "json_schema":
        raise wrong(f"{where}.json_schema.schema" if form.json_schema else f"{where}.schema", "it is needed")
    return schema or {}


class StreamOptions(Part):
    include_usage: bool = False


class OpenAIBody(SamplerFields):
    """What the bodies of all of OpenAI's APIs have."""

    silent = frozenset({
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention",
    })  # fmt: skip

    model: str = ""
    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self, defaults: Defaults, effort: str | None) -> dict[str, Any]:
        """Arguments of the chat template: the server's, by the effort, and the request's own, which hold."""
        own = template_options(self.chat_template_kwargs)
        effort_says: dict[str, Any] = {}
        if effort is not None:
            thinks = effort not in ("none", "minimal")
            level = effort if effort in ("low", "medium") else "high"
            effort_says = {"enable_thinking": True, "reasoning_effort": level} if thinks else {"enable_thinking": False}
        return {**defaults.template_options, **effort_says, **own}


class TextBody(OpenAIBody):
    """What chats and completions have in common."""

    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: Stops = ()
    n: Annotated[int, Field(ge=1, le=CHOICES)] = 1
    response_format: Format | None = None
    grammar: str = ""  # llama.cpp's

    def request(self, defaults: Defaults) -> GenerationRequest:
        """What is asked, but for the prompt."""
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "only where stream is true", UNSUPPORTED)
        return GenerationRequest(
            model=self.model,
            max_tokens=self.max_completion_tokens or self.max_tokens or defaults.max_tokens,
            sampling=self.sampling(defaults.sampling),
            stop=self.stop,
            schema=schema_of(self.response_format, "response_format"),
            grammar=self.grammar,
            choices=self.n,
        )

    def writing(self) -> dict[str, Any]:
        """What the answer's writer has to know of it."""
        usage = self.stream_options is not None and self.stream_options.include_usage
        return {"streams": self.stream, "ignored": self.ignored(), "usage": usage}


class Call(Part):
    name: Needed
    arguments: str = ""


class ToolCall(Part):
    id: str = ""
    type: Literal["function"] = "function"
    function: Call


class ChatMessage(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str = ""
    tool_call_id: str = ""
    refusal: str = ""
    reasoning_content: str = ""
    reasoning: Any = None  # others write an object here, or details for their own use
    tool_calls: list[ToolCall] = []
    function_call: Literal[None] = None
    audio: Literal[None] = None

    def message(self, where: str) -> Message:
        """As chat templates take it."""
        answers = self.role == "assistant"
        empty = answers and self.content in (None, [])
        made: Message = {"role": ROLES[self.role]}
        made["content"] = self.refusal if empty else "".join(texts(self.content, f"{where}.content"))
        if self.name:
            made["name"] = self.name
        if self.role == "tool" and self.tool_call_id:
            made["tool_call_id"] = self.tool_call_id
        thought = self.reasoning_content or (self.reasoning if isinstance(self.reasoning, str) else "")
        if answers and thought:
            made["reasoning_content"] = thought
        if answers and self.tool_calls:
            made["tool_calls"] = [
                called(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls[{i}].function")
                for i, call in enumerate(self.tool_calls)
            ]
        return made


class ChatTool(Part):
    type: Literal["function"]
    function: Function


class ChatBody(TextBody):
    """A chat completion."""

    refused = {
        "audio": (), "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"],),
        "moderation": (), "web_search_options": (),
    }  # fmt: skip

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[ChatTool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None


class CompletionBody(TextBody):
    """A completion of one prompt or several."""

    refused = {"echo": (False,), "suffix": ("",)}

    prompt: Any
    logprobs: TopLogprobs | Literal[False] | None = None
    best_of: int | None = None


def texts(content: Any, where: str, kinds: Sequence[str] = TEXT) -> list[str]:
    """The texts of a message's content: a string, or parts of these kinds.

    Raises:
        RequestError: it is neither, or has a part of another kind.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not content:
        raise wrong(where, "a string, or a list of content parts, is needed")
    found = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise wrong(f"{where}[{i}]", "an object with a type is needed")
        if (kind := part.get("type")) not in kinds:
            raise opaque(kind, f"{where}[{i}]", kinds)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise wrong(f"{where}[{i}].text", "a string is needed")
        found.append(text)
    return found


def called(call_id: str, name: str, arguments: str, where: str) -> Message:
    """A call that an answer had, as chat templates take it."""
    function = {"name": name, "arguments": text_of_json(arguments, f"{where}.arguments")}
    return {"id": call_id, "type": "function", "function": function}


def conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with one system message in front, since many templates take only one, and with the names of the
    functions that tool messages are the results of."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if call["id"]}
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and name:
            message.setdefault("name", name)
    first = [m["content"] for m in itertools.takewhile(lambda m: m["role"] == "system", messages)]
    return (*([{"role": "system", "content": "\n\n".join(first)}] if first else []), *messages[len(first) :])


def continues(messages: Sequence[Message], where: str = "messages") -> bool:
    """Whether the last message is an answer's beginning, which is gone on with.

    Raises:
        RequestError: the last two are answers.
    """
    last = [m["role"] == "assistant" and bool(m["content"]) and not m.get("tool_calls") for m in messages[-2:]]
    if last == [True, True]:
        raise wrong(where, "the last two are of the assistant; one can be continued")
    return last[-1:] == [True]


def chosen_tool(choice: Any, names: Iterable[str]) -> str:
    """``GenerationRequest.tool_choice`` of a word, or of an object that names a function; None: auto.

    Raises:
        RequestError: it is neither, or there is no such tool.
    """
    known = set(names)
    if isinstance(choice, dict):
        inner = choice.get("function", choice)
        name = inner.get("name") if choice.get("type") == "function" and isinstance(inner, dict) else None
        if not isinstance(name, str) or name not in known or name in ("auto", "none", "required"):
            raise wrong("tool_choice", "there is no such function among the tools, or none that can be chosen")
        return name
    if choice not in (None, "auto", "none", "required"):
        raise wrong("tool_choice", "auto, none, required, or an object naming a function, is needed")
    if choice == "required" and not known:
        raise wrong("tool_choice", "required, but there are no tools")
    return choice or "auto"


def chat(request: HttpRequest, service: Service) -> ParsedRequest:
    """``/v1/chat/completions``."""
    body = read(ChatBody, request.body)
    made = [message.message(f"messages[{i}]") for i, message in enumerate(body.messages)]
    if len(made) > 1 and made[-1] == {"role": "assistant", "content": ""}:
        made.pop()  # apps keep a place for the answer so
    tools = once([tool.function.tool() for tool in body.tools])
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", "only where logprobs is true")
    messages = conversation(made)
    ask = replace(
        body.request(request.defaults),
        messages=messages,
        continued=continues(messages),
        tools=tools,
        tool_choice=chosen_tool(body.tool_choice, (tool["function"]["name"] for tool in tools)),
        parallel_tools=body.parallel_tool_calls,
        template_options=body.options(request.defaults, body.reasoning_effort),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return ParsedRequest((ask,), ChatWriter(**body.writing(), choices=body.n, logprobs=body.logprobs))


def completion(request: HttpRequest, service: Service) -> ParsedRequest:
    """``/v1/completions``: each prompt is asked by itself."""
    body = read(CompletionBody, request.body)
    if body.best_of not in (None, 1, body.n):
        raise wrong("best_of", "not supported; leave it out", UNSUPPORTED)
    prompts = _prompts(body.prompt)
    if len(prompts) * body.n > CHOICES:
        raise wrong("n", f"{len(prompts) * body.n} answers; at most {CHOICES} over all prompts")
    ask = body.request(request.defaults)
    ask = replace(ask, logprobs=None if body.logprobs is False else body.logprobs)
    writer = CompletionWriter(**body.writing(), choices=len(prompts) * body.n, logprobs=ask.logprobs is not None)
    return ParsedRequest(tuple(replace(ask, prompt=prompt) for prompt in prompts), writer)


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    """One prompt or several: a string, token ids, or a list of those."""
    given = value if isinstance(value, list) and not _ids(value) else [value]
    if not 1 <= len(given) <= PROMPTS:
        raise wrong("prompt", f"{len(given)} of them; from 1 to {PROMPTS} are needed")
    for i, one in enumerate(given):
        if not (isinstance(one, str) and one) and not _ids(one):
            where = "prompt" if len(given) == 1 else f"prompt[{i}]"
            raise wrong(where, "a string, or a list of token ids, that is not empty, is needed")
    return [one if isinstance(one, str) else tuple(one) for one in given]


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t <= COUNT for t in value)


def models(request: HttpRequest, service: Service) -> dict[str, Any]:
    """``/v1/models``."""
    return {"object": "list", "data": [_model(card) for card in service.models()]}


def model(request: HttpRequest, service: Service) -> dict[str, Any]:
    """``/v1/models/NAME``."""
    return _model(service.card(request.params["model"]))


def _model(card: ModelCard) -> dict[str, Any]:
    """``max_model_len`` is vLLM's word for the context, ``meta`` is llama.cpp's."""
    meta = {"n_ctx_train": card.context, "n_params": card.parameters, "size": card.nbytes}
    return {"id": card.name, "object": "model", "created": card.created, "owned_by": "outcore",
            "max_model_len": card.context, "loaded": card.loaded, "meta": meta}  # fmt: skip


NO_EMBEDDINGS = "no model here embeds; ask a server that has such a model"

ROUTES = (
    *(
        route
        for prefix in ("/v1", "")
        for route in (
            Route(f"{prefix}/chat/completions", chat, "POST", "Answer a chat", ChatBody),
            Route(f"{prefix}/completions", completion, "POST", "Continue a text, or several", CompletionBody),
            Route(f"{prefix}/models", models, summary="List the models"),
            Route(f"{prefix}/models/{{model:path}}", model, summary="One of the models"),
            refused(f"{prefix}/embeddings", NO_EMBEDDINGS),
        )
    ),
)
