"""``generate`` and ``stream_generate``: one sweep for the prompt however long, one or less a token, none more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationResponse, generation_stream
from mlx_lm.generate import stream_generate as generate_resident
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import ClosedError, PromptError, UsageError
from ..model.cache_form import check_cache
from ..model.cache_rollback import snapshot_bytes
from ..model.tokenizer import whole_text
from ..options import whole as whole_number
from ..planning.draft_cost import MOST
from ..planning.plan import ANSWER
from ..runtime.session import Session
from ..streaming.engine import Streaming
from ..system.device import on_cpu
from .lookahead import look_ahead
from .model_runner import MLX_LM_STEP, Target
from .sampling import Draw, foresee
from .served import Unread, pass_on, served
from .speculative.acceptance import Experience
from .speculative.draft_length import Control
from .speculative.drafting import Drafting, check_length
from .speculative.speculate import Chooser, Processor, Speculation, speculate
from .wired import generating


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
    session: Session | None = getattr(model, "outcore", None)
    if session is not None:
        session.in_cache = 0  # before a prompt is encoded, which takes a while and may fail
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
    kwargs["prefill_step_size"] = _make_room(
        session, held + length + 1, length, kwargs.get("prefill_step_size"), kept=kept
    )
    drafting, most = _drafting(session, kwargs)
    plain = session.streaming is None and drafting is None
    if plain and cache is None and kwargs.get("kv_bits") is None:
        kwargs.pop("leave_last", None)
        with generating(model):
            for n, response in enumerate(generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs), 1):
                yield response
                # Mlx-lm computes one token ahead.
                _make_room(session, held + length + n + 2)
                if session.watch is not None and session.streaming is None:
                    session.watch.before_pass()
        return

    controls: dict[str, Control] = {}

    def reserve(tokens: int) -> None:
        _make_room(session, held + tokens)
        if session.streaming is not None and "now" in controls:
            controls["now"].most = min(controls["now"].most, session.size.drafted)
        if session.streaming is None and session.watch is not None:
            session.watch.before_pass()

    def speculation(target: Target, logprobs: mx.array) -> Speculation | None:
        if drafting is None or most == 0:
            return None
        if session.experience is None:
            session.experience = Experience()
        control = controls["now"] = Control(most, session.experience)
        control.foreseen_s = target.prompt_s
        how = foresee(kwargs.get("sampler"), logprobs.dtype)
        source = drafting.source(control, how, logprobs.size, target.state)
        # Where nothing is streamed, what the budget leaves over is the allocator's.
        room = session.plan.budget_bytes - session.plan.peak_bytes if session.plan.streams else 0
        return Speculation(source, control, session.metrics, tokenizer.eos_token_ids, before, max(0, room))

    def count(tokens: int) -> None:
        session.in_cache = tokens

    with generating(model):
        tokens = generate_step(
            ids,
            model,
            lambda: session.streaming,
            max_tokens=max_tokens,
            quantize_step=own_step,
            reserve=reserve,
            speculation=speculation,
            counted=count,
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
        prompt = tokenizer.encode(whole_text(prompt), add_special_tokens=special)
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
        PromptError: no tokens, more than the model has positions for, or more than there can be memory for.
    """
    if length == 0:
        raise PromptError("the prompt is empty; give at least one token")
    if session is None:
        return max_tokens
    check_positions(held + length, session, "the prompt")
    if session.positions is not None:
        # The last token is not computed.
        most = session.positions - held - length + 1
        max_tokens = min(max_tokens, most) if max_tokens > 0 else most
    longest = session.max_context
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
    if max_tokens > 0:
        return max_tokens
    room = planned - held - length
    if room > 0 or session.residency is None:
        return max(room, 1)
    # The prompt fills what was planned for: as much as an answer usually takes, if there can be room for it.
    left = ANSWER if longest is None else longest - held - length
    more = min(ANSWER, left) if left > 0 else ANSWER
    return more if session.residency.holds(held + length + more, length) else 1


def check_ids(ids: mx.array, session: Session, name: str) -> None:
    """Refuse tokens that the model has no embedding for: MLX reads there whatever lies in memory.

    Raises:
        PromptError: says which, by ``name``.
    """
    if session.vocabulary is None or not ids.size:
        return
    least, most = (cast(int, end.item()) for end in (ids.min(), ids.max()))
    if least < 0 or most >= session.vocabulary:
        wrong = least if least < 0 else most
        raise PromptError(f"{name} has token {wrong}; this model's are 0 to {session.vocabulary - 1}")


def check_positions(tokens: int, session: Session, name: str) -> None:
    """Refuse a prompt that the model has no positions for.

    Raises:
        PromptError: says which, by ``name``.
    """
    if session.positions is not None and tokens > session.positions:
        raise PromptError(f"{name} has {tokens} tokens; this model's context is {session.positions}: shorten it")


def note_length(tokens: int, session: Session | None, name: str) -> None:
    """Tell of a prompt that is answered and is longer than what the model was made for."""
    if session is not None and session.max_context is not None and tokens >= session.max_context:
        session.note(f"{name} has {tokens} tokens; this model was made for {session.max_context}, beyond them it errs")


def _drafting(session: Session, kwargs: dict[str, Any]) -> tuple[Drafting | None, int]:
    """What drafts, taken from the arguments or as the model was loaded, and how many tokens for a sweep at most."""
    model, asked = kwargs.pop("draft_model", None), kwargs.pop("num_draft_tokens", None)
    drafting = cast(Drafting | None, session.drafting) if model is None else Drafting("model", "draft_model", model)
    most = MOST if session.streaming is None else session.size.drafted
    return drafting, most if asked is None else min(check_length(asked), most or asked)


def _make_room(session: Session, tokens: int, prompt: int = 1, step: int | None = None, kept: int = 0) -> int:
    """Room for a context of that many tokens, a prompt, and bytes of caches to go back to. Returns tokens of the prompt
    to compute at a time."""
    if session.residency is None:
        return step or session.plan.prefill_step
    return session.residency.reserve(tokens, prompt, step, kept)


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
    reserve: Callable[[int], object] = lambda _: None,
    speculation: Callable[[Target, mx.array], Speculation | None] = lambda *_: None,
    counted: Callable[[int], object] = lambda _: None,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Yield ``(token, log-probabilities of shape (vocabulary,), drafted)``; mlx-lm's function of that name, sweep by
    sweep.

    Args:
        reserve: called before each sweep with the tokens that the caches will hold after it.
        engine: what streams the model now; None where everything is resident.
        speculation: how tokens are drafted for a target whose log-probabilities are like these, if they are.
        quantize_step: as in ``Target``.
        leave_last: ``prompt_cache`` need not hold the last token. ``private``: nor anything, if something fails.
        counted: called at the end with the tokens of prompt and answer that ``prompt_cache`` holds of this call.
    """
    cache = prompt_cache if prompt_cache is not None else make_prompt_cache(model, max_kv_size=max_kv_size)
    target = Target(
        model,
        engine,
        cache,
        owned=prompt_cache is not None and not private,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        quantize_step=quantize_step,
        in_blocks=not on_cpu(),
    )
    chooser = Chooser(sampler or greedy_sampler, logits_processors or (), cast(list[int], prompt.tolist()))
    progress = prompt_progress_callback or (lambda *_: None)
    total, before = len(prompt) if input_embeddings is None else len(input_embeddings), len(chooser.text)
    whole = prompt_cache is not None and not leave_last
    try:
        with mx.stream(generation_stream), target.transaction(total) as undo:
            progress(0, total)
            logits = target.prompt(prompt, prefill_step_size, input_embeddings)
            token, logprobs, _ = chooser.choose(logits)
            # All slots are free to read ahead into while the caller looks at the token.
            target.settle()
            progress(total, total)
        try:
            yield token, logprobs, False
        except Unread:
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
        _bring_up(target, chooser, total + len(chooser.text) - before, whole)
        chooser.draw_ahead(len(chooser.text) - before)
        raise
    except BaseException as e:
        # Tokens that a draft brought and a snapshot had to give up again.
        try:
            _bring_up(target, chooser, total + len(chooser.text) - before, False)
        except Exception as again:
            e.add_note(f"the prompt cache holds {target.in_cache} tokens of prompt and answer: {again}")
        raise
    else:
        _bring_up(target, chooser, total + len(chooser.text) - before, whole)
        chooser.draw_ahead(len(chooser.text) - before)
    finally:
        counted(target.in_cache)


def _plainly(
    token: int,
    target: Target,
    chooser: Chooser,
    tokens: int,
    reserve: Callable[[int], object],
    whole: bool,
) -> Iterator[tuple[int, mx.array, bool]]:
    """Without drafts: ahead of what is looked at while everything is resident, else a sweep a token."""
    made = 0
    if target.resident:
        made = yield from look_ahead(token, target, chooser, tokens=tokens, reserve=reserve, whole=whole)
        token = chooser.text[-1]
    for n in range(made + 1, tokens + 1):
        reserve(n)
        with mx.stream(generation_stream), target.transaction(1):
            token, logprobs, _ = chooser.choose(target.step(token))
            target.settle()
        yield token, logprobs, False


def _bring_up(target: Target, chooser: Chooser, tokens: int, whole: bool) -> None:
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


def _responses(
    tokens: Generator[tuple[int, mx.array, bool], None, None],
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    max_tokens: int,
) -> Iterator[GenerationResponse]:
    detokenizer = tokenizer.detokenizer
    began = time.perf_counter()
    first = began
    for n, (token, logprobs, drafted) in enumerate(tokens, start=1):
        if n == 1:
            first = time.perf_counter()
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
