"""OpenAI's chat completions: ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .endpoint import Endpoint, HttpRequest, ParsedRequest
from .exchange import Begun, Called, Ended, Event, GenerationRequest, TextPart
from .fields import UNSUPPORTED, Fields
from .openai_chunks import Chunked, reason, streaming
from .openai_fields import (
    CHOICES,
    TOP_LOGPROBS,
    body_schema,
    chosen_tool,
    effort_of,
    format_schema,
    function_tools,
    json_schema,
    length,
    logprob_entries,
    speaks_of,
    template,
)
from .openai_messages import Message, chat_messages, continues


def parse(request: HttpRequest) -> ParsedRequest:
    """A chat completion.

    Raises:
        RequestError: it is malformed, or asks for what is not supported.
    """
    fields, defaults = Fields(request.body), request.defaults
    stream, include_usage = streaming(fields)
    speaks_of(fields)
    fields.refuse(
        audio=(), function_call=("none", "auto"), functions=([],), modalities=(["text"],),
        moderation=(), web_search_options=(),
    )  # fmt: skip
    tools = function_tools(fields.take("tools"))
    messages = chat_messages(fields.take("messages"))
    ask = GenerationRequest(
        model=fields.text("model"),
        messages=messages,
        continued=_continued(fields, messages),
        tools=tools,
        tool_choice=chosen_tool(fields.take("tool_choice"), (tool["function"]["name"] for tool in tools)),
        parallel_tools=fields.flag("parallel_tool_calls", True),
        template_options=template(fields, defaults, effort_of(fields)),
        max_tokens=length(fields, defaults, "max_completion_tokens", "max_tokens"),
        sampling=fields.sampling(defaults.sampling),
        stop=fields.stops(),
        logprobs=_logprobs(fields),
        schema=_schema(fields),
        grammar=fields.text("grammar"),  # llama.cpp's
        choices=fields.number("n", CHOICES) or 1,
    )
    answer = ChatAnswer(ask.choices, stream, include_usage, model=ask.model, logprobs=ask.logprobs)
    answer.verbose = fields.flag("verbose")  # llama.cpp's
    answer.ignored = fields.unused()
    return ParsedRequest((ask,), answer)


def _continued(fields: Fields, messages: Sequence[Message]) -> bool:
    """By vLLM's fields where they are given; else an answer at the end is gone on with, as llama.cpp does.

    Raises:
        RequestError: they contradict each other, or nothing is to begin an answer that is not gone on with.
    """
    new, old = fields.flag("add_generation_prompt"), fields.flag("continue_final_message", True)
    if new and fields.take("continue_final_message"):
        raise fields.error("continue_final_message", "not together with add_generation_prompt")
    continued = not new and old and continues(messages)
    if fields.take("add_generation_prompt") is False and not continued:
        why = "an answer needs its beginning; end with the assistant's message to go on with, or send a prompt"
        raise fields.error("add_generation_prompt", why, UNSUPPORTED)
    return continued


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.number("top_logprobs", TOP_LOGPROBS)
    if top and not wanted:
        raise fields.error("top_logprobs", "only where logprobs is true")
    return (top or 0) if wanted else None


def _schema(fields: Fields) -> Any:
    schema = format_schema(fields, "response_format")
    other = json_schema(fields, "json_schema")  # llama.cpp's word
    if schema is not None and other is not None:
        raise fields.error("json_schema", "there is a response_format already")
    return other if schema is None else schema


@dataclass
class ChatAnswer(Chunked):
    """One answer to a chat.

    Attributes:
        logprobs: as in ``GenerationRequest``.
        verbose: a whole answer tells the prompt, too.
    """

    logprobs: int | None = None
    verbose: bool = False

    prefix = "chatcmpl-"
    kinds = ("chat.completion", "chat.completion.chunk")

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        told = super().whole(events)
        if self.verbose:
            told["__verbose"] = {"prompt": next((e.prompt for e in events if isinstance(e, Begun)), "")}
        return told

    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:
        if isinstance(event, Begun):
            for index in range(self.choices):
                yield self._choice(index, {"role": "assistant", "content": None})
        elif isinstance(event, TextPart) and (event.text or event.reasoning or event.logprobs):
            yield self._piece(event)
        elif isinstance(event, Called):
            call = _call(event)
            named = call | {"function": call["function"] | {"arguments": ""}}
            rest = {"index": event.number, "function": {"arguments": event.arguments}}
            for part in (named, rest):
                yield self._choice(event.index, {"tool_calls": [part]}, self._told([]))
        elif isinstance(event, Ended):
            yield self._choice(event.index, {}) | {"finish_reason": event.reason}

    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        pieces = [e for e in events if isinstance(e, TextPart)]
        text, thought = "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)
        calls = [_call(e) for e in events if isinstance(e, Called)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if thought:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        entries = [entry for piece in pieces for entry in _entries(piece)]
        told = self._told(entries)
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason(events)}

    def _piece(self, piece: TextPart) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
        if piece.text or not delta:
            delta["content"] = piece.text
        return self._choice(piece.index, delta, self._told(_entries(piece)))

    def _choice(self, index: int, delta: dict[str, Any], told: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}

    def _told(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        return None if self.logprobs is None else {"content": entries, "refusal": None}


def _entries(piece: TextPart) -> list[dict[str, Any]]:
    """Of the answer's tokens; those of what is thought are not told, as OpenAI does."""
    return [] if piece.reasoning and not piece.text else logprob_entries(piece.logprobs)


def _call(event: Called) -> dict[str, Any]:
    function = {"name": event.name, "arguments": event.arguments}
    return {"index": event.number, "id": event.id, "type": "function", "function": function}


SUMMARY = "Answer a chat, as OpenAI's chat completions"

BODY = body_schema(
    "messages", messages="array", tools="array", tool_choice="", parallel_tool_calls="boolean", max_tokens="integer",
    max_completion_tokens="integer", stop="", n="integer", logprobs="boolean", top_logprobs="integer",
    response_format="object", reasoning_effort="string", stream_options="object",
)  # fmt: skip

ENDPOINTS = tuple(
    Endpoint(path, parse, summary=SUMMARY, schema=BODY) for path in ("/v1/chat/completions", "/chat/completions")
)
