"""Values of requests, of a batch and to the server: what each may be, and the errors that name it. No MLX."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from ..errors import RequestError
from ..text import half_character, shortened

LARGE = 1e30
"""Numbers that logits are changed by are no larger: what they make of a logit is still a float32."""

STOP_CHARACTERS = 1000
"""Of a string that ends an answer, at most."""

TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
     "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
     "tokenizer_kwargs", "tools", "truncation"}
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that no request may give: it would bring code of its own, or get no text."""


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
