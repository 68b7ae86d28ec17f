"""``generate`` and ``stream_generate``: one sweep for the prompt however long, one or less a token, none more."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationResponse
from mlx_lm.generate import generate_step as generate_step_resident
from mlx_lm.generate import stream_generate as generate_resident
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checks import refuse_unknown
from ..checks import whole as whole_number
from ..engine.session import Session
from ..errors import UsageError
from ..machine.exclusive import pass_on, served
from ..modules.away import snapshot_bytes
from ..modules.cache_check import check_cache
from ..modules.call_values import caches_in
from .passes import MLX_LM_STEP, KvBits, generating
from .prefix_cache import block_step, look_up, room_to_record, unkept
from .prompt import cached_tokens, check_ids, check_prompt, encode, kept_at_most, note_bounds, note_length
from .request import Alone, CachedPrefix, Request, Token
from .scheduler import Scheduler
from .speculative.drafting import check_draft_length

Tokens = Generator[Token, None, None]

ENDLESS = 2**62
"""Tokens of an answer that has no limit."""

_KNOWN = {*signature(generate_step_resident).parameters, *signature(generate_resident).parameters} | {
    "num_draft_tokens", "history", "leave_last", "shared_prefix",
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
    if session is None:
        return _resident(model, tokenizer, prompt, max_tokens, kwargs)
    # Here and not where the text begins: Python handles signals before a generator's first instruction.
    session.in_cache = 0
    steps = _stream(model, session, tokenizer, prompt, max_tokens, kwargs)
    return served(session.exclusive, steps, lambda response: response.finish_reason is not None)


def _asked(tokenizer: Any, prompt: Any, max_tokens: int) -> tuple[TokenizerWrapper, mx.array, int]:
    """mlx-lm's tokenizer, the prompt's token ids, and how many may follow; all checked."""
    max_tokens = whole_number("max_tokens", max_tokens, -1, 2**63 - 1)
    if max_tokens == 0:
        raise UsageError("max_tokens=0: ask for at least one token, or -1 for no limit")
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    return tokenizer, encode(tokenizer, prompt), max_tokens


def _resident(
    model: nn.Module, tokenizer: Any, prompt: Any, max_tokens: int, kwargs: dict[str, Any]
) -> Iterator[GenerationResponse]:
    """A text of a model that mlx-lm has loaded."""
    tokenizer, ids, max_tokens = _asked(tokenizer, prompt, max_tokens)
    check_prompt(ids.size if kwargs.get("input_embeddings") is None else 1, max_tokens, None)
    for name in ("history", "leave_last", "shared_prefix"):
        kwargs.pop(name, None)
    yield from generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs)


def _stream(
    model: nn.Module, session: Session, tokenizer: Any, prompt: Any, max_tokens: int, kwargs: dict[str, Any]
) -> Generator[GenerationResponse, None, None]:
    """Tokens as mlx-lm hands them out, with their text."""
    session.in_cache = 0
    tokenizer, ids, max_tokens = _asked(tokenizer, prompt, max_tokens)
    session.bind_again()
    check_cache(session.forms, kwargs.get("prompt_cache"))
    check_ids(ids, session, "the prompt")
    request, step = _request(model, session, ids, max_tokens, kwargs)
    drafted = kwargs.get("num_draft_tokens")
    drafted = None if drafted is None else check_draft_length(drafted)
    detokenizer = tokenizer.detokenizer
    with generating(model):
        tokens = _tokens(model, session, request, step, drafted, tokenizer.eos_token_ids)
        began = first = time.perf_counter()
        for n, token in enumerate(tokens, start=1):
            if n == 1:
                first = time.perf_counter()
            stop = token.token in tokenizer.eos_token_ids
            last = stop or n == request.max_tokens
            if not stop:
                detokenizer.add_token(token.token)
            if last:
                detokenizer.finalize()
            since = time.perf_counter() - first
            response = GenerationResponse(
                text=detokenizer.last_segment,
                token=token.token,
                logprobs=cast(mx.array, token.scores),
                from_draft=token.drafted,
                prompt_tokens=ids.size,
                prompt_tps=ids.size / (first - began),
                generation_tokens=n,
                generation_tps=(n - 1) / since if n > 1 else 0.0,
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=("stop" if stop else "length") if last else None,
            )
            try:
                yield response
            except GeneratorExit:
                raise
            except BaseException as e:
                pass_on(tokens, e)
                raise
            if last:
                tokens.close()
                return


def _tokens(
    model: nn.Module, session: Session, request: Request, step: int, drafted: int | None, ends: Collection[int]
) -> Tokens:
    """The tokens of a text; caches that somebody goes on with hold what was handed out of it, however it ends.

    Args:
        step: tokens of its prompt to compute at a time.
        drafted: for a pass at most; None: as many as are worth it.
    """
    assert request.alone is not None
    sequences = Scheduler(model, ends=ends, prefill_step=step, draft_tokens=drafted, alone=True)
    sequences.add(request)
    error: BaseException | None = None
    try:
        for _ in range(request.max_tokens):
            yield from sequences.step().tokens
    except GeneratorExit:
        raise
    except BaseException as e:
        error = e
        raise
    finally:
        try:
            sequences.close(error)
        finally:
            if session.in_cache == 0:
                request.alone.forget()


def _request(
    model: nn.Module, session: Session, ids: mx.array, max_tokens: int, kwargs: dict[str, Any]
) -> tuple[Request, int]:
    """A text that there is room for, of which is found what was computed before, and tokens of its prompt to compute
    at a time; ``kwargs`` are ``stream_generate``'s."""
    given: list[Any] | None = kwargs.get("prompt_cache")
    shared = whole_number("shared_prefix", kwargs.get("shared_prefix", 0), 0)
    embeddings, window = kwargs.get("input_embeddings"), kwargs.get("max_kv_size")
    length, held = ids.size if embeddings is None else len(embeddings), cached_tokens(given or ())
    asked = kwargs.get("prefill_step_size")
    theirs = asked or session.residency.chunk or MLX_LM_STEP
    bounds = given is None and window is not None and note_bounds(model, session)
    if bounds or any(isinstance(c, RotatingKVCache) and c.keep for c in given or ()):
        # What a token sees of such a window depends on the chunk that it is computed in: mlx-lm's, however little
        # memory there is.
        asked = theirs
    bound = kept_at_most(model, given, window, min(length, theirs))
    room = held + length + 1 if bound is None else min(held + length + 1, bound)
    kept = 0 if given is None else max(snapshot_bytes(given), session.size.states)
    alone = _alone(kwargs, theirs, bound)
    records = True

    def has_room() -> tuple[int, int]:
        nonlocal records
        tokens = check_prompt(length, max_tokens, session, held, window is None)
        note_length(held + length, session, "the prompt")
        step, records = room_to_record(session, room, length, asked, kept)
        return tokens, step

    # Ranks that share a model cut a prompt in the same way.
    tokens = cast(list[int], ids.tolist())
    max_tokens, step = session.transport.text_room(lambda: (length, held, *tokens), has_room, asked=asked is not None)
    found, known = None, CachedPrefix()
    if session.prefix is not None:
        step = block_step(step) if asked is None else step
        if alone.kv is not None:
            session.note("prefix cache: with kv_bits, prompts are neither looked up in it nor kept")
        same = given is None or session.prefix.like(given)
        if same and not held and not window and embeddings is None and alone.kv is None:
            found, known = look_up(session, tokens, step, shared=shared)
            known = known if records else unkept(session, known, length)
    session.found = 0 if found is None else found.tokens
    cache = given
    if found is not None and given is not None:
        alone = replace(alone, forget=_filled(given, found.cache))
    elif given is None:
        cache = make_prompt_cache(model, max_kv_size=window) if found is None else found.cache
    limit = ENDLESS if max_tokens < 0 else max_tokens
    processors = tuple(kwargs.get("logits_processors") or ())
    request = Request(
        0, tokens, limit, kwargs.get("sampler"), processors, cache=cache, known=known, scores=True, alone=alone
    )
    return request, step


def _alone(kwargs: dict[str, Any], step: int, bound: int | None) -> Alone:
    """What the caller asks of a text that is written by itself.

    Args:
        step: tokens of mlx-lm's chunks of its prompt. bound: tokens that its caches hold at most.
    """
    keeps, bits, kv = kwargs.get("prompt_cache") is not None, kwargs.get("kv_bits"), None
    if bits is not None:
        start = kwargs.get("quantized_kv_start", DEFAULT_QUANTIZED_KV_START)
        kv = KvBits(bits, kwargs.get("kv_group_size", 64), start, step)
    return Alone(
        keeps=keeps,
        whole=keeps and not kwargs.get("leave_last", False),
        kv=kv,
        bound=bound,
        embeddings=kwargs.get("input_embeddings"),
        progress=kwargs.get("prompt_progress_callback") or (lambda *_: None),
        history=kwargs.get("history", ()),
        draft_model=kwargs.get("draft_model"),
    )


def _filled(given: Sequence[Any], found: Sequence[Any]) -> Callable[[], None]:
    """Fill somebody's caches with those that were found, which are like them; returns what has them be as they were."""
    mine = caches_in(given)
    before = [dict(vars(c)) for c in mine]
    for c, filled in zip(mine, caches_in(found), strict=True):
        vars(c).update(vars(filled))

    def forget() -> None:
        for c, was in zip(mine, before, strict=True):
            vars(c).clear()
            vars(c).update(was)

    return forget


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


def generate_step(
    prompt: mx.array,
    model: nn.Module,
    *,
    max_tokens: int = 256,
    prefill_step_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    leave_last: bool = False,
    kv: KvBits | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """mlx-lm's function of that name for a model that Outcore has loaded: greedy, not drafted, and by itself; no other
    thread may use the model meanwhile."""
    session: Session = model.outcore
    keeps = prompt_cache is not None
    alone = Alone(keeps=keeps, whole=keeps and not leave_last, kv=kv)
    tokens = cast(list[int], prompt.tolist())
    request = Request(0, tokens, max_tokens, cache=prompt_cache, scores=True, alone=alone)
    for token in _tokens(model, session, request, prefill_step_size or session.plan.prefill_step, 0, ()):
        yield token.token, cast(mx.array, token.scores)
