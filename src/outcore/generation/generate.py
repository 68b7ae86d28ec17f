"""``generate`` and ``stream_generate``: one sweep for the prompt however long, one or less a token, none more."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from inspect import signature
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import generate_step as generate_step_resident
from mlx_lm.generate import stream_generate as generate_resident
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import UsageError
from ..model.cache_form import check_cache
from ..model.cache_rollback import snapshot_bytes
from ..model.call_values import caches_in
from ..options import whole as whole_number
from ..runtime.session import Session
from ..text import refuse_unknown
from .generate_step import generate_step, responses
from .known import GRID, Known, captured_bytes, look_up
from .model_runner import MLX_LM_STEP
from .one_text import OneText, before_sweep, drafting_of, make_room
from .prompt import cached_tokens, check_ids, check_prompt, encode, note_length
from .served import served
from .wired import generating

_KNOWN = {*signature(generate_step_resident).parameters, *signature(generate_resident).parameters} | {
    "num_draft_tokens", "history", "leave_last",
}  # fmt: skip
"""Keyword arguments of ``stream_generate``."""


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Generate text from a model loaded by ``outcore.load``; mlx-lm's function of that name, for streamed weights.

    Args:
        prompt: text, or token ids.
        max_tokens: -1 for as many as the context holds.
        kwargs: ``mlx_lm.generate.generate_step``'s: sampler, logits_processors, max_kv_size, prompt_cache,
            prefill_step_size, kv_bits, kv_group_size, quantized_kv_start, prompt_progress_callback, input_embeddings.
            And ``draft_model``, a model with the same tokenizer, in memory, in place of what drafts for this one; and
            ``num_draft_tokens``: at most so many tokens are drafted for a sweep; None: as many as are worth it.
            ``history``: the tokens that ``prompt_cache`` holds, which what is drafted may repeat.
            ``leave_last``: ``prompt_cache`` need not hold the answer's last token, for which a sweep is saved.

    What ``prompt_cache`` holds afterwards is what mlx-lm leaves there: the prompt and all tokens that were yielded,
    also where the generator was closed before its end. After an exception it holds a part of them, never anything
    else: nothing of this call if nothing was yielded, else at least all but the last token; ``model.outcore.in_cache``
    says how many.

    One thread at a time: where another one generates with this model, this waits until it has done.

    Yields:
        mlx-lm's ``GenerationResponse``. For a streamed model ``generation_tps`` counts the tokens after the first
        over the time since the first; mlx-lm counts one more.

    Raises:
        PromptError: an empty prompt, or one longer than the model or the planned context allows.
        UsageError: ``prompt_cache`` is of another model.
        BusyError: another thread began a text and neither goes on with it nor closes it.
    """
    refuse_unknown(kwargs, _KNOWN)
    session: Session | None = getattr(model, "outcore", None)
    if session is not None:
        # Here and not where the text begins: Python handles signals before a generator's first instruction.
        session.in_cache = 0
    return _encoded(model, session, tokenizer, prompt, max_tokens, kwargs)


def _encoded(
    model: nn.Module,
    session: Session | None,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int,
    kwargs: dict[str, Any],
) -> Iterator[GenerationResponse]:
    max_tokens = whole_number("max_tokens", max_tokens, -1, 2**63 - 1)
    if max_tokens == 0:
        raise UsageError("max_tokens=0: ask for at least one token, or -1 for no limit")
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    ids = encode(tokenizer, prompt)
    if session is None:
        check_prompt(ids.size if kwargs.get("input_embeddings") is None else 1, max_tokens, None)
        for name in ("history", "leave_last"):
            kwargs.pop(name, None)
        yield from generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs)
        return
    yield from served(session.exclusive, _stream(model, session, tokenizer, ids, max_tokens, kwargs))


def _stream(
    model: nn.Module,
    session: Session,
    tokenizer: TokenizerWrapper,
    ids: mx.array,
    max_tokens: int,
    kwargs: dict[str, Any],
) -> Generator[GenerationResponse, None, None]:
    session.in_cache = 0
    session.bind_again()
    before: Sequence[int] = kwargs.pop("history", ())
    cache: list[Any] | None = kwargs.get("prompt_cache")
    embeddings = kwargs.get("input_embeddings")
    length = ids.size if embeddings is None else len(embeddings)
    check_cache(session.forms, cache)
    check_ids(ids, session, "the prompt")
    held = cached_tokens(cache or ())
    max_tokens = check_prompt(length, max_tokens, session, held, bounded=kwargs.get("max_kv_size") is None)
    note_length(held + length, session, "the prompt")
    own_step = kwargs.get("prefill_step_size") or session.prefill_step_size or MLX_LM_STEP
    kept = 0 if cache is None else max(snapshot_bytes(cache), session.size.states)
    if any(isinstance(c, RotatingKVCache) and c.keep for c in cache or ()) or kwargs.get("max_kv_size"):
        # What a token sees of such a window depends on the chunk that it is computed in: mlx-lm's, however little
        # memory there is.
        kwargs["prefill_step_size"] = own_step
    step = kwargs.get("prefill_step_size")
    kept += captured_bytes(session, length)
    kwargs["prefill_step_size"] = make_room(session, held + length + 1, length, step, kept=kept)
    if session.prefix is not None and step is None:
        kwargs["prefill_step_size"] = min(kwargs["prefill_step_size"], GRID)
    found, known = None, Known()
    bounded = any(kwargs.get(name) for name in ("kv_bits", "max_kv_size"))
    ours = cache is None or (session.prefix is not None and session.prefix.like(cache))
    if held == 0 and embeddings is None and not bounded and ours:
        found, known = look_up(session, cast(list[int], ids.tolist()), kwargs["prefill_step_size"])
    if found is not None and cache is None:
        kwargs |= {"prompt_cache": found.cache, "private": True, "leave_last": True}  # nobody goes on with it
    drafting, most = drafting_of(session, kwargs)
    with generating(model):
        plain = drafting is None and cache is None and kwargs.get("kv_bits") is None
        if session.streaming is None and plain and session.prefix is None:
            kwargs.pop("leave_last", None)
            for n, response in enumerate(generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs), 1):
                session.metrics.tokens += 1
                yield response
                # Mlx-lm computes one token ahead.
                before_sweep(session, held + length + n + 2)
            return
        text = OneText(session, held, drafting, most, before, kwargs.get("sampler"), tokenizer.eos_token_ids)
        tokens = generate_step(
            ids,
            model,
            lambda: session.streaming,
            max_tokens=max_tokens,
            quantize_step=own_step,
            known=known,
            reserve=text.reserve,
            speculation=text.speculation,
            counted=text.count,
            **kwargs,
        )
        if found is not None and cache is not None:
            tokens = _in_place(tokens, session, cache, found.cache)
        yield from responses(tokens, tokenizer, ids.size, max_tokens, session.metrics)


Steps = Generator[tuple[int, mx.array, bool], None, None]


def _in_place(tokens: Steps, session: Session, given: Sequence[Any], found: Sequence[Any]) -> Steps:
    """A text whose caches were found: whoever goes on with his own has them filled, or as they were if the text leaves
    nothing."""
    mine = list(caches_in(given))
    before = [dict(vars(c)) for c in mine]
    for c, filled in zip(mine, caches_in(found), strict=True):
        vars(c).update(vars(filled))
    try:
        yield from tokens
    finally:
        if session.in_cache == 0:
            for c, was in zip(mine, before, strict=True):
                vars(c).clear()
                vars(c).update(was)


def generate(
    model: nn.Module, tokenizer: Any, prompt: str | mx.array | Sequence[int], verbose: bool = False, **kwargs: Any
) -> str:
    """The whole answer as one string; arguments as in ``stream_generate``. ``verbose`` prints it as it is made, and how
    fast that was, as mlx-lm's function of that name."""
    text, response = "", None
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if not verbose:
        return text
    print()
    print("=" * 10)
    if response is None or not text:
        print("No text generated for this prompt")
        return text
    print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
    print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
    print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text
