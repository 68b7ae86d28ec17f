"""What the bodies of OpenAI's APIs have in common: sampler, length, tools, format of the answer, errors, usage."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import __version__
from ..decode.request_values import Bounds, template_options
from ..options import COUNT
from .endpoint import Defaults
from .exchange import Finished, RequestError, TokenLogprob
from .fields import SAMPLER, UNSUPPORTED, Fields, check_count, second, sound

CHOICES: Bounds = (int, 1, 128)
TOP_LOGPROBS: Bounds = (int, 0, 20)

FINGERPRINT = f"build-outcore-{__version__}"

SPEAKS_OF = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention",
)  # fmt: skip
"""Fields that say who asks and what becomes of the answer elsewhere, and nothing about it."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

LEAST_LOGPROB = -9999.0
"""OpenAI's number for what is as good as impossible; JSON has no infinity."""

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}{secrets.token_hex(12)}"


NO_EMBEDDINGS = "no model here embeds; ask a server that has such a model"


def error_type(error: RequestError) -> str:
    """OpenAI's ``type`` of an error."""
    if error.code == "context_length_exceeded":
        return "exceed_context_size_error"  # llama.cpp's, by which agents know that they have to shorten
    return TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    code = None if error.code == "invalid_request" else error.code
    told = {"message": str(error), "type": error_type(error), "param": error.param, "code": code, **error.counts}
    return {"error": told}


def speaks_of(fields: Fields) -> None:
    """Take what says nothing about an answer."""
    fields.ignore(*SPEAKS_OF)


def length(fields: Fields, defaults: Defaults, *names: str) -> int | None:
    """Tokens of the answer at most, by the first of these fields that is given."""
    given = [fields.number(name, (int, -1, COUNT)) for name in names]
    for name, tokens in zip(names, given, strict=True):
        if tokens == 0:
            raise fields.error(name, "ask for at least one token, or -1 for as many as there is room for")
    # LM Studio's and llama.cpp's word for no limit.
    return next((COUNT if tokens == -1 else tokens for tokens in given if tokens is not None), defaults.max_tokens)


def reasoning_options(effort: str | None) -> dict[str, Any]:
    """Arguments that chat templates know for an effort: some think or not, some take a word."""
    if effort is None:
        return {}
    if effort in ("none", "minimal"):
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": effort if effort in ("low", "medium") else "high"}


def template(fields: Fields, defaults: Defaults, effort: str | None) -> dict[str, Any]:
    """Further arguments of the chat template: the server's, by the effort, and the request's own, which hold."""
    own = sound(template_options(fields.take("chat_template_kwargs")), "chat_template_kwargs")
    return {**defaults.template_options, **reasoning_options(effort), **own}


def effort_of(fields: Fields, name: str = "reasoning_effort") -> str | None:
    """How much is to be thought."""
    return fields.word(name, EFFORTS)


def function_tools(tools: Any, where: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Functions that may be called, as chat templates take them; None: none.

    Raises:
        RequestError: it is no list of functions, or one has no name or the name of another.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RequestError(f"{where}: a list is needed", param=where)
    check_count(tools, where)
    found = [_nested(tool, f"{where}[{i}]") for i, tool in enumerate(tools)]
    if (twice := second([tool["function"]["name"] for tool in found])) is not None:
        raise RequestError(f"{where}[{twice}]: there is another tool of this name", param=f"{where}[{twice}]")
    return tuple(found)


def _nested(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(f"{where}.type: only function is supported", UNSUPPORTED, param=f"{where}.type")
    inner = Fields(tool, where).inner("function")
    if inner is None:
        raise RequestError(f"{where}.function: an object is needed", param=f"{where}.function")
    return function_tool(inner)


def function_tool(fields: Fields) -> dict[str, Any]:
    """One function, of its name, description and parameters.

    Raises:
        RequestError: it has no name, or something of another kind.
    """
    name, description, parameters = fields.text("name"), fields.text("description"), fields.inner("parameters")
    if not name or len(name) > 256:
        raise fields.error("name", "a name of at most 256 characters is needed")
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = sound(fields.take("parameters"), fields.at("parameters"))
    if fields.flag("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def chosen_tool(choice: Any, names: Iterable[str], where: str = "tool_choice") -> str:
    """``Ask.tool_choice`` for OpenAI's; None: auto. A choice is a word, or an object that names a function.

    Raises:
        RequestError: it is none, or of a tool that there is not.
    """
    known = set(names)
    if isinstance(choice, dict):
        inner = choice.get("function", choice)
        choice = inner.get("name") if choice.get("type") == "function" and isinstance(inner, dict) else None
        if not isinstance(choice, str) or choice not in known:
            raise RequestError(f"{where}: there is no such function among the tools", param=where)
        if choice in ("auto", "none", "required"):
            raise RequestError(f"{where}: a function of this name cannot be chosen", UNSUPPORTED, param=where)
        return choice
    if choice not in (None, "auto", "none", "required"):
        raise RequestError(f"{where}: auto, none, required, or an object naming a function", param=where)
    if choice == "required" and not known:
        raise RequestError(f"{where}: required, but there are no tools", param=where)
    return choice or "auto"


def format_schema(fields: Fields, name: str) -> Mapping[str, Any] | None:
    """``Ask.schema`` for ``response_format``; ``schema`` lies within ``json_schema`` there, or beside ``type``.

    Raises:
        RequestError: it is of another type, or no schema is given where one is needed.
    """
    inner = fields.inner(name)
    if inner is None:
        return None
    kind = inner.word("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise inner.error("type", "text, json_object or json_schema is needed")
    if kind == "text":
        return None
    holder = (inner.inner("json_schema") if kind == "json_schema" else None) or inner
    schema = json_schema(holder, "schema")
    if schema is None and kind == "json_schema":
        raise holder.error("schema", "a JSON schema is needed")
    return {} if schema is None else schema


def json_schema(fields: Fields, name: str) -> Mapping[str, Any] | None:
    """A field that is a JSON schema; None: it is not given."""
    if fields.inner(name) is None:
        return None
    schema: Mapping[str, Any] = sound(fields.take(name), fields.at(name))
    return schema


def body_schema(required: str, **properties: str) -> dict[str, Any]:
    """A body in JSON Schema, for the API's description.

    Args:
        properties: types of fields by their names, besides those that all bodies have; empty: several types.
    """
    known: dict[str, Any] = {name: {"type": kind} if kind else {} for name, kind in properties.items()}
    for name, (kind, least, most) in SAMPLER.items():
        known[name] = {"type": "integer" if kind is int else "number", "minimum": least, "maximum": most}
    for name in ("logit_bias", "chat_template_kwargs"):
        known[name] = {"type": "object"}
    known |= {"model": {"type": "string"}, "stream": {"type": "boolean"}}
    return {"type": "object", "required": [required], "properties": known}


def usage(finished: Finished) -> dict[str, Any]:
    """OpenAI's counts of tokens."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.tokens,
        "total_tokens": finished.prompt_tokens + finished.tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
    }


def timings(finished: Finished) -> dict[str, Any]:
    """llama.cpp's times, which apps show: milliseconds, and tokens per second."""
    computed = finished.prompt_tokens - finished.cached_tokens
    found: dict[str, Any] = {"cache_n": finished.cached_tokens}
    for name, tokens, timed, seconds in (
        ("prompt", computed, computed, finished.prompt_s),
        # The time begins with the first token of each answer.
        ("predicted", finished.tokens, max(0, finished.tokens - finished.choices), finished.generation_s),
    ):
        found |= {f"{name}_n": tokens, f"{name}_ms": seconds * 1e3}
        found[f"{name}_per_second"] = timed / seconds if seconds > 0 else 0.0
    if finished.drafted:
        found |= {"draft_n": finished.drafted, "draft_n_accepted": finished.accepted}
    return found


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def logprob_entries(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens as chats and responses tell them."""
    return [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in logprobs]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.data)}
