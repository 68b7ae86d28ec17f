"""OpenAI's responses, without any that are kept: ``/v1/responses``."""

from __future__ import annotations

from typing import Any

from ..options import COUNT
from .endpoint import Endpoint, HttpRequest, ParsedRequest
from .exchange import GenerationRequest
from .fields import UNSUPPORTED, Fields, sound
from .openai_fields import TOP_LOGPROBS, body_schema, chosen_tool, effort_of, format_schema, length, speaks_of, template
from .openai_messages import continues
from .openai_response_events import ResponseAnswer
from .openai_response_input import read_input, read_tools

LOGPROBS = "message.output_text.logprobs"


def parse(request: HttpRequest) -> ParsedRequest:
    """A response.

    Raises:
        RequestError: it is malformed, or asks for what is not supported.
    """
    fields, defaults = Fields(request.body), request.defaults
    stream = fields.flag("stream")
    speaks_of(fields)
    fields.ignore("stream_options")
    fields.number("max_tool_calls", (int, 0, COUNT))
    for name in ("prompt_cache_key", "safety_identifier"):
        fields.text(name)
    for name in ("previous_response_id", "conversation", "prompt"):
        if fields.take(name) is not None:
            raise fields.error(name, "nothing is kept here; send the whole conversation as input", UNSUPPORTED)
    fields.refuse(background=(False,), moderation=())
    tools = read_tools(fields.take("tools"))
    messages = read_input(fields.text("instructions"), fields.take("input"))
    reasoning = fields.inner("reasoning") or Fields({})
    text = fields.inner("text") or Fields({}, "text")
    ask = GenerationRequest(
        model=fields.text("model"),
        messages=messages,
        continued=continues(messages, "input"),
        tools=tuple(tools.functions),
        tool_choice=_choice(fields, tools.known),
        parallel_tools=fields.flag("parallel_tool_calls", True),
        template_options=template(fields, defaults, effort_of(reasoning, "effort")),
        max_tokens=length(fields, defaults, "max_output_tokens"),
        sampling=fields.sampling(defaults.sampling),
        logprobs=_logprobs(fields),
        schema=format_schema(text, "format"),
    )
    summary = reasoning.take("summary") or reasoning.take("generate_summary")
    text.take("verbosity")
    answer = ResponseAnswer(
        stream, (), ask.model, _echoed(request.body, ask), tools.known, bool(summary), ask.logprobs is not None
    )
    answer.ignored = fields.unused(*tools.unused, *_unused(fields, text))
    return ParsedRequest((ask,), answer)


def _choice(fields: Fields, names: Any) -> str:
    choice = fields.take("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = choice | {"type": "function"}
    return chosen_tool(choice, names)


def _included(fields: Fields) -> list[Any]:
    include = fields.take("include")
    if include is not None and not (isinstance(include, list) and all(isinstance(i, str) for i in include)):
        raise fields.error("include", "a list of strings is needed")
    return include or []


def _logprobs(fields: Fields) -> int | None:
    top = fields.number("top_logprobs", TOP_LOGPROBS)
    return (top or 0) if top or LOGPROBS in _included(fields) else None


def _unused(fields: Fields, text: Fields) -> list[str]:
    """Names of what has no effect, of what was taken."""
    found = [f"include {name}" for name in _included(fields) if name != LOGPROBS]
    truncated = fields.word("truncation", ("auto", "disabled")) == "auto"
    return found + ["text.verbosity"] * (text.take("verbosity") is not None) + ["truncation"] * truncated


def _echoed(body: Any, ask: GenerationRequest) -> dict[str, Any]:
    """What the response tells of its request."""
    given = {name: sound(body.get(name), name) for name in ("metadata", "reasoning", "text", "tool_choice", "tools")}
    return {
        "background": False,
        "frequency_penalty": ask.sampling.frequency_penalty,
        "instructions": body.get("instructions"),
        "max_output_tokens": ask.max_tokens,
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": given["metadata"] or {},
        "parallel_tool_calls": ask.parallel_tools,
        "presence_penalty": ask.sampling.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": given["reasoning"] or {"effort": None, "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": ask.sampling.temperature,
        "text": {"format": {"type": "text"}} | (given["text"] or {}),
        "tool_choice": given["tool_choice"] or "auto",
        "tools": [_tool(tool) for tool in given["tools"] or []],
        "top_logprobs": ask.logprobs or 0,
        "top_p": ask.sampling.top_p,
        "truncation": "disabled",
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the response tells it: with all that the schema of a function has."""
    if tool.get("type") == "function":
        given = {name: value for name, value in tool.items() if value is not None}
        return {"description": None, "parameters": None, "strict": False} | given
    if tool.get("type") == "namespace":
        return {"description": ""} | tool | {"tools": [_tool(inner) for inner in tool["tools"]]}
    return tool


SUMMARY = "Answer items and messages, as OpenAI's responses"

BODY = body_schema(
    "input", input="", instructions="string", tools="array", tool_choice="", parallel_tool_calls="boolean",
    max_output_tokens="integer", reasoning="object", text="object", include="array", top_logprobs="integer",
    metadata="object",
)  # fmt: skip

ENDPOINTS = tuple(Endpoint(path, parse, summary=SUMMARY, schema=BODY) for path in ("/v1/responses", "/responses"))
