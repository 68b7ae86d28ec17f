"""``generate`` and ``stream_generate``: one sweep for the prompt however long, one or less a token, none more."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from inspect import signature
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationResponse
from mlx_lm.generate import generate_step as generate_step_resident
from mlx_lm.generate import stream_generate as generate_resident
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checks import whole as whole_number
from ..engine.session import Session
from ..errors import BudgetError, UsageError
from ..machine.allocator import note_held
from ..machine.interrupts import check
from ..modules.cache_form import check_cache
from ..modules.cache_rollback import snapshot_bytes
from ..modules.call_values import caches_in
from ..text import refuse_unknown
from .eviction import (
    Steps,
    bounded_tokens,
    eviction_of,
    halved,
    halving,
    kept_at_most,
    note_bounds,
    refuse_unknown_text,
)
from .generate_step import generate_step, responses
from .known import Known, KvBits, PrefixMatch, block_step, captured_bytes, look_up, unkept
from .model_runner import MLX_LM_STEP
from .one_text import OneText, before_sweep, drafting_of, make_room
from .prompt import cached_tokens, check_ids, check_prompt, encode, note_length
from .served import served
from .wired import generating

_KNOWN = {*signature(generate_step_resident).parameters, *signature(generate_resident).parameters} | {
    "num_draft_tokens", "history", "leave_last", "kv_eviction", "shared_prefix",
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
            ``kv_eviction``: what goes where the text has ``max_kv_size`` tokens: ``window`` (mlx-lm's: older ones, one
            by one, but for the first four), ``halve`` (the older half but for those; what stays is computed anew, and
            ``Session.text`` tells what it is), ``none`` (nothing: the text ends).
            ``shared_prefix``: so many of the prompt's first tokens begin other texts too, as a system prompt does. A
            prefix cache keeps what those begin with, also of models whose states it keeps at few places only.

    What ``prompt_cache`` holds afterwards is what mlx-lm leaves there: the prompt and all tokens that were yielded,
    also where the generator was closed before its end. After an exception it holds a part of them, never anything
    else: nothing of this call if nothing was yielded, else at least all but the last token; ``model.outcore.in_cache``
    says how many.

    One thread at a time: where another one generates with this model, this waits until that one has its last response
    (``finish_reason``), which comes when ``prompt_cache`` holds all of the text, or has closed the generator.

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
        if kwargs.pop("kv_eviction", None) not in (None, "window"):
            raise UsageError("kv_eviction: only for a model that outcore.load returned; leave it out")
        for name in ("history", "leave_last", "shared_prefix"):
            kwargs.pop(name, None)
        yield from generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs)
        return
    steps = _stream(model, session, tokenizer, ids, max_tokens, kwargs)
    yield from served(session.exclusive, steps, lambda response: response.finish_reason is not None)


def _stream(
    model: nn.Module,
    session: Session,
    tokenizer: TokenizerWrapper,
    ids: mx.array,
    max_tokens: int,
    kwargs: dict[str, Any],
) -> Generator[GenerationResponse, None, None]:
    session.in_cache, session.text = 0, None
    session.bind_again()
    how, most = eviction_of(kwargs)
    check_cache(session.forms, kwargs.get("prompt_cache"))
    check_ids(ids, session, "the prompt")
    if most is not None and how == "halve":
        tokens = _halving(model, session, tokenizer, ids, max_tokens, min(most, session.positions or most), kwargs)
    else:
        if most is not None and how == "none":
            max_tokens = bounded_tokens(_held(kwargs) + _length(ids, kwargs), max_tokens, most)
        text = _PendingText(model, session, tokenizer, ids, max_tokens, kwargs)
        max_tokens = text.max_tokens
        if text.is_mlx_lms:
            yield from text.responses()
            return
        tokens = text.steps()
    with generating(model):
        yield from responses(tokens, tokenizer, ids.size, max_tokens, session.metrics)


def _halving(
    model: nn.Module,
    session: Session,
    tokenizer: TokenizerWrapper,
    ids: mx.array,
    max_tokens: int,
    most: int,
    kwargs: dict[str, Any],
) -> Steps:
    """Steps of a text whose older half goes where there are ``most`` tokens."""
    before, cache = list(kwargs.get("history", ())), kwargs.get("prompt_cache")
    refuse_unknown_text(_held(kwargs), len(before), embeddings=kwargs.get("input_embeddings") is not None)

    def begin(text: list[int], tokens: int) -> Steps:
        prompt = mx.array(text[len(before) :], dtype=mx.int32)
        return _PendingText(model, session, tokenizer, prompt, tokens, dict(kwargs)).steps()

    def again(text: list[int], tokens: int) -> Steps:
        session.in_cache, session.text = 0, text
        if cache is not None:
            cache[:] = make_prompt_cache(model)
        prompt = mx.array(text, dtype=mx.int32)
        return _PendingText(
            model, session, tokenizer, prompt, tokens, kwargs | {"history": (), "shared_prefix": 0}
        ).steps()

    text = [*before, *cast(list[int], ids.tolist())]
    fits = len(text) <= most
    return halving(begin if fits else again, again, text if fits else halved(text, most), most, max_tokens)


def _held(kwargs: dict[str, Any]) -> int:
    return cached_tokens(kwargs.get("prompt_cache") or ())


def _length(ids: mx.array, kwargs: dict[str, Any]) -> int:
    embeddings = kwargs.get("input_embeddings")
    return ids.size if embeddings is None else len(embeddings)


class _PendingText:
    """A text that is about to be computed: room is made for it, and what is known of it is found.

    Args:
        kwargs: ``stream_generate``'s, which it takes over.

    Attributes:
        max_tokens: as can be had.
        is_mlx_lms: mlx-lm's own loop computes it (``responses``); otherwise ours does (``steps``).
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        tokenizer: TokenizerWrapper,
        ids: mx.array,
        max_tokens: int,
        kwargs: dict[str, Any],
    ) -> None:
        self._model, self._session, self._tokenizer, self._ids, self._kwargs = model, session, tokenizer, ids, kwargs
        self._before: Sequence[int] = kwargs.pop("history", ())
        self._records = True
        self._shared = whole_number("shared_prefix", kwargs.pop("shared_prefix", 0), 0)
        cache: list[Any] | None = kwargs.get("prompt_cache")
        self._length, self._held = _length(ids, kwargs), _held(kwargs)
        self._quantize_step = kwargs.get("prefill_step_size") or session.prefill_step_size or MLX_LM_STEP
        kept = 0 if cache is None else max(snapshot_bytes(cache), session.size.states)
        bounds = cache is None and kwargs.get("max_kv_size") is not None and note_bounds(model, session)
        if bounds or any(isinstance(c, RotatingKVCache) and c.keep for c in cache or ()):
            # What a token sees of such a window depends on the chunk that it is computed in: mlx-lm's, however little
            # memory there is.
            kwargs["prefill_step_size"] = self._quantize_step
        step = kwargs.get("prefill_step_size")
        self._bound = kept_at_most(model, cache, kwargs.get("max_kv_size"), min(self._length, self._quantize_step))
        self._kv = (
            None
            if kwargs.get("kv_bits") is None
            else KvBits(
                kwargs["kv_bits"],
                kwargs.get("kv_group_size", 64),
                kwargs.get("quantized_kv_start", DEFAULT_QUANTIZED_KV_START),
                self._quantize_step,
            )
        )
        bounded = kwargs.get("max_kv_size") is None

        def has_room() -> tuple[int, int]:
            tokens = check_prompt(self._length, max_tokens, session, self._held, bounded)
            note_length(self._held + self._length, session, "the prompt")
            return tokens, self._make_room(step, kept)

        self.max_tokens, kwargs["prefill_step_size"] = session.transport.text_room(
            lambda: [self._length, self._held, *cast(list[int], ids.tolist())], has_room, asked=step is not None
        )
        if session.prefix is not None and step is None:
            kwargs["prefill_step_size"] = block_step(kwargs["prefill_step_size"])
        self._found, self._known = self._look_up(cache)
        session.found = 0 if self._found is None else self._found.tokens
        if self._found is not None and cache is None:
            kwargs |= {"prompt_cache": self._found.cache, "private": True, "leave_last": True}  # nobody goes on with it
        self._drafting, self._most = drafting_of(session, kwargs)
        plain = self._drafting is None and cache is None and kwargs.get("kv_bits") is None
        self.is_mlx_lms = session.streaming is None and plain and session.prefix is None and session.transport.alone
        self._cache = cache

    def _make_room(self, step: int | None, kept: int) -> int:
        """For caches, and for what is kept on disk of the prompt if there is some; tokens of a chunk of it."""
        if captured := captured_bytes(self._session, self._length, self._kv):
            with contextlib.suppress(BudgetError):
                return make_room(self._session, self._room(1), self._length, step, kept=kept + captured)
            self._records = False
        return make_room(self._session, self._room(1), self._length, step, kept=kept)

    def _look_up(self, cache: list[Any] | None) -> tuple[PrefixMatch | None, Known]:
        prefix, kwargs = self._session.prefix, self._kwargs
        ours = cache is None or (prefix is not None and prefix.like(cache))
        if self._held or kwargs.get("input_embeddings") is not None or kwargs.get("max_kv_size") or not ours:
            return None, Known()
        found, known = look_up(
            self._session,
            cast(list[int], self._ids.tolist()),
            kwargs["prefill_step_size"],
            shared=self._shared,
            kv=self._kv,
        )
        return found, known if self._records else unkept(self._session, known, self._length)

    def _room(self, tokens: int) -> int:
        """Tokens that caches hold with so many of an answer."""
        all_of_it = self._held + self._length + tokens
        return all_of_it if self._bound is None else min(all_of_it, self._bound)

    def responses(self) -> Generator[GenerationResponse, None, None]:
        """By mlx-lm."""
        self._kwargs.pop("leave_last", None)
        told = self._kwargs.pop("prompt_progress_callback", None)

        def computed(done: int, total: int) -> None:
            note_held()  # before mlx-lm gives freed memory back
            check()  # signals are held until the first token
            if told is not None:
                told(done, total)

        self._kwargs["prompt_progress_callback"] = computed
        with generating(self._model):
            made = generate_resident(
                self._model, self._tokenizer, self._ids, max_tokens=self.max_tokens, **self._kwargs
            )
            for n, response in enumerate(made, 1):
                self._session.metrics.tokens += 1
                yield response
                # Mlx-lm computes one token ahead.
                before_sweep(self._session, self._room(n + 2))

    def steps(self) -> Steps:
        """Sweep by sweep."""
        session = self._session
        sampler, ends = self._kwargs.get("sampler"), self._tokenizer.eos_token_ids
        text = OneText(session, self._held, self._drafting, self._most, self._before, sampler, ends, self._bound)
        tokens = generate_step(
            self._ids,
            self._model,
            lambda: session.streaming,
            max_tokens=2**62 if self.max_tokens < 0 else self.max_tokens,
            quantize_step=self._quantize_step,
            known=self._known,
            reserve=text.reserve,
            speculation=text.speculation,
            counted=text.count,
            hidden=text.hidden(),
            **self._kwargs,
        )
        if self._found is None or self._cache is None:
            return tokens
        return _in_place(tokens, session, self._cache, self._found.cache)


def _in_place(tokens: Steps, session: Session, given: Sequence[Any], found: Sequence[Any]) -> Steps:
    """A text whose caches were found: whoever goes on with his own has them filled, or as they were if the text leaves
    nothing."""
    whole = list(given)
    for n, (c, filled) in enumerate(zip(whole, found, strict=True)):
        if type(c) is not type(filled):  # quantized, as mlx-lm does it: in the caller's list
            cast(list[Any], given)[n] = filled
    mine = [c for n, c in enumerate(given) if c is whole[n]]
    kept = [c for n, c in enumerate(found) if given[n] is whole[n]]
    before = [dict(vars(c)) for c in caches_in(mine)]
    for c, filled in zip(caches_in(mine), caches_in(kept), strict=True):
        vars(c).update(vars(filled))
    try:
        yield from tokens
    finally:
        if session.in_cache == 0:
            for c, was in zip(caches_in(mine), before, strict=True):
                vars(c).clear()
                vars(c).update(was)
            if isinstance(given, list):
                given[:] = whole


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
