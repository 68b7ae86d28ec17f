"""The token loop: one sweep for the prompt however long, one sweep a token, none after the last.

mlx-lm's own loop reads a prompt in chunks, its last token apart, and looks one step ahead: three sweeps before the
first token and one after the last. Here the same chunks, so the same bits, share one sweep.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, generation_stream, maybe_quantize_kv_cache, wired_limit
from mlx_lm.generate import stream_generate as generate_resident
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .errors import PromptError, UsageError
from .loader import Session
from .stream import Streaming


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

    Yields:
        mlx-lm's ``GenerationResponse``. For a streamed model ``generation_tps`` counts the tokens after the first
        over the time since the first; mlx-lm counts one more.

    Raises:
        PromptError: an empty prompt, or one longer than the model or the planned context allows.
    """
    if max_tokens == 0:
        raise UsageError("max_tokens=0: ask for at least one token, or -1 for no limit")
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    ids = encode(tokenizer, prompt)
    session: Session | None = getattr(model, "outcore", None)
    embeddings = kwargs.get("input_embeddings")
    length = ids.size if embeddings is None else len(embeddings)
    held = cached_tokens(kwargs.get("prompt_cache") or ())
    max_tokens = check_prompt(length, max_tokens, session, held, bounded=kwargs.get("max_kv_size") is None)
    if session is None:
        yield from generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs)
        return
    kwargs["prefill_step_size"] = _make_room(session, held + length + 1, length, kwargs.get("prefill_step_size"))
    if session.streaming is None:
        for n, response in enumerate(generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs), 1):
            yield response
            # Mlx-lm computes one token ahead.
            _make_room(session, held + length + n + 2)
            if session.watch is not None and session.streaming is None:
                session.watch.before_pass()
        return
    kwargs.pop("num_draft_tokens", None)
    if kwargs.pop("draft_model", None) is not None:
        raise UsageError("draft_model: speculative decoding is not there for streamed models yet")
    with wired_limit(model, [generation_stream]):
        tokens = generate_step(
            ids,
            model,
            session.streaming,
            max_tokens=max_tokens,
            reserve=lambda n: _make_room(session, held + n),
            **kwargs,
        )
        yield from _responses(tokens, tokenizer, ids.size, max_tokens)


def generate(
    model: nn.Module, tokenizer: Any, prompt: str | mx.array | Sequence[int], verbose: bool = False, **kwargs: Any
) -> str:
    """The whole answer as one string; arguments as in ``stream_generate``. ``verbose`` prints it as it is made."""
    text = ""
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print()
    return text


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> mx.array:
    """Token ids of a prompt, by mlx-lm's rule for special tokens; int32 (tokens,)."""
    if isinstance(prompt, mx.array):
        return prompt
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    return mx.array(list(prompt), dtype=mx.int32)


def cached_tokens(cache: Sequence[Any]) -> int:
    """Tokens that a prompt cache holds, by the layer that holds most."""
    sizes = [c.size() for c in cache]
    offsets = [c.offset for c in cache if isinstance(getattr(c, "offset", None), int)]
    return max([*sizes, *offsets], default=0)


def check_prompt(length: int, max_tokens: int, session: Session | None, held: int = 0, bounded: bool = True) -> int:
    """``max_tokens`` as it can be had, or an error if the prompt cannot.

    Args:
        held: tokens before the prompt that a cache holds.
        bounded: the caches grow with each token, and are not kept to a size.

    Raises:
        PromptError: no tokens, more than the model was made for, or more than there can be memory for.
    """
    if length == 0:
        raise PromptError("the prompt is empty; give at least one token")
    if session is None:
        return max_tokens
    longest = session.max_context
    if longest is not None and held + length >= longest:
        raise PromptError(
            f"the prompt has {held + length} tokens; this model's context is {longest}: shorten the prompt"
        )
    if session.streaming is None or not bounded:
        return max_tokens
    planned = session.plan.context
    wanted = held + length + max(max_tokens, 1)
    fits = wanted <= planned and length <= session.size.prompt
    if not fits and not (session.residency is not None and session.residency.holds(wanted, length)):
        raise PromptError(
            f"{held + length} prompt tokens and {max(max_tokens, 1)} new ones pass the context of {planned} tokens "
            f"that memory was planned for: load with context={wanted}"
        )
    return max_tokens if max_tokens > 0 else max(planned - held - length, 1)


def _make_room(session: Session, tokens: int, prompt: int = 1, step: int | None = None) -> int:
    """Room for a context of that many tokens, and a prompt. Returns tokens of the prompt to compute at a time."""
    if session.residency is None:
        return step or session.plan.prefill_step
    return session.residency.reserve(tokens, prompt, step)


def generate_step(
    prompt: mx.array,
    model: nn.Module,
    streaming: Streaming,
    *,
    max_tokens: int,
    prefill_step_size: int,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
    reserve: Callable[[int], object] = lambda _: None,
) -> Iterator[tuple[int, mx.array]]:
    """Yield ``(token, log-probabilities of shape (vocabulary,))``; mlx-lm's function of that name, sweep by sweep.

    Args:
        reserve: called before each sweep with the tokens that the caches will hold after it.
    """
    cache = prompt_cache if prompt_cache is not None else make_prompt_cache(model, max_kv_size=max_kv_size)
    sample = sampler or greedy_sampler
    quantize = functools.partial(
        maybe_quantize_kv_cache,
        quantized_kv_start=quantized_kv_start,
        kv_group_size=kv_group_size,
        kv_bits=kv_bits,
    )
    progress = prompt_progress_callback or (lambda *_: None)
    total = len(prompt) if input_embeddings is None else len(input_embeddings)
    seen: mx.array | None = None

    def forward(ids: mx.array, embeddings: mx.array | None) -> mx.array:
        extra = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        logits = model(ids[None], cache=cache, **extra)
        quantize(cache)
        return logits

    def choose(logits: mx.array, ids: mx.array) -> tuple[int, mx.array]:
        nonlocal seen
        logits = logits[:, -1, :]
        if logits_processors:
            seen = ids if seen is None else mx.concatenate([seen, ids])
            for process in logits_processors:
                logits = process(seen, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = sample(logprobs)
        mx.eval(token, logprobs)
        # All slots are free to read ahead into while the caller looks at the token.
        streaming.settle()
        return cast(int, token.item()), logprobs.squeeze(0)

    try:
        with mx.stream(generation_stream):
            progress(0, total)
            parts = chunks(total, prefill_step_size)
            passes = [
                functools.partial(forward, prompt[part], None if input_embeddings is None else input_embeddings[part])
                for part in parts
            ]
            logits = _prompt_sweep(passes, streaming, cache)
            if logits_processors and len(prompt) > 1:
                seen = prompt[: parts[-1].start]
            token, logprobs = choose(logits, prompt[parts[-1]])
            progress(total, total)
        yield token, logprobs
        for n in range(1, max_tokens):
            reserve(total + n)
            with mx.stream(generation_stream):
                ids = mx.array([token], dtype=mx.int32)
                token, logprobs = choose(forward(ids, None), ids)
            yield token, logprobs
    finally:
        streaming.settle()


def chunks(total: int, step: int) -> list[slice]:
    """mlx-lm's cut of a prompt: ``step`` tokens at a time, and the last token by itself."""
    starts = range(0, total - 1, step)
    return [slice(a, min(a + step, total - 1)) for a in starts] + [slice(total - 1, total)]


def _prompt_sweep(passes: Sequence[Callable[[], mx.array]], streaming: Streaming, cache: list[Any]) -> mx.array:
    """Run the prompt's chunks and return the last one's logits."""
    if streaming.evaluates:
        # Such a model's graph cannot be built ahead of its weights: a sweep for each chunk.
        for run in passes[:-1]:
            run()
            mx.eval([c.state for c in cache])
        logits = passes[-1]()
    else:
        logits = streaming.sweep(passes, last_only=True)[-1]
    mx.eval(logits, [c.state for c in cache])
    mx.clear_cache()
    return logits


def _responses(
    tokens: Iterator[tuple[int, mx.array]], tokenizer: TokenizerWrapper, prompt_tokens: int, max_tokens: int
) -> Iterator[GenerationResponse]:
    detokenizer = tokenizer.detokenizer
    began = time.perf_counter()
    first = began
    for n, (token, logprobs) in enumerate(tokens, start=1):
        if n == 1:
            first = time.perf_counter()
        stop = token in tokenizer.eos_token_ids
        last = stop or n == max_tokens
        if not stop:
            detokenizer.add_token(token)
        if last:
            detokenizer.finalize()
        since = time.perf_counter() - first
        yield GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tokens / (first - began),
            generation_tokens=n,
            generation_tps=(n - 1) / since if n > 1 else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=("stop" if stop else "length") if last else None,
        )
        if last:
            return
