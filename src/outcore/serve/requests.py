"""Shared parts of all APIs' bodies: pydantic models whose errors name the field, field types, and messages.

A field that is null counts as absent. Unknown fields are ignored, and a response header names them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import Request

from ..checks import COUNT, LEAST_TEMPERATURE
from ..decode.request_text import TEMPLATE_OWN, checked_text
from ..text import one_line, shortened
from .events import RequestError, Sampling

if TYPE_CHECKING:
    from .site import Site


UNSUPPORTED = "unsupported_parameter"

# Limit of penalties and biases, so that a changed logit is still a finite float32.
LARGE = 1e30

MOST_STOPS, STOP_CHARACTERS = 64, 1000
MOST_TOOLS = 1024
MOST_IGNORED = 32

# Replaces pydantic's messages that name Python types.
WORDS = {"missing": "is required", "model_type": "a JSON object is needed", "dict_type": "a JSON object is needed"}


class Part(BaseModel):
    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class Body(Part):
    """A request's body, which records its unknown fields.

    Attributes:
        refused: fields that are not supported, with the values that are accepted because they have no effect.
        silent: unknown fields that are not reported as ignored, since they do not concern the answer.
    """

    model_config = ConfigDict(extra="allow")

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    silent: ClassVar[frozenset[str]] = frozenset()

    def ignored(self, *more: str) -> tuple[str, ...]:
        """Names of ignored fields, and ``more``, as printable ASCII without commas."""
        extra = [name for name in self.model_extra or () if name not in self.refused and name not in self.silent]
        found = dict.fromkeys(ascii(shortened(name))[1:-1].replace(",", "") for name in (*extra, *more))
        return tuple(found)[:MOST_IGNORED]


B = TypeVar("B", bound=Body)


def read(model: type[B], body: Mapping[str, Any]) -> B:
    """Validate a body. Raises RequestError, whose ``param`` is the path of the wrong field."""
    for name, neutral in model.refused.items():
        value = body.get(name)
        if value is not None and not any(value == v and type(value) is type(v) for v in neutral):
            raise wrong(name, "not supported; leave it out", UNSUPPORTED)
    try:
        return model.model_validate(dict(body))
    except ValidationError as e:
        error = e.errors(include_url=False, include_context=False, include_input=False)[0]
        raise wrong(_path(body, error["loc"]), WORDS.get(error["type"], error["msg"])) from None


def _path(value: Any, place: Sequence[int | str]) -> str:
    """The path of pydantic's error location, without the names of types that it contains."""
    found = ""
    for part in place:
        if isinstance(part, int) and isinstance(value, list):
            found, value = f"{found}[{part}]", value[part]
        elif isinstance(part, str) and isinstance(value, dict):
            found, value = f"{found}.{part}", value.get(part)
    return found.removeprefix(".")


def wrong(where: str, why: str, code: str = "invalid_request") -> RequestError:
    return RequestError(f"{where}: {why}", code, param=where)


def _value_error(why: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{why}", {"why": why})


def _warm(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise _value_error(f"0, or at least {LEAST_TEMPERATURE}, is needed")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _value_error("give a string or a list of strings, none of them empty")
    if any(len(s) > STOP_CHARACTERS for s in stops):
        raise _value_error(f"a string is longer than {STOP_CHARACTERS} characters")
    if len(stops) > MOST_STOPS:
        raise _value_error(f"give at most {MOST_STOPS} strings")
    try:
        return tuple(checked_text(s, "stop") for s in stops)
    except RequestError as e:
        raise _value_error(str(e).removeprefix("stop: ")) from None


def _bias(value: dict[str, Any]) -> dict[int, float]:
    try:
        bias = {int(token): float(add) for token, add in value.items()}
    except (TypeError, ValueError):
        raise _value_error("an object of token ids and numbers is needed") from None
    except OverflowError:
        bias = {0: math.inf}
    if unknown := [token for token in bias if token < 0]:
        raise _value_error(f"the model has no token {shortened(unknown[0])}")
    if not all(-LARGE <= add <= LARGE for add in bias.values()):
        raise _value_error(f"numbers must be finite, from {-LARGE:g} to {LARGE:g}")
    return bias


def template_options(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Checks that a request gives no argument of the chat template that Outcore sets itself."""
    if own := sorted(TEMPLATE_OWN & options.keys()):
        raise wrong(f"{name}.{own[0]}", "Outcore sets this option itself; leave it out")
    return dict(options)


def text_of_json(text: str, where: str) -> dict[str, Any]:
    try:
        return read_json(text.encode())
    except RequestError:
        raise wrong(where, "a JSON object, written as a string, is needed") from None


Temperature = Annotated[float, Field(ge=0, le=LARGE), AfterValidator(_warm)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=COUNT)]
Change = Annotated[float, Field(ge=-LARGE, le=LARGE)]
Factor = Annotated[float, Field(ge=0, le=LARGE)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
# A string or a list of strings, validated to a tuple.
Stops = Annotated[Any, AfterValidator(_stops)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Needed = Annotated[str, Field(min_length=1)]


class SamplerFields(Body):
    temperature: Temperature | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_k: Count | None = None
    seed: Seed | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Factor | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Change | None = None
    presence_context_size: Count | None = None
    frequency_penalty: Change | None = None
    frequency_context_size: Count | None = None
    logit_bias: Annotated[dict[str, Any], AfterValidator(_bias)] | None = None


def sampling_of(body: Part, default: Sampling) -> Sampling:
    named = ((field.name, getattr(body, field.name, None)) for field in fields(Sampling))
    given = {name: value for name, value in named if value is not None}
    if given.get("repetition_penalty") == 0:  # means none, as in mlx_lm.server
        given["repetition_penalty"] = 1.0
    return replace(default, **given)


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type") or "object"
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise _value_error('a tool takes an object of arguments: the schema\'s type must be "object"')
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_arguments)]


class Function(Part):
    name: Name
    description: str = ""
    parameters: Parameters | None = None
    strict: bool = False

    def tool(self, **changes: Any) -> dict[str, Any]:
        given = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_defaults=True)
        return {"type": "function", "function": given | changes}


# One of ``GenerationRequest.messages``.
Message = dict[str, Any]

# Types of content parts that contain text.
TEXT = ("text", "input_text", "output_text", "refusal")

# Readers of a user's other content parts, such as images, by type: a server of a model that takes them adds those of
# packages (``READERS`` of the group ``parts``). Given the part and its path, one returns a part for the chat template,
# which the package makes ``ready`` before. A message with such a part keeps a list of parts as its content.
OPAQUE: dict[str, Callable[[dict[str, Any], str], Any]] = {}


def text_of(content: Any, where: str, texts: Sequence[str] = TEXT, between: str = "", *, opaque: bool = False) -> Any:
    """The text of a message's content; a list if ``opaque`` and a reader in ``OPAQUE`` took one of its parts.

    Args:
        texts: types of the parts that contain text.
        between: separator of the parts.

    Raises:
        RequestError: it is neither a string nor a list of such parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(where, "a string, or a list of content parts, is needed")
    return joined([part_of(part, f"{where}[{i}]", texts, opaque=opaque) for i, part in enumerate(content)], between)


def part_of(part: Any, where: str, texts: Sequence[str] = TEXT, *, opaque: bool = False) -> Any:
    """The text of a content part, or the part that its reader in ``OPAQUE`` returns."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong(where, "an object with a type field is needed")
    if kind in texts:
        if not isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
            raise wrong(f"{where}.text", "a string is needed")
        return text
    if opaque and kind in OPAQUE:
        return OPAQUE[kind](part, where)
    known = f"the models read {', '.join((*texts, *OPAQUE) if opaque else texts)}"
    why = "put it into a message of the user" if kind in OPAQUE else known
    raise wrong(where, f"{kind if kind.isidentifier() else 'this type'} is not supported here; {why}", UNSUPPORTED)


def joined(parts: Sequence[Any], between: str = "") -> Any:
    if all(isinstance(part, str) for part in parts):
        return between.join(parts)
    flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in flat]


def called(call_id: str, name: str, arguments: dict[str, Any] | str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Joins the first system messages, since many templates accept only one, and adds tool messages' function names."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if call["id"]}
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and name:
            message.setdefault("name", name)
    first = [m["content"] for m in itertools.takewhile(lambda m: m["role"] == "system", messages)]
    return (*([{"role": "system", "content": "\n\n".join(first)}] if first else []), *messages[len(first) :])


def continues(messages: Sequence[Message], where: str = "messages") -> bool:
    """Whether the answer continues the last message. Raises RequestError if the last two are the assistant's."""
    last = [m["role"] == "assistant" and bool(m["content"]) and not m.get("tool_calls") for m in messages[-2:]]
    if last == [True, True]:
        raise wrong(where, "the last two are the assistant's; only one message can be continued")
    return last[-1:] == [True]


R = TypeVar("R")

LARGE_BODY = 1 << 16
# Limit of nesting, since templates and grammars recurse into a body's values.
DEPTH = 100

BOM = b"\xef\xbb\xbf"


class HeldBody:
    """A request's body; its ``nbytes`` count against the limit of all bodies until ``release``."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.nbytes = self.received = 0

    def release(self) -> None:
        self._site.held_bytes -= self.nbytes
        self.nbytes = 0

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object of the body, empty without one.

        Raises:
            RequestError: 413 too large, 415 compressed, 503 too many bytes of bodies are held, 400 not JSON.
            ClientDisconnect: the client disconnected.
        """
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError("compressed bodies are not supported: send the body uncompressed", status=415)
        site, most, data = self._site, self._site.limits.body_bytes, bytearray()
        declared = request.headers.get("content-length", "")
        large = RequestError(f"the body is larger than {most} bytes", "request_too_large", status=413)
        if declared.isdecimal() and int(declared[:20]) > most:
            raise large
        async for chunk in request.stream():
            if len(data) + len(chunk) > most:
                raise large
            if site.held_bytes + len(chunk) > 4 * most:
                why = "the server holds too many large requests; try again later"
                raise RequestError(why, "overloaded", status=503, retry_after=1)
            site.held_bytes += len(chunk)
            self.nbytes += len(chunk)
            self.received += len(chunk)
            data += chunk
        return await self.work(read_json, data, site.limits.values)

    async def work(self, work: Callable[..., R], *args: Any) -> R:
        """Returns ``work(*args)``, computed in another thread if the request's body is large."""
        return await asyncio.to_thread(work, *args) if self.received > LARGE_BODY else work(*args)


def read_json(data: bytes | bytearray, values: int | None = None) -> dict[str, Any]:
    """The JSON object in ``data``, empty if there is none; all numbers are finite.

    Args:
        values: limit of commas and brackets in ``data``, those within strings included; None: no limit.

    Raises:
        RequestError: not a JSON object, or nested more than ``DEPTH`` deep (400), or too many values (413).
    """
    data = data.removeprefix(BOM)
    if not data.strip():
        return {}
    if values is not None and sum(map(data.count, (b",", b"[", b"{"))) > values:
        raise RequestError(f"the body has more than {values} commas and brackets", "request_too_large", status=413)
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as e:
        raise RequestError(f"the body is not JSON in UTF-8: {one_line(e)}") from None
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object")
    # Level by level: recursion could exhaust the stack.
    level: list[Any] = [value]
    for _ in range(DEPTH):
        held = [v for inner in level for v in (inner.values() if isinstance(inner, dict) else inner)]
        if any(type(v) is float and math.isinf(v) for v in held):
            raise RequestError("the body holds a number that is too large")
        level = [v for v in held if type(v) in (dict, list)]
        if not level:
            return value
    raise RequestError(f"the body has brackets nested more than {DEPTH} deep")
