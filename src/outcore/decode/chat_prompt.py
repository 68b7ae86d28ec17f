"""From texts and messages to the text and the token ids of a prompt. No MLX: any thread may do it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import RequestError
from ..text import one_line, shortened
from .request_values import TEMPLATE_OWN, whole_text


def encode_text(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of a text, by mlx-lm's rule for special tokens: one that begins with the first of them has them all."""
    special = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(text, add_special_tokens=special))


def encode_rendered(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of what a chat template wrote: all special tokens are in it.

    Raises:
        RequestError: there are none, or half of a surrogate pair is in it.
    """
    tokens = list(tokenizer.encode(whole_text(text, "messages"), add_special_tokens=False))
    if not tokens:
        raise RequestError("messages: they are empty; give at least one token", param="messages")
    return tokens


def render(
    tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], **arguments: Any
) -> str:
    """What a model's chat template makes of messages.

    Args:
        options: that the request gives it.
        arguments: of ``apply_chat_template``.

    Raises:
        RequestError: an option that no request may give, or the template refuses it.
    """
    if given := TEMPLATE_OWN & options.keys():
        raise RequestError(f"{min(given)}: no option of the chat template", param=min(given))
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options, **arguments))
    except Exception as e:  # a template is code that comes with the model: it raises what it likes
        why = f"messages: the chat template refuses them: {one_line(e)}"
        raise RequestError(why, param="messages") from e


def same_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common before they differ."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_ids(tokens: Sequence[int], ids: Container[int], where: str = "prompt") -> None:
    """Refuse what is no prompt of token ids.

    Args:
        ids: all of the tokenizer's tokens.

    Raises:
        RequestError: there are none, or one that the model does not have.
    """
    if unknown := [t for t in tokens if t not in ids]:
        raise RequestError(f"{where}: the model has no token {shortened(unknown[0])}", param=where)
    if not tokens:
        raise RequestError(f"{where}: it is empty; give at least one token", param=where)
