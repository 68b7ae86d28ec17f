"""What the bodies of all APIs have in common: pydantic models whose errors name the field, and types of fields.

A field that is null is as good as one that is not there. Unknown fields have no effect; a header names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ..checks import COUNT, LEAST_TEMPERATURE
from ..decode import request_values
from ..decode.request_values import LARGE, stop_strings
from ..text import shortened
from .body import read_json
from .events import RequestError, Sampling

UNSUPPORTED = "unsupported_parameter"

MOST_STOPS = 64
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
T = TypeVar("T")


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
        where = _path(body, error["loc"])
        code = error["type"] if error["type"] == UNSUPPORTED else "invalid_request"
        raise wrong(where, WORDS.get(error["type"], error["msg"]), code) from None


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
    """That a field is not what it has to be."""
    return RequestError(f"{where}: {why}", code, param=where)


def opaque(kind: Any, where: str, known: Iterable[str]) -> RequestError:
    """What becomes of a content part that is no text: it is refused by its name.

    This is the seam for packages: one that turns images into embeddings would take such a part here, and messages
    would carry it to the prompt.
    """
    if isinstance(kind, str) and kind.isidentifier():
        return wrong(where, f"{kind} is not supported here: models read text only ({', '.join(known)})", UNSUPPORTED)
    return wrong(where, f"one of {', '.join(known)} is needed", UNSUPPORTED)


def checked(check: Callable[[Any], Any]) -> AfterValidator:
    """A check that raises RequestError, as a validator of a field."""

    def validate(value: Any) -> Any:
        try:
            return check(value)
        except RequestError as e:
            raise PydanticCustomError("value", "{why}", {"why": str(e).partition(": ")[2]}) from None

    return AfterValidator(validate)


def _warm(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise PydanticCustomError("value", "0, or at least {least}, is needed", {"least": LEAST_TEMPERATURE})
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = stop_strings(value)
    if len(stops) > MOST_STOPS:
        raise RequestError(f"stop: at most {MOST_STOPS} strings")
    return stops


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
Stops = Annotated[Any, checked(_stops)]
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
    logit_bias: Annotated[dict[str, Any], checked(request_values.logit_bias)] | None = None

    def sampling(self, default: Sampling) -> Sampling:
        """How tokens are drawn: as the body says, else as the server does."""
        return sampling_of(self, default)


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


def once(tools: Sequence[Mapping[str, Any]], suffix: str = "") -> tuple[Mapping[str, Any], ...]:
    """The tools.

    Raises:
        RequestError: two have the same name.
    """
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise wrong(f"tools[{i}]{suffix}", "there is another tool of this name")
        seen.add(name)
    return tuple(tools)
