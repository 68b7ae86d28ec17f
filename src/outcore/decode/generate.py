"""``generate`` and ``stream_generate``. Streamed weights are read once for a prompt and at most once for each token."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from operator import attrgetter
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
from ..modules.cache_check import check_cache
from ..modules.cache_rollback import snapshot_bytes
from ..modules.hooks import caches_in
from .media import TEXT_ONLY, plain
from .passes import MLX_LM_STEP, KvBits, generating
from .prefix_cache import block_step, look_up, room_to_record
from .prompt import cached_tokens, check_ids, check_prompt, encode, kept_at_most, note_bounds, note_length
from .request import Alone, CachedPrefix, Request, Token
from .sampling import SAMPLING
from .scheduler import Scheduler
from .speculative.drafting import check_draft_length

Tokens = Generator[Token, None, None]

# Stands for an answer without a limit of tokens.
ENDLESS = 2**62

_KNOWN = {*signature(generate_step_resident).parameters, *signature(generate_resident).parameters} | {
    "num_draft_tokens", "history", "leave_last", "shared_prefix", "images",
}  # fmt: skip


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Generates text with a model loaded by ``outcore.load``, as mlx-lm's function of that name.

    Args:
        prompt: text, or token ids.
        max_tokens: -1 for as many as the context holds.
        kwargs: those of ``mlx_lm.generate.generate_step`` (sampler, logits_processors, max_kv_size, prompt_cache,
            prefill_step_size, kv_bits, kv_group_size, quantized_kv_start, prompt_progress_callback, input_embeddings),
            and these:
        draft_model: a model in memory with the same tokenizer, which replaces the loaded drafter.
        num_draft_tokens: the most tokens drafted per forward pass; None: as many as pay.
        history: the tokens in ``prompt_cache``, which drafts may repeat.
        images: paths, bytes or PIL images, for the prompt's placeholders in order; without these it begins with them.
            A prompt of token ids has those that ``model.outcore.media.read`` returned, after those of ``history``.
        leave_last: do not compute the answer's last token into ``prompt_cache``, which saves a pass.
        shared_prefix: how many of the first prompt tokens other prompts begin with too (as with a system prompt); the
            prefix cache then stores the states after them.

    Afterwards ``prompt_cache`` holds what mlx-lm leaves there: the prompt and all tokens that were yielded, also if the
    generator was closed early. After an exception, it holds nothing of this call if no token was yielded, otherwise the
    prompt and the yielded tokens, or all but the last. ``model.outcore.in_cache`` counts the tokens of this call in it.

    One thread at a time: while another thread generates with this model, this call waits until that thread has its last
    response (with ``finish_reason``; ``prompt_cache`` is complete by then), or has closed its generator.

    Yields:
        mlx-lm's ``GenerationResponse``. For a streamed model, ``generation_tps`` leaves out the first token, from which
            time is counted; mlx-lm includes it.

    Raises:
        PromptError: an empty prompt, or one longer than the model or the planned context allows.
        UsageError: ``prompt_cache`` belongs to another model.
        BusyError: another thread began a text, and neither continues nor closes it.
    """
    for name in kwargs:
        if (asked := {"temperature": "temp"}.get(name, name)) in SAMPLING:
            there = f"sampler=make_sampler({asked}=...), from mlx_lm.sample_utils"
            raise TypeError(f"unexpected keyword argument {name!r}: the sampler's; give {there}")
    refuse_unknown(kwargs, _KNOWN)
    session: Session | None = getattr(model, "outcore", None)
    if session is None:
        return _resident(model, tokenizer, prompt, max_tokens, kwargs)
    # Set here too, because Python may handle a signal before a generator's first instruction.
    session.in_cache = 0
    responses = _stream(model, session, tokenizer, prompt, max_tokens, kwargs)
    return served(session.exclusive, responses, attrgetter("finish_reason"))


def _checked(tokenizer: Any, prompt: Any, max_tokens: int) -> tuple[TokenizerWrapper, mx.array, int]:
    """Returns mlx-lm's wrapper of the tokenizer, the prompt's token ids, and ``max_tokens`` after checks."""
    max_tokens = whole_number("max_tokens", max_tokens, -1, 2**63 - 1)
    if max_tokens == 0:
        raise UsageError("max_tokens=0: ask for at least one token, or -1 for no limit")
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    return tokenizer, encode(tokenizer, prompt), max_tokens


def _resident(
    model: nn.Module, tokenizer: Any, prompt: Any, max_tokens: int, kwargs: dict[str, Any]
) -> Iterator[GenerationResponse]:
    tokenizer, ids, max_tokens = _checked(tokenizer, prompt, max_tokens)
    check_prompt(ids.size if kwargs.get("input_embeddings") is None else 1, max_tokens, None)
    for name in ("history", "leave_last", "shared_prefix"):
        kwargs.pop(name, None)
    yield from generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs)


def _stream(
    model: nn.Module, session: Session, tokenizer: Any, prompt: Any, max_tokens: int, kwargs: dict[str, Any]
) -> Generator[GenerationResponse, None, None]:
    session.in_cache, media = 0, None
    if not isinstance(images := kwargs.get("images"), list | tuple | None) or images:
        if session.media is None or kwargs.get("input_embeddings") is not None:
            why = "not with input_embeddings" if session.media else f"{TEXT_ONLY} as loaded; give load(images=True)"
            raise UsageError(f"images: {why}")
        prompt, media = session.media.prompt(prompt, images, kwargs.get("history", ()))
    tokenizer, ids, max_tokens = _checked(tokenizer, prompt, max_tokens)
    session.bind_again()
    check_cache(session.forms, kwargs.get("prompt_cache"))
    check_ids(ids if media is None else mx.array(plain(media, cast(list[int], ids.tolist()))), session, "the prompt")
    request, step = _request(model, session, ids, max_tokens, kwargs | {"media": media})
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
    """Yields a text's tokens. However the text ends, the caller's caches then hold the tokens that were yielded.
    ``step``: prompt tokens per chunk; ``drafted``: the most tokens drafted per pass."""
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
            error = None
            if session.in_cache == 0:
                request.alone.forget()


def _request(
    model: nn.Module, session: Session, ids: mx.array, max_tokens: int, kwargs: dict[str, Any]
) -> tuple[Request, int]:
    """Reserves memory, looks the prompt up in the prefix cache, and returns the request and the prompt tokens per
    chunk; ``kwargs`` are ``stream_generate``'s."""
    given: list[Any] | None = kwargs.get("prompt_cache")
    shared = whole_number("shared_prefix", kwargs.get("shared_prefix", 0), 0)
    embeddings, window = kwargs.get("input_embeddings"), kwargs.get("max_kv_size")
    length, before = ids.size if embeddings is None else len(embeddings), cached_tokens(given or ())
    asked = kwargs.get("prefill_step_size")
    theirs = asked or session.residency.chunk or MLX_LM_STEP
    bounds = given is None and window is not None and note_bounds(model, session)
    if bounds or any(isinstance(c, RotatingKVCache) and c.keep for c in given or ()):
        # In a sliding window that keeps first tokens, a token attends to other tokens if its chunk has another length.
        # So chunks have mlx-lm's length, however little memory there is.
        asked = theirs
    bound = kept_at_most(model, given, window, min(length, theirs))
    room = before + length + 1 if bound is None else min(before + length + 1, bound)
    kept = 0 if given is None else max(snapshot_bytes(given), session.size.states)
    kept += 0 if (media := kwargs["media"]) is None else media.room(model, 0)
    alone = _alone(kwargs, theirs, bound)
    records = True

    def has_room() -> tuple[int, int]:
        nonlocal records
        tokens = check_prompt(length, max_tokens, session, before, window is None)
        note_length(before + length, session, "the prompt")
        step, records = room_to_record(session, room, length, asked, kept)
        return tokens, step

    # Ranks that share a model must cut a prompt into the same chunks.
    tokens = cast(list[int], ids.tolist())
    max_tokens, step = session.transport.text_room(lambda: (length, before, *tokens), has_room, asked=asked is not None)
    found, cached = None, CachedPrefix()
    if session.prefix is not None:
        step = block_step(step) if asked is None else step
        if alone.kv is not None:
            session.note("prefix cache: with kv_bits, prompts are neither looked up in it nor stored")
        same = given is None or session.prefix.like(given)
        if same and not before and not window and embeddings is None and alone.kv is None:
            found, cached = look_up(session, tokens, step, shared=shared, records=records)
    session.found = 0 if found is None else found.tokens
    cache = given
    if found is not None and given is not None:
        alone = replace(alone, forget=_filled(given, found.cache))
    elif given is None:
        cache = make_prompt_cache(model, max_kv_size=window) if found is None else found.cache
    limit = ENDLESS if max_tokens < 0 else max_tokens
    processors = tuple(kwargs.get("logits_processors") or ())
    request = Request(0, tokens, limit, kwargs.get("sampler"), processors, (), cache, cached=cached, scores=True)
    request = replace(request, alone=alone, media=media)
    return request, step


def _alone(kwargs: dict[str, Any], step: int, bound: int | None) -> Alone:
    """Returns the options of a text that runs alone. ``step``: prompt tokens in mlx-lm's chunks; ``bound``: the most
    tokens that the text's caches hold."""
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
    """Fills the caller's caches ``given`` with the contents of the caches ``found``, which are of the same kinds.
    Returns a function that restores the caller's."""
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
    """Returns the whole answer as one string; arguments are ``stream_generate``'s. ``verbose``: prints the answer while
    it is generated, then the speed, as mlx-lm's function of that name."""
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
    """mlx-lm's function of that name for a model that Outcore has loaded, greedy and without drafts. Takes no lock: no
    other thread may use the model meanwhile."""
    session: Session = model.outcore
    keeps = prompt_cache is not None
    alone = Alone(keeps=keeps, whole=keeps and not leave_last, kv=kv)
    tokens = cast(list[int], prompt.tolist())
    request = Request(0, tokens, max_tokens, cache=prompt_cache, scores=True, alone=alone)
    for token in _tokens(model, session, request, prefill_step_size or session.plan.prefill_step, 0, ()):
        yield token.token, cast(mx.array, token.scores)
