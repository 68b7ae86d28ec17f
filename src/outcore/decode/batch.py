"""Answers to many prompts: as many sequences as there is memory for share each sweep, and new ones join as others end.

The longest requests begin first: caches are padded to the longest sequence under way, so those that run side by side
should be about as long. Nobody is passed by: who is next waits until there is room.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchResponse
from mlx_lm.generate import batch_generate as generate_resident
from mlx_lm.generate_utils import BatchStats
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.session import Session
from ..errors import BudgetError, PromptError, UsageError
from ..machine.interrupts import check
from ..modules.cache_form import check_cache
from ..modules.call_values import mergeable
from ..plan.planner import make_plan
from ..plan.workload import MOST, Workload
from .batch_engine import Batch, BatchDecoder, OneByOne, Request, Resident, Token
from .prompt import cached_tokens, check_positions, encode, note_length
from .request_guard import error_of, guarded
from .served import served
from .wired import generating
from .writing import RequestOutput, Writing, tokens_of

Failed = Callable[[Request, Exception], None]


@dataclass
class Progress:
    """What has been done so far, and sequences under way. ``sweeps`` are steps: where everything is resident, none
    reads weights."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    sweeps: int = 0
    running: int = 0


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    prompt_caches: Sequence[Sequence[Any]] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    completion_batch_size: int = MOST,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    prefill_step_size: int | None = None,
) -> BatchResponse:
    """Answer several prompts with a model loaded by ``outcore.load``; mlx-lm's function of that name.

    As many sequences as fit into the model's budget share each sweep: those that it was loaded for
    (``load(..., sequences=32)``), or else as many as answer soonest, for which resident layers may be given up.

    Args:
        prompts: texts, or token ids.
        prompt_caches: for each prompt, what has been computed of the text before it; not changed.
        max_tokens: of each answer, or a list with one number for each.
        return_prompt_caches, return_token_ids, return_logprobs: as in mlx-lm; the caches returned hold all tokens but
            each answer's last.
        completion_batch_size: sequences that may share a sweep.
        sampler: log-probabilities of shape (sequences, vocabulary) to tokens; None: the likeliest.

    Returns:
        mlx-lm's ``BatchResponse``: texts in the order of the prompts, and ``stats``, of which ``prompt_time`` is 0:
        prompts and tokens share sweeps.

    Raises:
        PromptError: an empty prompt, or one longer than the model's context; says which.
        BudgetError: there is no room for the longest one.
    """
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    session: Session | None = getattr(model, "outcore", None)
    ids: list[list[int]] = [encode(tokenizer, p).tolist() for p in prompts]  # type: ignore[misc]
    limits, caches = _checked(session, ids, max_tokens, prompt_caches)
    if session is None:
        options: dict[str, Any] = {"sampler": sampler, "logits_processors": list(logits_processors or [])}
        options |= {} if prefill_step_size is None else {"prefill_step_size": prefill_step_size}
        return generate_resident(
            model,
            tokenizer,
            ids,
            prompt_caches,
            limits,
            verbose,
            return_prompt_caches,
            return_token_ids,
            return_logprobs,
            completion_batch_size=completion_batch_size,
            **options,
        )
    told = 0 if return_logprobs else None
    requests = [
        Request(i, prompt, limit, sampler, tuple(logits_processors or ()), cache=cache, logprobs=told)
        for i, (prompt, limit, cache) in enumerate(zip(ids, limits, caches, strict=True))
    ]
    if requests:
        with session.exclusive:
            make_room(model, Workload(tuple(map(tokens_of, requests)), completion_batch_size))
    progress, began = Progress(), time.perf_counter()
    found: dict[int, RequestOutput] = {}
    for output in answers(
        model,
        tokenizer,
        requests,
        progress=progress,
        prefill_step=prefill_step_size,
        return_caches=return_prompt_caches,
    ):
        found[output.request.uid] = output
        if verbose:
            print(f"[batch_generate] Finished processing {len(found)}/{len(prompts)} ...", end="\r")
    stats = _stats(progress, time.perf_counter() - began)
    if verbose:
        _print(stats)
    inside = [found[i] for i in range(len(prompts))]
    # As in mlx-lm: decoded together, which keeps a leading space that decoding token by token drops.
    kept = [a.tokens[:-1] if a.finish_reason == "stop" else a.tokens for a in inside]
    return BatchResponse(
        [tokenizer.decode(list(tokens)) for tokens in kept],
        stats,
        [a.cache for a in inside] if return_prompt_caches else None,
        [list(tokens) for tokens in kept] if return_token_ids else None,
        [list(a.logprobs[: len(t)]) for a, t in zip(inside, kept, strict=True)] if return_logprobs else None,
    )


def _checked(
    session: Session | None,
    ids: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    prompt_caches: Sequence[Sequence[Any]] | None,
) -> tuple[list[int], list[Any]]:
    """For each prompt, the tokens that its answer may have and its cache.

    Raises:
        UsageError: not as many of each, or no number of tokens. PromptError: a prompt that cannot be answered.
    """
    limits = [max_tokens] * len(ids) if isinstance(max_tokens, int) else list(max_tokens)
    caches: list[Any] = [None] * len(ids) if prompt_caches is None else list(prompt_caches)
    if len(limits) != len(ids) or len(caches) != len(ids):
        counts = f"{len(ids)} prompts, {len(limits)} max_tokens, {len(caches)} prompt_caches"
        raise UsageError(f"{counts}: give as many of each")
    if min(limits, default=1) < 1:
        raise UsageError(f"max_tokens={min(limits)}: ask for at least one token")
    for i, prompt in enumerate(ids):
        check_cache(session.forms if session is not None else (), caches[i], f"prompt_caches[{i}]")
        held = cached_tokens(caches[i] or ())
        check_prompt_length(len(prompt), held, session, f"prompt {i}")
        note_length(held + len(prompt), session, f"prompt {i}")
        if session is not None and session.positions is not None:
            limits[i] = min(limits[i], session.positions - held - len(prompt) + 1)
    return limits, caches


def _stats(progress: Progress, seconds: float) -> BatchStats:
    return BatchStats(
        prompt_tokens=progress.prompt_tokens,
        generation_tokens=progress.generation_tokens,
        generation_steps=progress.sweeps,
        decode_time=seconds,
        wall_time=seconds,
        peak_memory=mx.get_peak_memory() / 1e9,
    )


def _print(stats: BatchStats) -> None:
    """As mlx-lm does."""
    print(f"\n[batch_generate] Prompt: {stats.prompt_tokens} tokens")
    print(f"[batch_generate] Generation: {stats.generation_tokens} tokens, {stats.generation_tps:.3f} tokens-per-sec")
    print(f"[batch_generate] Peak memory: {stats.peak_memory:.3f} GB")


def check_prompt_length(tokens: int, held: int, session: Session | None, name: str) -> None:
    """Refuse a prompt that is empty, or that the model has no positions for.

    Raises:
        PromptError: says which, by ``name``.
    """
    if tokens == 0:
        raise PromptError(f"{name} is empty; give at least one token")
    if session is not None:
        check_positions(held + tokens, session, name)


def make_room(model: nn.Module, workload: Workload) -> None:
    """Room for a workload in a model that is loaded: its own number of sequences if it was loaded for several, else as
    many as answer soonest.

    Raises:
        BudgetError: there is no room for the longest request.
    """
    session: Session = model.outcore
    session.bind_again()
    size, residency = session.size, session.residency
    fits = workload.context <= size.context and workload.prompt <= size.prompt
    if residency is None or (fits and size.sequences > 1):
        return
    if size.sequences > 1:
        workload = replace(workload, most=size.sequences, least=size.sequences)
    # Where keys and values are on disk, a layer's turn has one text's.
    streaming = session.streaming
    alone = streaming is not None and (streaming.evaluates or streaming.beside is not None)
    if alone or not mergeable(model):
        workload = replace(workload, most=1, least=1)
    context = max(size.context, workload.context)
    larger = replace(size.at_context(context), prompt=max(size.prompt, workload.prompt))
    budget = session.plan.budget_bytes
    plan_for = partial(make_plan, budget=budget, calibration=residency.calibration)
    chosen, _ = workload.choose(larger, plan_for)
    (most,) = session.transport.leasts([chosen.sequences])
    if most < chosen.sequences:
        chosen, _ = replace(workload, most=most, least=most).choose(larger, plan_for)
    residency.accommodate(chosen)


def answers(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    requests: Sequence[Request],
    *,
    progress: Progress | None = None,
    on_step: Callable[[], None] | None = None,
    prefill_step: int | None = None,
    return_caches: bool = False,
    failed: Failed | None = None,
) -> Iterator[RequestOutput]:
    """Answers as they are finished, in any order, of a model that has room for all requests (see ``make_room``).

    Args:
        progress: kept up to date.
        on_step: called after each sweep.
        prefill_step: tokens of a prompt computed at a time; None: as planned.
        failed: called with a request that gets no answer, and why: its sampler, its processors or its text raised, or
            there is no memory for it any more. The others go on as if it had ended. None: such an error ends all.
    """
    session: Session = model.outcore
    if session.prefix is not None:
        session.note("prefix cache: prompts that are answered in batches are neither looked up in it nor kept")
    done = progress or Progress()
    yield from served(
        session.exclusive,
        _answers(model, tokenizer, requests, session, done, on_step, prefill_step, return_caches, failed),
    )


def _answers(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    requests: Sequence[Request],
    session: Session,
    done: Progress,
    on_step: Callable[[], None] | None,
    prefill_step: int | None,
    return_caches: bool,
    failed: Failed | None,
) -> Generator[RequestOutput, None, None]:
    session.bind_again()
    if failed is not None:
        requests = [guarded(r) for r in requests]
    waiting = deque(sorted(requests, key=lambda r: -sum(tokens_of(r))))
    writing: dict[int, Writing] = {}
    step = prefill_step or session.plan.prefill_step
    batch = _batch(model, session, step, prefill_step is not None)
    with generating(model), contextlib.closing(batch):
        while waiting or writing:
            check()
            joining = _joining(waiting, [w.request for w in writing.values()], session)
            for request in joining:
                writing[request.uid] = Writing(request, tokenizer)
            _reserve(session, batch, writing, joining, step, failed)
            if not writing:
                continue
            done.prompt_tokens += sum(len(r.tokens) for r in joining)
            done.running = len(writing)
            tokens = batch.step(joining)
            done.sweeps += 1
            done.generation_tokens += len(tokens)
            session.metrics.tokens += len(tokens)
            ended = _take(tokens, writing, failed is not None)
            caches = [batch.extract(w.request.uid) if return_caches and w.error is None else None for w in ended]
            batch.remove([w.request.uid for w in ended])
            if on_step is not None:
                on_step()
            for w, cache in zip(ended, caches, strict=True):
                del writing[w.request.uid]
                output = _output(w, cache, failed)
                if output is not None:
                    yield output


def _output(w: Writing, cache: list[Any] | None, failed: Failed | None) -> RequestOutput | None:
    """What came of a sequence that has ended; None: ``failed`` was told."""
    if failed is None:
        return w.output(cache)
    try:
        if w.error is not None:
            raise w.error
        return w.output(cache)
    except Exception as e:
        failed(w.request, e)
        return None


def _take(tokens: Sequence[Token], writing: Mapping[int, Writing], alone: bool) -> list[Writing]:
    """Give each sequence its next token; those that have ended.

    Args:
        alone: what goes wrong with one is its own, and ends it.
    """
    ended = []
    for token in tokens:
        w = writing[token.uid]
        try:
            error = error_of(w.request, len(w.tokens))
            if error is not None:
                raise error
            if w.add(token):
                ended.append(w)
        except Exception as e:
            if not alone:
                raise
            w.error = e
            ended.append(w)
    return ended


def _reserve(
    session: Session,
    batch: Batch,
    writing: dict[int, Writing],
    joining: list[Request],
    step: int,
    failed: Failed | None,
) -> None:
    """Room for one more token of everybody; where there is none, the longest gives way.

    Raises:
        BudgetError: there is none, and nobody to tell that a request fails.
    """
    while session.residency is not None and writing:
        longest = max(writing.values(), key=lambda w: w.length)
        try:
            prompt = max((len(r.tokens) for r in joining), default=1)
            session.residency.reserve(longest.length + 1, prompt, step)
            return
        except BudgetError as e:
            if failed is None or not session.transport.alone:  # others would go on with it
                raise
            del writing[longest.request.uid]
            if longest.request in joining:
                joining.remove(longest.request)
            else:
                batch.remove([longest.request.uid])
            failed(longest.request, e)


def _batch(model: nn.Module, session: Session, step: int, asked: bool) -> Batch:
    step = session.transport.chunk(step, asked=asked)
    shared = session.streaming is not None or not session.transport.alone
    kind: Callable[..., Batch] = BatchDecoder if shared else Resident
    if session.size.sequences == 1:
        kind = OneByOne
    return kind(model, session, prefill_step=step)


def _joining(waiting: deque[Request], running: Sequence[Request], session: Session) -> list[Request]:
    """Who joins with the next sweep: whom there is room for, in their order; somebody always, if nobody runs."""
    size = session.size
    longest = max((sum(tokens_of(r)) for r in running), default=0)
    joining: list[Request] = []
    prompts = 0
    while waiting:
        width = len(running) + len(joining) + 1
        need = max(longest, sum(tokens_of(waiting[0])))
        prompts += len(waiting[0].tokens)
        full = width > size.sequences or width * need > size.room
        if (full or (joining and prompts > max(size.joining, size.prompt))) and width > 1:
            break
        longest = need
        joining.append(waiting.popleft())
    return joining
