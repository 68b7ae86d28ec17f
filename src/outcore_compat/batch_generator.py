"""mlx-lm's ``BatchGenerator`` for a model that Outcore runs: its calls, and Outcore's sequences behind them.

mlx-lm takes all sequences that come, however long, and a sweep for each chunk of a prompt. Here one alone is written
with drafts, several share each sweep with the prompts of those that join, and who has no room waits.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from outcore.decode.continuous import Continuous
from outcore.decode.prompt import cached_tokens
from outcore.decode.request import Request, Token
from outcore.engine.session import Session
from outcore.errors import UsageError
from outcore.machine.allocator import limits
from outcore.modules.cache_check import check_cache

from .request_guard import check_room
from .stored_caches import HandedOut, cache_room


@dataclass
class _Sequence:
    """One that was inserted.

    Attributes:
        request: without its cache, which was given away.
        text: its tokens so far. ``made``: of those, the answer's; ``last``: the newest.
        begun: whether it is under way.
    """

    request: Request
    matcher: Any
    text: list[int]
    made: int = 0
    begun: bool = False
    last: Token | None = None


class SharedBatchGenerator(BatchGenerator):
    """mlx-lm's class of that name. For a model that Outcore has not loaded, mlx-lm's is made instead.

    An answer ends with ``length`` where there is no memory for more of it, however little else there is. Prompts are
    computed in one step, in chunks as planned, so that caches can be had of whole texts.
    """

    def __new__(cls, model: nn.Module, **kwargs: Any) -> Any:
        if getattr(model, "outcore", None) is None:
            return BatchGenerator(model, **kwargs)
        return super().__new__(cls)

    def __init__(self, model: nn.Module, **kwargs: Any) -> None:
        self._sharing: Continuous | None = None  # first: mlx-lm closes what could not be made
        super().__init__(model, **kwargs)
        if self.max_kv_size is not None and not hasattr(model, "make_cache"):
            raise UsageError("max_kv_size: sequences that share sweeps keep all their tokens; leave it out")
        self._session: Session = model.outcore
        self._sequences: dict[int, _Sequence] = {}
        self._uids = itertools.count()
        self._unread: list[Any] = []  # of a step of which one sequence failed
        self._sharing = Continuous(model, most=self.completion_batch_size)
        self._room = cache_room.texts(self._session, 0)
        self._texts = self._room.__enter__()  # what the sequences' caches take
        limits.renew()

    def insert_segments(
        self,
        segments: Any,
        max_tokens: Any = None,
        caches: Any = None,
        all_tokens: Any = None,
        samplers: Any = None,
        logits_processors: Any = None,
        stop_sequences: Any = None,
    ) -> list[int]:
        """As mlx-lm's.

        Raises:
            PromptError: a prompt is empty, has more tokens than the model has positions for, or than there can be
                memory for.
            UsageError: a cache without the tokens that it holds, or of another model.
        """
        given = (max_tokens, caches, all_tokens, samplers, logits_processors, stop_sequences)
        if any(each and len(each) != len(segments) for each in given):
            raise UsageError("every option needs one entry for each prompt")
        own = (self.max_tokens, None, (), self.sampler, tuple(self.logits_processors), None)
        rows = []
        for i, parts in enumerate(segments):
            limit, cache, earlier, sampler, processors, stop = (
                instead if not each or each[i] is None else each[i] for each, instead in zip(given, own, strict=True)
            )
            tokens = tuple(itertools.chain.from_iterable(parts))
            sampler = None if sampler is greedy_sampler else sampler
            request = Request(-1, tokens, limit, sampler, tuple(processors), cache=cache, earlier=earlier)
            rows.append((self._checked(request), stop or self._default_stop_sequences))
        return [self._add(request, stop.matcher()) for request, stop in rows]

    def _checked(self, request: Request) -> Request:
        cache, prompt = request.cache, len(request.tokens)
        held = 0
        if cache is not None:
            check_cache(self._session.forms, cache)
            held = cached_tokens(cache)
            own = [isinstance(c, RotatingKVCache) for c in make_prompt_cache(self.model)]
            if [isinstance(c, RotatingKVCache) for c in cache] != own:
                raise UsageError("caches: bounded ones cannot share sweeps; leave max_kv_size out")
        if held and len(request.earlier) != held:
            raise UsageError(f"all_tokens: {len(request.earlier)} tokens, and the cache holds {held}; give all of them")
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens={request.max_tokens}: ask for at least one token")
        check_room(self._session, held + prompt, prompt, held)
        if not held:
            return replace(request, cache=None, earlier=())
        # A list of our own, which is emptied when the sequence begins.
        return replace(request, cache=copy.deepcopy(list(cache or ())), given=True)

    def _add(self, request: Request, matcher: Any) -> int:
        uid = next(self._uids)
        request = replace(request, uid=uid, scores=True)
        self._engine.add(request)
        self._sequences[uid] = _Sequence(replace(request, cache=None), matcher, [*request.earlier, *request.tokens])
        return uid

    @property
    def _engine(self) -> Continuous:
        if self._sharing is None:
            raise UsageError("this BatchGenerator is closed")
        return self._sharing

    def next(self) -> tuple[list[Any], list[Any]]:
        """One more token of every sequence.

        Raises:
            Exception: what a sequence's own sampler or processors raised, or why its prompt could not be computed; it
                has ended. Nothing of the others is lost.
        """
        if self._sharing is None:
            return [], []
        if self._unread:
            unread, self._unread = self._unread, []
            return [], unread
        began = time.perf_counter()
        self._make_room()
        step = self._engine.step()
        prompts = [self._progress(uid, held) for uid, held in step.prompts.items()]
        prompts += [self._began(uid) for uid in step.joined if not self._sequences[uid].begun]
        tokens = [self._response(self._sequences[t.uid], t) for t in step.tokens]
        tokens += [self._no_more(self._sequences[uid]) for uid in step.full]
        # Prompts and tokens share sweeps, so all time counts as decoding.
        self._counters.decode_time += time.perf_counter() - began
        self._counters.generation_tokens += len(step.tokens)
        self._counters.generation_steps += bool(step.tokens)
        self._texts.sequences = len(self._sequences)  # those that have ended may be stored
        if not self._engine.running and not self._engine.waiting:
            self._engine.step()  # what the sequences took is given back
        for uid, error in step.failed:
            del self._sequences[uid]
            self._unread = tokens
            raise error
        return prompts, tokens

    def next_generated(self) -> list[Any]:
        while True:
            prompts, tokens = self.next()
            if tokens or not prompts:
                return tokens

    def _make_room(self) -> None:
        """For what the step will take, of what is stored."""
        self._texts.sequences = len(self._sequences)
        self._texts.tokens = max((len(s.text) + 1 for s in self._sequences.values()), default=0)
        cache_room.keep_to()

    def _began(self, uid: int) -> Any:
        self._sequences[uid].begun = True
        prompt = len(self._sequences[uid].request.tokens)
        self._counters.prompt_tokens += prompt
        return PromptProcessingBatch.Response(uid, (prompt, prompt), True, True)

    def _progress(self, uid: int, held: int) -> Any:
        return PromptProcessingBatch.Response(uid, (held, len(self._sequences[uid].request.tokens)), False, False)

    def _response(self, s: _Sequence, token: Token) -> Any:
        s.made, s.last, s.begun = s.made + 1, token, True
        s.text.append(token.token)
        reason = "length" if s.made >= s.request.max_tokens or not self._goes_on(s) else None
        if s.matcher.advance(token.token):
            reason = "stop"
        if reason is None:
            return GenerationBatch.Response(token.uid, token.token, token.scores, None, None, None)
        del self._sequences[token.uid]
        cache, held = self._engine.take_out(token.uid)
        mx.eval([c.state for c in cache])
        return GenerationBatch.Response(token.uid, token.token, token.scores, reason, HandedOut(cache), held)

    def _goes_on(self, s: _Sequence) -> bool:
        """Whether there can be room for another token; if others are there, it is they who wait."""
        session = self._session
        if len(self._sequences) > 1 or session.size.sequences > 1 or len(s.text) < session.plan.context:
            return True
        return session.residency.holds(len(s.text) + 1)

    def _no_more(self, s: _Sequence) -> Any:
        """The end of one that there is no room for, which came without a token: nothing is added to its text."""
        assert s.last is not None
        logging.getLogger("outcore").warning("an answer ended for want of memory for a longer context")
        del self._sequences[s.request.uid]
        return GenerationBatch.Response(s.request.uid, s.last.token, s.last.scores, "stop", [], [])

    def extract_cache(self, uids: Sequence[int]) -> dict[int, Any]:
        """Nothing: caches are handed out at an answer's end, and to whoever removes a sequence.

        Raises:
            UsageError: some were asked for.
        """
        if uids:
            raise UsageError("caches of texts under way are not handed out: take them from remove() or a last response")
        return {}

    def remove(self, uids: Sequence[int], return_prompt_caches: bool = False) -> Any:
        here = [uid for uid in uids if self._sequences.pop(uid, None) is not None]
        if return_prompt_caches:
            return {uid: self._engine.take_out(uid) for uid in here}
        if here:
            self._engine.remove(here)
        return {}

    @property
    def prompt_cache_nbytes(self) -> int:
        return self._texts.nbytes

    def close(self) -> None:
        super().close()
        if self._sharing is not None:
            self._sharing.close()
            self._sharing.step()
            self._sharing = None
            self._sequences.clear()
            self._room.__exit__(None, None, None)
            limits.renew()
