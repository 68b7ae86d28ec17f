"""Answers many prompts: as many sequences as memory allows share each pass, and new ones join as others end.

The longest requests begin first: caches are padded to the longest running sequence, so sequences that run together
should have similar lengths. No request overtakes another: the next one waits until there is room for it.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchResponse
from mlx_lm.generate import batch_generate as generate_resident
from mlx_lm.generate_utils import BatchStats
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.session import Session
from ..errors import BudgetError, UsageError
from ..machine.exclusive import served
from ..machine.interrupts import check
from ..modules.cache_check import check_cache
from ..modules.side_by_side import mergeable
from ..plan.planner import make_plan
from ..plan.workload import MOST, Workload
from .passes import generating
from .prompt import cached_tokens, check_length, encode, note_length
from .request import Request, Token
from .scheduler import Scheduler

Failed = Callable[[Request, Exception], None]


@dataclass
class RequestOutput:
    """The answer to a request, while it is generated and afterwards.

    Attributes:
        tokens: generated tokens, including the one that ended the answer.
        logprobs: log-probability of each token, if requested.
        finish_reason: ``stop`` or ``length``; "" before the end.
        text: without an end-of-text token and without a stop string; "" before the end.
        cache: the sequence's caches, if requested; they hold all tokens but the last.
    """

    request: Request
    tokenizer: TokenizerWrapper
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    text: str = ""
    cache: list[Any] | None = None

    def __post_init__(self) -> None:
        self._text = self.tokenizer.detokenizer
        self._seen = 0  # characters that have been searched for stop strings
        self._end: int | None = None

    def add(self, token: Token) -> bool:
        """Adds the next token; returns whether it was the last."""
        self.tokens.append(token.token)
        if token.logprob is not None:
            self.logprobs.append(token.logprob)
        if token.token in self.tokenizer.eos_token_ids:
            self.finish_reason = "stop"
        else:
            self._text.add_token(token.token)
            if self._stopped():
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.request.max_tokens:
                self.finish_reason = "length"
        return bool(self.finish_reason)

    def _stopped(self) -> bool:
        """Whether the text has a stop string; ``_end`` is then where the first one begins."""
        if not self.request.stop:
            return False
        text = self._text.text
        places = [at for stop in self.request.stop if (at := text.find(stop, self._seen)) >= 0]
        self._seen = max(0, len(text) - max(map(len, self.request.stop)))
        self._end = min(places, default=None)
        return bool(places)

    def end(self, cache: list[Any] | None) -> RequestOutput:
        self._text.finalize()
        if self._end is None and self._stopped():
            self.finish_reason = "stop"
        self.text, self.cache = self._text.text[: self._end], cache
        return self


def tokens_of(request: Request) -> tuple[int, int]:
    """Returns a request's prompt tokens, cached ones included, and the most tokens of its answer."""
    return cached_tokens(request.cache or ()) + len(request.tokens), request.max_tokens


@dataclass
class Progress:
    """Totals of a batch so far, and the number of running sequences. ``sweeps``: steps that made tokens, also of a
    resident model."""

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
    """Answers several prompts with a model loaded by ``outcore.load``, as mlx-lm's function of that name.

    The sequences that share a forward pass are as many as the model was loaded for (``load(..., sequences=32)``), or
    else as many as finish the batch soonest within the budget, for which resident layers may be given up.

    Args:
        prompts: texts, or token ids.
        prompt_caches: for each prompt, caches of the text before it; not changed.
        max_tokens: the most tokens of each answer, or a list with one number for each.
        return_prompt_caches, return_token_ids, return_logprobs: as in mlx-lm; the caches returned hold all tokens but
            each answer's last.
        completion_batch_size: the most sequences that share a pass.
        sampler: turns log-probabilities of shape (sequences, vocabulary) into tokens; None: takes the likeliest.

    Returns:
        mlx-lm's ``BatchResponse``: texts in the order of the prompts, and ``stats``, whose ``prompt_time`` is 0 because
            prompts and tokens share passes.

    Raises:
        PromptError: a prompt, which the error names, is empty or longer than the model's context.
        BudgetError: there is no room for the longest prompt and answer.
    """
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    session: Session | None = getattr(model, "outcore", None)
    ids: list[list[int]] = [encode(tokenizer, p).tolist() for p in prompts]  # type: ignore[misc]
    limits, caches = _checked(session, ids, max_tokens, prompt_caches)
    processors = tuple(logits_processors or ())
    if session is None:
        options: dict[str, Any] = {"sampler": sampler, "logits_processors": list(processors)}
        options |= {} if prefill_step_size is None else {"prefill_step_size": prefill_step_size}
        flags = verbose, return_prompt_caches, return_token_ids, return_logprobs
        options["completion_batch_size"] = completion_batch_size
        return generate_resident(model, tokenizer, ids, prompt_caches, limits, *flags, **options)
    requests = [
        Request(i, prompt, limit, sampler, processors, cache=cache, logprobs=0 if return_logprobs else None)
        for i, (prompt, limit, cache) in enumerate(zip(ids, limits, caches, strict=True))
    ]
    if requests:
        with session.exclusive:
            make_room(model, Workload(tuple(map(tokens_of, requests)), completion_batch_size))
    progress, began = Progress(), time.perf_counter()
    found: dict[int, RequestOutput] = {}
    how: dict[str, Any] = {"prefill_step": prefill_step_size, "return_caches": return_prompt_caches}
    for output in answers(model, tokenizer, requests, progress=progress, **how):
        found[output.request.uid] = output
        if verbose:
            print(f"[batch_generate] Finished processing {len(found)}/{len(prompts)} ...", end="\r")
    stats = _stats(progress, time.perf_counter() - began, verbose)
    inside = [found[i] for i in range(len(prompts))]
    # Decode all tokens at once, as mlx-lm does: that keeps a leading space, which decoding token by token drops.
    kept = [a.tokens[:-1] if a.finish_reason == "stop" else a.tokens for a in inside]
    return BatchResponse(
        [tokenizer.decode(list(tokens)) for tokens in kept],
        stats,
        [a.cache for a in inside] if return_prompt_caches else None,
        [list(tokens) for tokens in kept] if return_token_ids else None,
        [list(a.logprobs[: len(t)]) for a, t in zip(inside, kept, strict=True)] if return_logprobs else None,
    )


def _stats(progress: Progress, seconds: float, verbose: bool) -> BatchStats:
    stats = BatchStats(
        prompt_tokens=progress.prompt_tokens,
        generation_tokens=progress.generation_tokens,
        generation_steps=progress.sweeps,
        decode_time=seconds,
        wall_time=seconds,
        peak_memory=mx.get_peak_memory() / 1e9,
    )
    if verbose:
        print(f"\n[batch_generate] Prompt: {stats.prompt_tokens} tokens")
        speed = f"{stats.generation_tps:.3f} tokens-per-sec"
        print(f"[batch_generate] Generation: {stats.generation_tokens} tokens, {speed}")
        print(f"[batch_generate] Peak memory: {stats.peak_memory:.3f} GB")
    return stats


def _checked(
    session: Session | None,
    ids: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    prompt_caches: Sequence[Sequence[Any]] | None,
) -> tuple[list[int], list[Any]]:
    """Returns, for each prompt, the most tokens of its answer, and its caches (None: it has none).

    Raises:
        UsageError: the lists differ in length, or a number is below 1.
        PromptError: a prompt cannot be answered.
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
        check_length(len(prompt), session, f"prompt {i}", held)
        note_length(held + len(prompt), session, f"prompt {i}")
        if session is not None and session.positions is not None:
            limits[i] = min(limits[i], session.positions - held - len(prompt) + 1)
    return limits, caches


def make_room(model: nn.Module, workload: Workload) -> None:
    """Makes room for a workload in a loaded model: for as many sequences as it was loaded for, if several, otherwise
    for as many as finish the workload soonest.

    Raises:
        BudgetError: there is no room for the longest request.
    """
    session: Session = model.outcore
    session.bind_again()
    size, residency, streaming = session.size, session.residency, session.streaming
    fits = workload.context <= size.context and workload.prompt <= size.prompt
    if fits and size.sequences > 1:
        return
    if size.sequences > 1:
        workload = replace(workload, most=size.sequences, least=size.sequences)
    # KV offload holds the keys and values of one text at a time.
    alone = streaming is not None and (streaming.evaluates or streaming.kv is not None)
    if alone or not mergeable(model):
        workload = replace(workload, most=1, least=1)
    larger = replace(size.at_context(max(size.context, workload.context)), prompt=max(size.prompt, workload.prompt))
    plan_for = partial(make_plan, budget=session.plan.budget_bytes, calibration=residency.calibration)
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
    on_step: Callable[[], None] = lambda: None,
    prefill_step: int | None = None,
    return_caches: bool = False,
    failed: Failed | None = None,
) -> Iterator[RequestOutput]:
    """Yields answers in the order in which they end, from a model that has room for all requests (see ``make_room``).

    Args:
        progress: updated after each step.
        on_step: called after each step.
        prefill_step: prompt tokens per chunk; None: as planned.
        failed: called with each request that fails, and the error: its sampler, its processors or decoding its text
            raised, or memory ran out. The other requests go on. None: such an error is raised and ends them all.
    """
    session: Session = model.outcore
    if session.prefix is not None:
        session.note("prefix cache: prompts that are answered in batches are neither looked up in it nor stored")
    done = progress or Progress()

    def write() -> Generator[RequestOutput, None, None]:
        session.bind_again()
        waiting = deque(sorted(requests, key=lambda r: -sum(tokens_of(r))))
        requested = {r.uid: r for r in requests}
        writing: dict[int, RequestOutput] = {}
        most = session.size.sequences
        sequences = Scheduler(model, most=most, prefill_step=prefill_step, draft_tokens=0, planned=True)
        with generating(model), contextlib.closing(sequences):
            while waiting or writing:
                check()
                while waiting and sequences.running + sequences.waiting < sequences.sequences:
                    request = waiting.popleft()
                    writing[request.uid] = RequestOutput(request, tokenizer)
                    own = copy.deepcopy(list(request.cache or ())) or None  # the caller keeps its caches
                    sequences.add(replace(request, cache=own))
                step = sequences.step()
                done.sweeps += bool(step.tokens)
                done.prompt_tokens += sum(len(writing[uid].request.tokens) for uid in step.joined)
                done.generation_tokens += len(step.tokens)
                done.running = sequences.running
                errors = dict(step.failed) | dict.fromkeys(step.full, BudgetError("no memory for a longer context"))
                step.failed.clear()
                outputs = []
                for token in step.tokens:
                    try:
                        if writing[token.uid].add(token):
                            cache = sequences.take_out(token.uid)[0] if return_caches else None
                            sequences.remove([token.uid])
                            outputs.append(writing.pop(token.uid).end(cache))
                    except Exception as e:  # a model may have more tokens than its tokenizer has texts for
                        sequences.remove([token.uid])
                        errors[token.uid] = e
                on_step()
                for uid in [*errors]:
                    if failed is None:
                        raise errors.pop(uid)
                    failed(requested[uid], errors.pop(uid))
                    writing.pop(uid, None)
                yield from outputs

    yield from served(session.exclusive, write())
