"""What the bodies of all APIs have in common: pydantic models whose errors name the field, types of fields, and
messages on their way to a chat template.

A field that is null is as good as one that is not there. Unknown fields have no effect; a header names them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ..checks import COUNT, LEAST_TEMPERATURE
from ..decode.request_text import TEMPLATE_OWN, checked_text
from ..text import shortened
from .body import read_json
from .events import RequestError, Sampling

UNSUPPORTED = "unsupported_parameter"

LARGE = 1e30
"""Numbers that logits are changed by are no larger: what they make of a logit is still a float32."""

MOST_STOPS, STOP_CHARACTERS = 64, 1000
MOST_TOOLS = 1024
MOST_IGNORED = 32

WORDS = {"missing": "it is needed", "model_type": "a JSON object is needed", "dict_type": "a JSON object is needed"}
"""Of pydantic's errors that would speak of Python."""


class Part(BaseModel):
    """An object within a body."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class Body(Part):
    """An object whose unknown fields are named as ignored.

    Attributes:
        refused: fields that are known and not supported, with the values that ask for nothing and are let through.
        silent: fields that say nothing about an answer; they are not named as ignored.
    """

    model_config = ConfigDict(extra="allow")

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    silent: ClassVar[frozenset[str]] = frozenset()

    def ignored(self, *more: str) -> tuple[str, ...]:
        """Names of the fields that have no effect, and these: printable ASCII without commas."""
        extra = [name for name in self.model_extra or () if name not in self.refused and name not in self.silent]
        found = dict.fromkeys(ascii(shortened(name))[1:-1].replace(",", "") for name in (*extra, *more))
        return tuple(found)[:MOST_IGNORED]


B = TypeVar("B", bound=Body)


def read(model: type[B], body: Mapping[str, Any]) -> B:
    """A body as its model.

    Raises:
        RequestError: a field is missing, is not what it has to be, or is not supported; ``param`` is its path.
    """
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
    """Where a place in a body is. pydantic's places have names of types in them, too, which the body has not."""
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
        raise _value_error("a string, or a list of strings, none of them empty")
    if any(len(s) > STOP_CHARACTERS for s in stops):
        raise _value_error(f"a string of more than {STOP_CHARACTERS} characters")
    if len(stops) > MOST_STOPS:
        raise _value_error(f"at most {MOST_STOPS} strings")
    try:
        return tuple(checked_text(s, "stop") for s in stops)
    except RequestError as e:
        raise _value_error(str(e).removeprefix("stop: ")) from None


def _bias(value: dict[str, Any]) -> dict[int, float]:
    """What is added to logits, by token."""
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
    """Further arguments of a chat template.

    Raises:
        RequestError: some of them are not the request's to give.
    """
    if own := sorted(TEMPLATE_OWN & options.keys()):
        raise wrong(f"{name}.{own[0]}", "cannot be given here")
    return dict(options)


def text_of_json(text: str, where: str) -> dict[str, Any]:
    """An object that a string holds as JSON, such as a call's arguments; empty: one without fields."""
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
Stops = Annotated[Any, AfterValidator(_stops)]
"""A string or several, given as a tuple."""
Name = Annotated[str, Field(min_length=1, max_length=256)]
Needed = Annotated[str, Field(min_length=1)]


class SamplerFields(Body):
    """Fields named as ``Sampling``'s, which are mlx-lm's."""

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
    """The default with those of its fields that a body has, too."""
    named = ((field.name, getattr(body, field.name, None)) for field in fields(Sampling))
    given = {name: value for name, value in named if value is not None}
    if given.get("repetition_penalty") == 0:  # mlx_lm.server's word for none
        given["repetition_penalty"] = 1.0
    return replace(default, **given)


class Function(Part):
    """A function that may be called."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def tool(self, **changes: Any) -> dict[str, Any]:
        """As chat templates take it: OpenAI's form, without what is not given."""
        given = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_defaults=True)
        return {"type": "function", "function": given | changes}


Message = dict[str, Any]
"""As chat templates take it: see ``GenerationRequest.messages``."""

TEXT = ("text", "input_text", "output_text", "refusal")
"""Types of content parts that are text."""

OPAQUE: dict[str, Callable[[dict[str, Any], str], Any]] = {}
"""Readers of a user's content parts that are no text, by their types. The core has none: a package that reads images
puts a function here, which is given a part and its place, and returns what the chat template and the package's service
take. A message with such parts has a list of all its parts as its content."""


def text_of(content: Any, where: str, texts: Sequence[str] = TEXT, between: str = "", *, opaque: bool = False) -> Any:
    """The text of a string or of parts of these kinds; with ``opaque`` a list, if ``OPAQUE`` reads one of the parts.

    Raises:
        RequestError: it is neither, or has a part of another kind.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(where, "a string, or a list of content parts, is needed")
    return joined([part_of(part, f"{where}[{i}]", texts, opaque=opaque) for i, part in enumerate(content)], between)


def part_of(part: Any, where: str, texts: Sequence[str] = TEXT, *, opaque: bool = False) -> Any:
    """The text of a content part, or what ``OPAQUE`` makes of it."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong(where, "an object with a type is needed")
    if kind in texts:
        if not isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
            raise wrong(f"{where}.text", "a string is needed")
        return text
    if not opaque or kind not in OPAQUE:
        what = kind if kind.isidentifier() else "this type"
        raise wrong(where, f"{what} is not supported here: models read text only ({', '.join(texts)})", UNSUPPORTED)
    return OPAQUE[kind](part, where)


def joined(parts: Sequence[Any], between: str = "") -> Any:
    """Texts as one; a list of parts, if there are others among them."""
    if all(isinstance(part, str) for part in parts):
        return between.join(parts)
    flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in flat]


def called(call_id: str, name: str, arguments: dict[str, Any]) -> Message:
    """A call that an answer had."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


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
