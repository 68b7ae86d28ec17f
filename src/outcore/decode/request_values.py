"""Values of requests, of a batch and to the server: what each may be, and the errors that name it. No MLX."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

from ..checks import COUNT, LEAST_TEMPERATURE
from ..errors import RequestError
from ..text import half_character, shortened

LARGE = 1e30
"""Numbers that logits are changed by are no larger: what they make of a logit is still a float32."""

STOP_CHARACTERS = 1000
"""Of a string that ends an answer, at most."""

Bounds = tuple[type, float, float]
"""``int`` or ``float``, least and most."""

NUMBERS: dict[str, Bounds] = {
    "temperature": (float, 0, LARGE), "top_p": (float, 0, 1), "min_p": (float, 0, 1), "top_k": (int, 0, COUNT),
}  # fmt: skip
"""Of the sampler. Names and ranges are those of ``mlx_lm.server``."""

TEMPLATE_OWN = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools",
    "truncation",
}  # fmt: skip
"""Arguments of ``apply_chat_template`` that whoever calls it gives; the template itself is the model's."""


def number(name: str, value: Any, bounds: Bounds) -> Any:
    """The value, if it is a number within the bounds; whole ones stay ints.

    Raises:
        RequestError: it is not.
    """
    kind, least, most = bounds
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and (kind is int or not isinstance(value, float)):
        raise RequestError(f"{name}: {'a whole number' if kind is int else 'a number'} is needed", param=name)
    # Whole numbers of JSON have no end: they are compared, and no float is made of them.
    if value != value or value in (math.inf, -math.inf):
        raise RequestError(f"{name}: {value} is out of range; a finite number is needed", param=name)
    if not least <= value <= most:
        wanted = f"at least {least:g}" if value < least else f"at most {most:g}"
        wanted = f"from {least:g} to {most:g}" if most == 1 else wanted
        raise RequestError(f"{name}: {_shown(value)} is out of range; {wanted}", param=name)
    if name.endswith("temperature") and 0 < value < LEAST_TEMPERATURE:
        raise RequestError(f"{name}: {value} is out of range; 0, or at least {LEAST_TEMPERATURE:g}", param=name)
    return value


def _shown(value: float) -> str:
    try:
        return shortened(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "it"


def stop_strings(value: Any, name: str = "stop") -> tuple[str, ...]:
    """One string or several, none of them empty; None: none.

    Raises:
        RequestError: it is something else.
    """
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"{name}: a string, or a list of strings, none of them empty", param=name)
    if any(len(s) > STOP_CHARACTERS for s in stops):
        raise RequestError(f"{name}: a string of more than {STOP_CHARACTERS} characters", param=name)
    return tuple(whole_text(s, name) for s in stops)


def logit_bias(value: Any, ids: Container[int] | None = None) -> dict[int, float]:
    """What is added to logits, by token; None: nothing.

    Args:
        ids: tokens that there are, if they are known.

    Raises:
        RequestError: it is something else, or names others.
    """
    name = "logit_bias"
    try:
        bias = {int(token): float(add) for token, add in (value or {}).items()}
    except (AttributeError, TypeError, ValueError):
        raise RequestError(f"{name}: an object of token ids and numbers is needed", param=name) from None
    except OverflowError:
        raise RequestError(f"{name}: a number is out of range; from {-LARGE:g} to {LARGE:g}", param=name) from None
    if unknown := [token for token in bias if (token < 0 if ids is None else token not in ids)]:
        raise RequestError(f"{name}: the model has no token {_shown(unknown[0])}", param=name)
    if not all(-LARGE <= add <= LARGE for add in bias.values()):
        raise RequestError(f"{name}: numbers must be finite, from {-LARGE:g} to {LARGE:g}", param=name)
    return bias


def template_options(value: Any, name: str = "chat_template_kwargs") -> dict[str, Any]:
    """Further arguments of a chat template; None: none.

    Raises:
        RequestError: it is no object, or has arguments that are not the request's to give.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name}: not a JSON object", param=name)
    if own := sorted(TEMPLATE_OWN & value.keys()):
        raise RequestError(f"{name}.{own[0]}: cannot be given here", param=f"{name}.{own[0]}")
    return value


def whole_text(text: str, where: str) -> str:
    """The text, if it is one: JSON can escape half of a surrogate pair, which no tokenizer takes.

    Raises:
        RequestError: it is not.
    """
    if (at := half_character(text)) is not None:
        wanted = "write the pair, or the character"
        raise RequestError(f"{where}: character {at} is half of a surrogate pair; {wanted}", param=where)
    return text
