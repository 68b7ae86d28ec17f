"""OpenAI's chat completions and models, and what its other APIs share with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from ..checks import COUNT
from ..version import __version__
from .api import (
    Defaults,
    HttpRequest,
    ParsedRequest,
    ResponseWriter,
    Route,
    Whole,
    WholeChoice,
    logprob_entries,
    new_id,
)
from .events import Begun, Called, Ended, Event, Finished, GenerationRequest, ModelCard, RequestError, TextPart
from .requests import (
    MOST_TOOLS,
    UNSUPPORTED,
    Function,
    Message,
    Needed,
    Part,
    SamplerFields,
    Stops,
    TopLogprobs,
    called,
    continues,
    conversation,
    read,
    sampling_of,
    template_options,
    text_of,
    text_of_json,
    wrong,
)

MOST_CHOICES = 128
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def _some(tokens: int) -> int:
    if tokens == 0:
        raise PydanticCustomError("value", "give at least 1, or -1 for no limit")
    # As in LM Studio and llama.cpp.
    return COUNT if tokens == -1 else tokens


Tokens = Annotated[int, Field(ge=-1, le=COUNT), AfterValidator(_some)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Schema(Part):
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Schema):
    """The form of an answer; some clients give the schema next to the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


def schema_of(form: ResponseFormat | None, where: str) -> Mapping[str, Any] | None:
    """Converts a response format, given in the field ``where``, to ``GenerationRequest.form``."""
    if form is None or form.type == "text":
        return None
    schema = (form.json_schema or form).schema_ if form.type == "json_schema" else form.schema_
    if schema is None and form.type == "json_schema":
        raise wrong(f"{where}.json_schema.schema" if form.json_schema else f"{where}.schema", "is required")
    return schema or {}


class StreamOptions(Part):
    include_usage: bool = False


class OpenAIBody(SamplerFields):
    silent = frozenset({
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention",
    })  # fmt: skip

    model: str = ""
    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self, defaults: Defaults, effort: str | None) -> dict[str, Any]:
        """Arguments of the chat template; those of the request override the effort's, which override the server's."""
        thinks = None if effort is None else effort not in ("none", "minimal")
        own = template_options(self.chat_template_kwargs or {}, "chat_template_kwargs")
        return defaults.options(thinks, effort if thinks else None) | own


class TextBody(OpenAIBody):
    refused = {"grammar": ("",)}

    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: Stops = ()
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None  # llama.cpp's

    def request(self, defaults: Defaults) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "needs stream: true", UNSUPPORTED)
        return GenerationRequest(
            model=self.model,
            max_tokens=self.max_completion_tokens or self.max_tokens or defaults.max_tokens,
            sampling=sampling_of(self, defaults.sampling),
            stop=self.stop,
            form=schema_of(self.response_format, "response_format") if self.json_schema is None else self.json_schema,
            choices=self.n,
        )


class FunctionCall(Part):
    name: Needed
    arguments: str = ""


class ToolCall(Part):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str = ""
    tool_call_id: str = ""
    refusal: str = ""
    reasoning_content: str = ""
    reasoning: Any = None  # some clients send an object
    tool_calls: list[ToolCall] = []
    function_call: Literal[None] = None
    audio: Literal[None] = None

    def message(self, where: str) -> Message:
        answers = self.role == "assistant"
        made: Message = {"role": "system" if self.role == "developer" else self.role}
        if answers and self.content in (None, []):
            made["content"] = self.refusal
        else:
            made["content"] = text_of(self.content, f"{where}.content", opaque=self.role == "user")
        if self.name:
            made["name"] = self.name
        if self.role == "tool" and self.tool_call_id:
            made["tool_call_id"] = self.tool_call_id
        thought = self.reasoning_content or (self.reasoning if isinstance(self.reasoning, str) else "")
        if answers and thought:
            made["reasoning_content"] = thought
        if answers and self.tool_calls:
            at = [(call, f"{where}.tool_calls[{i}].function.arguments") for i, call in enumerate(self.tool_calls)]
            made["tool_calls"] = [
                called(call.id, call.function.name, text_of_json(call.function.arguments, place)) for call, place in at
            ]
        return made


class ChatTool(Part):
    type: Literal["function"]
    function: Function


class ChatBody(TextBody):
    refused = {
        **TextBody.refused, "audio": (), "function_call": ("none", "auto"), "functions": ([],),
        "modalities": (["text"],), "moderation": (), "web_search_options": (),
    }  # fmt: skip

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[ChatTool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False


def chosen_tool(choice: Any) -> str:
    """Converts a word, an object that names a function, or None (auto) to ``GenerationRequest.tool_choice``."""
    words = ("auto", "none", "required")
    if isinstance(choice, dict):
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, dict) else None
        if isinstance(name, str) and name not in words:
            return name
    elif choice is None or choice in words:
        return choice or "auto"
    raise wrong("tool_choice", "give auto, none, required, or an object that names a function")


def chat(http: HttpRequest) -> ParsedRequest:
    body = read(ChatBody, http.body)
    made = [message.message(f"messages[{i}]") for i, message in enumerate(body.messages)]
    if len(made) > 1 and made[-1] == {"role": "assistant", "content": ""}:
        made.pop()  # some apps add an empty message for the answer
    if body.add_generation_prompt and body.continue_final_message:
        raise wrong("continue_final_message", "excludes add_generation_prompt")
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    messages = conversation(made)
    request = replace(
        body.request(http.defaults),
        messages=messages,
        continued=continues(messages),
        tools=tuple(tool.function.tool() for tool in body.tools),
        tool_choice=chosen_tool(body.tool_choice),
        parallel_tools=body.parallel_tool_calls,
        template_options=body.options(http.defaults, body.reasoning_effort),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return ParsedRequest((request,), ChatWriter(body, body.n, logprobs=body.logprobs))


class ChatWriter(ResponseWriter):
    """Writes an answer as one object or as chunks; ``choices`` is the number of choices of all prompts together."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: TextBody, choices: int, *, logprobs: bool = False) -> None:
        super().__init__(body.stream, body.ignored())
        self.choices, self.logprobs = choices, logprobs
        self.usage = body.stream_options is not None and body.stream_options.include_usage
        self.head = {"id": new_id(self.prefix), "object": self.kind, "created": int(time.time()), "model": "",
                     "system_fingerprint": f"build-outcore-{__version__}"}  # fmt: skip

    def steps(self, event: Event) -> Iterable[dict[str, Any]]:
        chunk = self.head | {"object": self.chunk_kind}
        if isinstance(event, Begun):
            chunk["model"] = self.head["model"] = event.model
        if not isinstance(event, Finished):
            more = {"usage": None} if self.usage else {}
            yield from (chunk | {"choices": [choice]} | more for choice in self.deltas(event))
        elif self.usage:
            yield chunk | {"choices": [], "usage": usage(event), "timings": timings(event)}

    def closing(self) -> bytes:
        return b"data: [DONE]\n\n"

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        answer = Whole(events, self.choices)
        choices = [
            {"index": i, **self.content_of(i, choice), "finish_reason": choice.reason}
            for i, choice in enumerate(answer.choices)
        ]
        more = {"choices": choices, "usage": usage(answer.finished), "timings": timings(answer.finished)}
        return self.head | {"model": answer.begun.model} | more

    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:

        def delta(index: int, content: Any, end: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            return {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": end}

        match event:
            case Begun():
                yield from (delta(i, {"role": "assistant", "content": None}) for i in range(self.choices))
            case TextPart() if event.text or event.reasoning or event.logprobs:
                content = _thought(event.reasoning)
                content |= {"content": event.text} if event.text or not content else {}
                yield delta(event.index, content, logprobs=self._logprobs([event]))
            case Called():
                call = {"index": event.number, **called(event.id, event.name, event.arguments)}
                named = call | {"function": call["function"] | {"arguments": ""}}
                for part in (named, {"index": event.number, "function": {"arguments": event.arguments}}):
                    yield delta(event.index, {"tool_calls": [part]}, logprobs=self._logprobs([]))
            case Ended():
                yield delta(event.index, {}, event.reason)

    def content_of(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        content = None if choice.calls and not choice.text else choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _thought(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [called(call.id, call.name, call.arguments) for call in choice.calls]
        return {"message": message, "logprobs": self._logprobs(choice.parts)}

    def _logprobs(self, parts: Sequence[TextPart]) -> dict[str, Any] | None:
        """Log-probabilities of the answer's tokens; like OpenAI, without those of the reasoning."""
        entries = logprob_entries(part for part in parts if part.text or not part.reasoning)
        return {"content": entries, "refusal": None} if self.logprobs else None


def _thought(reasoning: str) -> dict[str, Any]:
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def usage(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.tokens,
        "total_tokens": finished.prompt_tokens + finished.tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
    }


def timings(finished: Finished) -> dict[str, Any]:
    """llama.cpp's timings, which some apps show: milliseconds, and tokens per second."""
    computed = finished.prompt_tokens - finished.cached_tokens
    found: dict[str, Any] = {"cache_n": finished.cached_tokens}
    for name, tokens, timed, seconds in (
        ("prompt", computed, computed, finished.prompt_s),
        # ``generation_s`` begins after the first token of each choice.
        ("predicted", finished.tokens, max(0, finished.tokens - finished.choices), finished.generation_s),
    ):
        found |= {f"{name}_n": tokens, f"{name}_ms": seconds * 1e3}
        found[f"{name}_per_second"] = timed / seconds if seconds > 0 else 0.0
    if finished.drafted:
        found |= {"draft_n": finished.drafted, "draft_n_accepted": finished.accepted}
    return found


def error_body(error: RequestError) -> dict[str, Any]:
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"  # llama.cpp's, by which agents know to shorten the conversation
    code = None if error.code == "invalid_request" else error.code
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": code, **error.counts}}


def models(http: HttpRequest) -> dict[str, Any]:
    return {"object": "list", "data": [_model(card) for card in http.service.models()]}


def model(http: HttpRequest) -> dict[str, Any]:
    return _model(http.service.card(http.params["model"]))


def _model(card: ModelCard) -> dict[str, Any]:
    """``max_model_len`` is vLLM's field for the context, ``meta`` is llama.cpp's."""
    more = {"input_modalities": ["text", "image"], "images": card.images} if card.images else {}
    meta = {"n_ctx_train": card.context, "n_params": card.parameters, "size": card.nbytes}
    return {"id": card.name, "object": "model", "created": card.created, "owned_by": "outcore",
            "max_model_len": card.context, "loaded": card.loaded, "meta": meta, **more}  # fmt: skip


ROUTES = tuple(
    route
    for prefix in ("/v1", "")
    for route in (
        Route(f"{prefix}/chat/completions", chat, "POST"),
        Route(f"{prefix}/models", models),
        Route(f"{prefix}/models/{{model:path}}", model),
    )
)
