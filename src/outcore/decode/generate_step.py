"""``generate_step``: tokens of one text, sweep by sweep, of which no interrupt or error leaves half in a cache."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationResponse, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..disk.metrics import Metrics
from ..engine.streaming import Streaming
from ..engine.transport import transport_of
from ..errors import ClosedError
from ..machine.device import on_cpu
from .hidden_states import HiddenStates
from .known import Known
from .lookahead import look_ahead
from .model_runner import MLX_LM_STEP, ModelRunner
from .sampling import Draw
from .served import NotHandedOut, pass_on
from .speculative.speculate import Processor, Sampler, Speculation, speculate


def generate_step(
    prompt: mx.array,
    model: nn.Module,
    engine: Callable[[], Streaming | None],
    *,
    max_tokens: int,
    prefill_step_size: int,
    sampler: Draw | None = None,
    logits_processors: Sequence[Processor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
    quantize_step: int = MLX_LM_STEP,
    leave_last: bool = False,
    private: bool = False,
    draws_ahead: bool = True,
    earlier: Sequence[int] = (),
    known: Known | None = None,
    goes_on: Callable[[], bool] = lambda: True,
    reserve: Callable[[int], object] = lambda _: None,
    speculation: Callable[[ModelRunner, mx.array], Speculation | None] = lambda *_: None,
    counted: Callable[[int], object] = lambda _: None,
    hidden: HiddenStates | None = None,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Yield ``(token, log-probabilities of shape (vocabulary,), drafted)``; mlx-lm's function of that name, sweep by
    sweep.

    Args:
        reserve: called before each sweep with the tokens that the caches will hold after it.
        engine: what streams the model now; None where everything is resident.
        speculation: how tokens are drafted for a target whose log-probabilities are like these, if they are.
        quantize_step: as in ``ModelRunner``.
        leave_last: ``prompt_cache`` need not hold the last token. ``private``: nor anything, if something fails.
        draws_ahead: at the end the sampler is called once more, as mlx-lm does; not where the text goes on elsewhere.
        earlier: tokens before the prompt, which ``prompt_cache`` holds: processors and drafts look at them, too.
        known: what ``prompt_cache`` holds of the prompt itself already; and what is to be kept of the rest.
        goes_on: asked where the generator is closed: whether ``prompt_cache`` has to hold all that was yielded.
        hidden: keeps what drafts from the model's last hidden states need of them.
        counted: called at the end with the tokens of prompt and answer that ``prompt_cache`` holds of this call.
    """
    cache = prompt_cache if prompt_cache is not None else make_prompt_cache(model, max_kv_size=max_kv_size)
    target = ModelRunner(
        model,
        engine,
        cache,
        owned=prompt_cache is not None and not private,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        quantize_step=quantize_step,
        in_blocks=not on_cpu(),
        hidden=hidden,
    )
    text = [*earlier, *cast(list[int], prompt.tolist())]
    chooser = Sampler(sampler or greedy_sampler, logits_processors or (), text, transport=transport_of(model))
    progress = prompt_progress_callback or (lambda *_: None)
    total, before = len(prompt) if input_embeddings is None else len(input_embeddings), len(chooser.text)
    known = known or Known()
    target.in_cache = known.held
    whole = prompt_cache is not None and not leave_last
    try:
        new = contextlib.nullcontext() if known.held == total else target.transaction(total - known.held)
        with mx.stream(generation_stream), new as undo:
            progress(known.held, total)
            logits = known.logits
            if logits is None:
                passed = functools.partial(known.passed, cache)
                logits = target.prompt(prompt[known.held :], prefill_step_size, input_embeddings, passed)
                known.save(cache, logits)
            token, logprobs, _ = chooser.choose(logits)
            # All slots are free to read ahead into while the caller looks at the token.
            target.drain()
            progress(total, total)
        try:
            yield token, logprobs, False
        except NotHandedOut:
            if undo is not None:
                undo.restore()
            target.in_cache = 0
            raise
        undo = None
        how = speculation(target, logprobs) if target.verifies else None
        if how is not None:
            target.snapshots = how.snapshots
            yield from speculate(
                token, target, chooser, how, tokens=max_tokens - 1, reserve=lambda n: reserve(total + n)
            )
        elif max_tokens > 1:
            yield from _plainly(token, target, chooser, max_tokens - 1, lambda n: reserve(total + n), whole)
    except GeneratorExit:
        if goes_on():
            _bring_up(target, chooser, total + len(chooser.text) - before, whole)
        if draws_ahead:
            chooser.draw_ahead(len(chooser.text) - before)
        raise
    except BaseException as e:
        if draws_ahead and not isinstance(
            e, NotHandedOut
        ):  # a token that nobody saw was drawn ahead of those that were seen
            chooser.draw_ahead(len(chooser.text) - before)
        # Tokens that a draft brought and a snapshot had to give up again.
        try:
            _bring_up(target, chooser, total + len(chooser.text) - before, False)
        except Exception as again:
            e.add_note(f"the prompt cache holds {target.in_cache} tokens of prompt and answer: {again}")
        raise
    else:
        # Whoever hands out a text's last token closes this: the text goes on, in steps that begin anew (``halving``).
        _bring_up(target, chooser, total + len(chooser.text) - before, whole)
    finally:
        # What was found of a prompt that brought no token is nobody's.
        counted(target.in_cache if len(chooser.text) > before else 0)


def _plainly(
    token: int,
    target: ModelRunner,
    chooser: Sampler,
    tokens: int,
    reserve: Callable[[int], object],
    whole: bool,
) -> Iterator[tuple[int, mx.array, bool]]:
    """Without drafts: ahead of what is looked at while everything is resident, else a sweep a token."""
    made = 0
    if target.resident:
        ahead = chooser.transport.look_ahead or look_ahead
        made = yield from ahead(token, target, chooser, tokens=tokens, reserve=reserve, whole=whole)
    token = chooser.text[-1]
    for n in range(made + 1, tokens + 1):
        reserve(n)
        with mx.stream(generation_stream), target.transaction(1):
            token, logprobs, _ = chooser.choose(target.step(token))
            target.drain()
        yield token, logprobs, False


def _bring_up(target: ModelRunner, chooser: Sampler, tokens: int, whole: bool) -> None:
    """Have the caches hold what was yielded, if somebody goes on with them.

    Args:
        tokens: of prompt and answer.
        whole: the last one too.
    """
    if target.owned:
        last = chooser.text[-1] if whole and target.in_cache < tokens else None
        # Of a model that was closed meanwhile, what there is stays.
        with mx.stream(generation_stream), contextlib.suppress(ClosedError):
            target.flush(last)


def responses(
    tokens: Generator[tuple[int, mx.array, bool], None, None],
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    max_tokens: int,
    metrics: Metrics,
) -> Iterator[GenerationResponse]:
    """Tokens as mlx-lm hands them out, with their text; ``metrics`` counts them."""
    detokenizer = tokenizer.detokenizer
    began = time.perf_counter()
    first = began
    for n, (token, logprobs, drafted) in enumerate(tokens, start=1):
        if n == 1:
            first = time.perf_counter()
        metrics.tokens += 1
        stop = token in tokenizer.eos_token_ids
        last = stop or n == max_tokens
        if not stop:
            detokenizer.add_token(token)
        if last:
            detokenizer.finalize()
        since = time.perf_counter() - first
        response = GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=drafted,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tokens / (first - began),
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
