"""Turns texts and messages into token ids, counts cached tokens, and refuses prompts that cannot be answered."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.tokenizer import whole_text
from ..engine.session import Session
from ..errors import PromptError, RequestError
from ..modules.hooks import flat
from ..plan.plan import ANSWER
from ..text import one_line, shortened
from .request_text import TEMPLATE_OWN, checked_text


def encode_text(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Returns a text's token ids. As in mlx-lm, special tokens are added unless the text begins with the BOS token."""
    special = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(text, add_special_tokens=special))


def encode_rendered(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Returns the token ids of a chat template's output, which has all special tokens already.

    Raises:
        RequestError: ``text`` has no tokens, or half of a surrogate pair.
    """
    tokens = list(tokenizer.encode(checked_text(text, "messages"), add_special_tokens=False))
    if not tokens:
        raise RequestError("messages: the chat template makes no tokens of them; give some text", param="messages")
    return tokens


def render(
    tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], **arguments: Any
) -> str:
    """Applies a model's chat template to messages, with the request's ``options`` and ``apply_chat_template``'s
    arguments.

    Raises:
        RequestError: a request may not give one of the options, or the template refuses the messages.
    """
    if given := TEMPLATE_OWN & options.keys():
        raise RequestError(f"{min(given)}: Outcore sets this option itself; leave it out", param=min(given))
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options, **arguments))
    except Exception as e:  # a template is code that comes with the model: it raises what it likes
        why = f"messages: the chat template refuses them: {one_line(e)}"
        raise RequestError(why, param="messages") from e


def same_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_known(tokens: Sequence[int], ids: Container[int], where: str = "prompt") -> None:
    """Checks a prompt of token ids; ``ids``: all tokens of the tokenizer; ``where``: the parameter to name in errors.

    Raises:
        RequestError: the prompt is empty, or has a token that the model does not have.
    """
    if unknown := [t for t in tokens if t not in ids]:
        raise RequestError(f"{where}: the model has no token {shortened(unknown[0])}", param=where)
    if not tokens:
        raise RequestError(f"{where}: it is empty; give at least one token", param=where)


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> mx.array:
    """Returns a prompt's token ids, int32 (tokens,), with special tokens as ``encode_text``.

    Raises:
        PromptError: the prompt is neither a text nor token ids.
    """
    if isinstance(prompt, mx.array):
        return prompt
    if isinstance(prompt, str):
        prompt = encode_text(tokenizer, whole_text(prompt))
    try:
        return mx.array(list(prompt), dtype=mx.int32)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # MLX cannot cast it
        raise PromptError(f"prompt={shortened(repr(prompt))}: give a text, or a list of token ids") from None


def cached_tokens(cache: Sequence[Any]) -> int:
    """Returns the number of tokens in a prompt cache: those of the layer with the most."""
    sizes = [c.size() for c in cache if hasattr(c, "size")]
    offsets = [c.offset for c in cache if isinstance(getattr(c, "offset", None), int)]
    return max([*sizes, *offsets], default=0)


def check_prompt(length: int, max_tokens: int, session: Session | None, held: int = 0, bounded: bool = True) -> int:
    """Returns ``max_tokens``, lowered to what the context allows.

    Args:
        length: tokens of the prompt.
        max_tokens: the most tokens of the answer; negative: as many as the context allows.
        held: tokens that a cache holds before the prompt.
        bounded: the caches grow with each token, so memory bounds the context; otherwise they have a fixed size.

    Raises:
        PromptError: the prompt is empty, has more tokens than the model has positions for, or does not fit into memory.
    """
    check_length(length, session, "the prompt", held)
    if session is None:
        return max_tokens
    if session.positions is not None:
        # The answer's last token needs no position, as it is never fed to the model.
        most = session.positions - held - length + 1
        max_tokens = min(max_tokens, most) if max_tokens > 0 else most
    longest = session.max_context
    if session.streaming is None or not bounded:
        return max_tokens
    planned = session.plan.context
    wanted = held + length + max(max_tokens, 1)
    if wanted > planned and not session.residency.holds(wanted, length):
        raise PromptError(
            f"{held + length} prompt tokens and {max(max_tokens, 1)} new ones pass the context of {planned} tokens "
            f"that memory was planned for: load with context={wanted}"
        )
    if max_tokens > 0:
        return max_tokens
    if (room := planned - held - length) > 0:
        return room
    # The prompt fills the planned context: allow an answer of usual length if room for it can be made.
    left = ANSWER if longest is None else longest - held - length
    more = min(ANSWER, left) if left > 0 else ANSWER
    return more if session.residency.holds(held + length + more, length) else 1


def most_tokens(length: int, max_tokens: int, session: Session, held: int = 0, bounded: bool = True) -> int:
    """As ``check_prompt``, but returns as many tokens as room can be made for, if that is fewer than ``max_tokens``,
    instead of raising an error."""

    def refused(tokens: int) -> bool:
        try:
            return check_prompt(length, tokens, session, held, bounded) < 0
        except PromptError:
            return True

    if max_tokens > 1 and refused(max_tokens):
        # Each token needs more memory, so the largest number that works is found by bisection.
        max_tokens = max(1, bisect_left(range(1, max_tokens), True, key=refused))
    return check_prompt(length, max_tokens, session, held, bounded)


def check_ids(ids: mx.array, session: Session, name: str) -> None:
    """Raises ``PromptError`` for tokens without an embedding: MLX would read other memory instead. ``name``: the
    prompt's, for the error."""
    if session.vocabulary is None or not ids.size:
        return
    least, most = (cast(int, end.item()) for end in (ids.min(), ids.max()))
    if least < 0 or most >= session.vocabulary:
        wrong = least if least < 0 else most
        raise PromptError(f"{name} has token {wrong}; this model's are 0 to {session.vocabulary - 1}")


def check_length(tokens: int, session: Session | None, name: str, held: int = 0) -> None:
    """Raises ``PromptError`` for a prompt that is empty, or longer than the model's positions after ``held`` tokens."""
    if tokens == 0:
        raise PromptError(f"{name} is empty; give at least one token")
    if session is not None and session.positions is not None and held + tokens > session.positions:
        raise PromptError(f"{name} has {held + tokens} tokens; this model's context is {session.positions}: shorten it")


def note_length(tokens: int, session: Session | None, name: str) -> None:
    """Notes for the user that a prompt is longer than the context that the model was trained for."""
    if session is not None and session.max_context is not None and tokens >= session.max_context:
        session.note(f"{name} has {tokens} tokens; this model was made for {session.max_context}; beyond that it errs")


def kept_at_most(model: nn.Module, cache: Sequence[Any] | None, max_kv_size: int | None, step: int) -> int | None:
    """Returns the most tokens that caches hold at a time while a text is computed, ``step`` prompt tokens at a time;
    None: all of the text. ``cache`` None: caches that mlx-lm makes (``make_prompt_cache``)."""
    if cache is None:
        bounded = max_kv_size is not None and not hasattr(model, "make_cache")
        return max_kv_size + step if bounded and max_kv_size is not None else None
    sizes = [c.max_size + step if isinstance(c, RotatingKVCache) else None for c in flat(cache)]
    return max((n for n in sizes if n is not None), default=None) if None not in sizes else None


def note_bounds(model: nn.Module, session: Session | None) -> bool:
    """Whether ``max_kv_size`` bounds the caches that mlx-lm makes for this model; if not, notes that for the user."""
    if not hasattr(model, "make_cache"):
        return True
    if session is not None:
        session.note("max_kv_size bounds nothing: this model makes its own caches")
    return False
