"""The scheduler: sequences that join and leave between steps share forward passes.

A short prompt is computed in the pass with which its sequence joins. Of a longer prompt, each step computes one chunk,
or as many as take no longer than reading the weights, so that the other sequences keep getting tokens. A sequence that
is removed frees its place before the next pass. The caches of the running sequences displace resident layers, which are
taken back when sequences have left. A sequence waits while there is no room for it; when the running sequences outgrow
memory, the newest goes back to waiting and is computed again later. A model that is all in memory gives up no layers:
sequences wait instead.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from ..engine.session import Session
from ..engine.transport import pass_runner
from ..errors import BudgetError
from ..machine.allocator import clear_cache
from ..machine.device import on_cpu
from ..modules.side_by_side import mergeable
from ..plan.planner import ENOUGH_STEP
from ..plan.workload import MOST
from .batch_decoder import BatchDecoder
from .prefill import Prefill, Prefills
from .prefix_cache import block_step
from .prompt import cached_tokens
from .request import Request, own_cache
from .sequence_room import SequenceRoom
from .speculative_decoder import SpeculativeDecoder
from .step import ScheduledSequence, StepResult


class Scheduler:
    """Decodes many sequences: each step returns the next token of each.

    Args:
        ends: end-of-text tokens; nothing is drafted after them.
        most: the most sequences that share a pass.
        prefill_step: prompt tokens per chunk; None: as planned.
        draft_tokens: the most tokens drafted per pass; None: as many as pay.
        planned: the plan has room for all sequences that share passes, up to the ends of their answers.
        alone: there is a single request, with ``Request.alone``, which makes room for itself as it grows.

    Attributes:
        ends: as above; a change applies to sequences that begin later.
        sequences: the most sequences that share a pass; 1 if their caches cannot be merged.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ends: Collection[int] = (),
        most: int = MOST,
        prefill_step: int | None = None,
        draft_tokens: int | None = None,
        planned: bool = False,
        alone: bool = False,
    ) -> None:
        self._model, self.ends, self._asked_step, self._drafted = model, ends, prefill_step, draft_tokens
        self._planned = planned
        session: Session = model.outcore
        self._session = session
        self._room = None if alone else SequenceRoom(session, prefill_step, draft_tokens, planned=planned)
        self.sequences = 1
        if not alone:
            single = (session.streaming is not None and session.streaming.evaluates) or not mergeable(model)
            if session.profile.rounding.exact_batch:  # as many passes as there is memory for their graphs
                most = session.size.graph(on_cpu(), session.plan.split).readings([1] * most, session.size.context)[0]
            (self.sequences,) = self._session.transport.leasts([1 if single else most])
        self._waiting: deque[ScheduledSequence] = deque()
        self._rows: dict[int, ScheduledSequence] = {}
        self._prefills = Prefills()  # sequences with partly computed prompts
        self._batch: SpeculativeDecoder | BatchDecoder | None = None
        self._order = 0
        self._refused: tuple[object, ...] | None = None  # running and joining sequences that had no room together
        self._unseen: StepResult | None = None  # result of a step that was interrupted before it could return it

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queues a sequence, which joins as soon as there is room. If its request has a ``cache``, ``earlier`` are the
        tokens in that cache, which are computed again if the cache has to be given up."""
        self._order += 1
        if request.alone is not None:
            self._waiting.append(ScheduledSequence(request, list(request.tokens), self._order))
            return
        text = [*request.earlier, *request.tokens]
        whole = replace(request, tokens=tuple(text), cache=None, earlier=())
        row = ScheduledSequence(whole, text, self._order)
        if request.cache is not None:
            row.before = max(0, cached_tokens(request.cache) - len(request.earlier))
            row.held, row.cache = len(request.earlier), own_cache(self._model, request)
        self._waiting.append(row)

    def remove(self, uids: Iterable[int]) -> None:
        gone = set(uids)
        if self._unseen is not None:
            self._unseen = self._unseen.without(gone)
        self._waiting = deque(row for row in self._waiting if row.request.uid not in gone)
        here = [uid for uid in self._rows if uid in gone]
        for uid in here:
            self._rows.pop(uid).request.close_media()
            self._prefills.pop(uid, None)
        if here and self._batch is not None:
            with self._session.exclusive:
                self._batch.remove(here)

    def take_out(self, uid: int) -> tuple[list[Any], list[int]]:
        """Ends a sequence. Returns its caches, and the prompt and answer tokens in them: all but the last, or fewer if
        drafted tokens were removed; of a waiting sequence, the cache that its request came with."""
        row = self._rows.get(uid)
        if row is None:
            row = next((row for row in self._waiting if row.request.uid == uid), None)
            self.remove([uid])
            return ([], []) if row is None or not row.cache else (row.cache, row.text[: row.held])
        if self._unseen is not None and (unseen := sum(token.uid == uid for token in self._unseen.tokens)):
            # The sequence's caches hold a token that the caller has not got.
            row.rewind(unseen)
            self.remove([uid])
            return [], []
        with self._session.exclusive:
            if (prefill := self._prefills.get(uid)) is not None:
                row.cache, row.held = prefill.caches()
            elif self._batch is not None:
                row.cache, held = self._batch.take_out(uid)
                row.held += held
            self.remove([uid])
        return row.cache or [], row.text[: row.held]

    def step(self) -> StepResult:
        """Computes the next token of every sequence in at most one shared pass, and part of the unfinished prompts.
        While drafted tokens of the last pass are left, returns these, of the sequences that have some.

        A pass that fails ends all sequences in it, but not the scheduler. After an interrupt, the pass's sequences wait
        and are computed again. Ranks that share a model must have the same sequences and step together; there, any
        failure is raised and ends the run.
        """
        if self._unseen is not None:
            step, self._unseen = self._unseen, None
            return step
        step, made = StepResult(), False
        try:
            with self._session.exclusive:
                self._make(step)
                made = True
        except BaseException:
            # The next step returns a result that was complete before the interrupt, or that reports ended sequences.
            self._unseen = step if made or step.failed or step.full else None
            raise
        return step

    def _make(self, step: StepResult) -> None:
        if self._session.unbound is not None:
            self._session.bind_again()
        if (layers := self._session.residency.layers).shed_layers:
            layers.note_arrivals()
        if self._room is None:
            if self._batch is None:
                self._batch = self._decoder(together=False)
            alone = [self._waiting.popleft().request] if self._waiting else []
            with ExitStack() as stack:
                for request in alone:
                    stack.callback(request.close_media)
                    request.open_media(self._model)
                step.tokens = self._batch.step(alone, self._asked_step or self._session.plan.prefill_step)
            self._session.metrics.tokens += len(step.tokens)
            return
        # New sequences join when no verified tokens of the last pass are left, and share the next pass.
        waits = self._batch is not None and self._batch.ready
        admitted = [] if waits else self._admit(self._room, step)
        self._grow(self._room, admitted, step)
        if not self._rows:
            self._room.rest()
            return
        try:
            joined = self._run_pass(self._room, admitted, step, waits=waits)
        except Exception as e:
            if not self._session.transport.alone:
                raise  # the other ranks are in the middle of this step
            if isinstance(e, BudgetError) and len(self._rows) == 1 and all(r.answered for r in self._rows.values()):
                step.full += self._rows
            else:
                step.failed += [(uid, e) for uid in self._rows]
            self._drop()
        except BaseException:
            # An interrupt leaves the caches in an unknown state: all running sequences wait and are computed again.
            rows = sorted(self._rows.values(), key=lambda row: row.order)
            self._drop()
            self._wait(rows)
            raise
        else:
            new = {uid: row for uid in joined if (row := self._rows[uid]).answered == 0}
            step.joined = {uid: time.monotonic() - row.began for uid, row in new.items()}
            step.found = {uid: row.found for uid, row in new.items()}
            for token in step.tokens:
                self._rows[token.uid].text.append(token.token)
            if self._batch is not None and self._batch.failed:
                # An error of a sequence's own sampler or processors ends that sequence only.
                step.failed += self._batch.failed.items()
                self._batch.failed = {}
                self.remove([uid for uid, _ in step.failed])

    def close(self, error: BaseException | None = None) -> None:
        """Ends all sequences. The caches of a text that runs alone then hold the tokens that the caller got
        (``OneText.end``); ``error``: what ended that text early. Safe to call twice."""
        with self._session.exclusive:
            if self._room is None and isinstance(self._batch, SpeculativeDecoder):
                self._batch.end(error)
            self._unseen = None
            self._waiting.clear()
            self._drop()

    def _admit(self, room: SequenceRoom, step: StepResult) -> list[ScheduledSequence]:
        """Makes waiting sequences that there is room for running ones, and returns them."""
        while self._waiting:
            joining = self._next(room)
            asked = (*self._rows, None, *(row.request.uid for row in joining))
            if not joining or asked == self._refused:
                return []
            while joining:
                try:
                    self._fit(room, [*self._rows.values(), *joining], joining)
                    break
                except BudgetError as e:
                    joining = joining[: len(joining) // 2]
                    if not joining and not self._rows:
                        self._refuse(step, e)
            if joining:
                for row in joining:
                    self._waiting.popleft()
                    self._rows[row.request.uid], row.began = row, time.monotonic()
                return joining
            if self._rows:
                try:
                    room.check_alone(self._waiting[0].length, self._waiting[0].new)
                    self._refused = asked
                    return []
                except BudgetError as e:
                    self._refuse(step, e)
        return []

    def _refuse(self, step: StepResult, error: BudgetError) -> None:
        """Ends the first waiting sequence: there is no room for it even if it runs by itself."""
        row = self._waiting.popleft()
        (step.full.append(row.request.uid) if row.answered else step.failed.append((row.request.uid, error)))

    def _next(self, room: SequenceRoom) -> list[ScheduledSequence]:
        """Returns the first waiting sequences, as many as may share a pass with the running ones."""
        found: list[ScheduledSequence] = []
        needs, prompts = [row.need for row in self._rows.values()], [0]
        for row in self._waiting:
            needs.append(row.need)
            prompts.append(len(row.text))
            if len(needs) > self.sequences or (len(needs) > 1 and not room.may_share(needs, prompts, len(found))):
                break
            found.append(row)
        return found

    def _grow(self, room: SequenceRoom, joining: Sequence[ScheduledSequence], step: StepResult) -> None:
        """Makes room for one more token of every sequence. If there is none, the newest sequence waits again; or, if
        the plan had room for all (``planned``), the longest fails."""
        while len(self._rows) > len(self._prefills) and not joining:
            try:
                self._fit(room, list(self._rows.values()), [])
                return
            except BudgetError as e:
                if self._planned and self._session.transport.alone:
                    longest = max(self._rows.values(), key=lambda row: row.length)
                    self.remove([longest.request.uid])
                    step.failed.append((longest.request.uid, e))
                    continue
                newest = max(self._rows.values(), key=lambda row: row.order)
                self.remove([newest.request.uid])
                if not self._rows:
                    step.full.append(newest.request.uid)
                    return
                self._wait([newest])

    def _wait(self, rows: Sequence[ScheduledSequence]) -> None:
        """Puts sequences at the head of the queue, to be computed again from their tokens."""
        for row in rows:
            row.held, row.cache = 0, None
            row.rewind()
        self._waiting.extendleft(reversed(rows))

    def _drop(self) -> None:
        for uid in list(self._rows):
            self._rows.pop(uid).request.close_media()
        self._prefills.clear()
        if self._batch is not None:
            with self._session.exclusive:
                batch, self._batch = self._batch, None
                batch.close()
            clear_cache()

    def _fit(self, room: SequenceRoom, rows: Sequence[ScheduledSequence], joining: Sequence[ScheduledSequence]) -> None:
        """Makes room for these sequences and the prompts of the joining and the partly computed ones. Raises
        ``BudgetError``."""
        begun = [self._rows[uid].new for uid in self._prefills]
        room.fit([row.length for row in rows], [row.new for row in joining], begun)

    def _run_pass(
        self, room: SequenceRoom, admitted: Sequence[ScheduledSequence], step: StepResult, *, waits: bool
    ) -> list[int]:
        """Computes a token of each sequence whose prompt is finished, and part of the other prompts. Returns the uids
        of the sequences whose prompts this finished. ``waits``: compute no prompts, since some sequence still has
        verified tokens."""
        chunk, metrics = room.step, self._session.metrics
        if self._session.prefix is not None and self._asked_step is None and not self._planned:
            chunk = block_step(chunk)
        # Chunks of prompts and other sequences' tokens are computed layer by layer, so that each layer is read once.
        together = pass_runner(self._session.streaming, self._session.transport) is not None
        apart = len(self._rows) == 1 or room.apart
        for row in admitted:
            request = row.begin(self._session, chunk, whole=apart, finds=not self._planned, records=room.records)
            try:
                request.open_media(self._model, room.hold)
            except Exception as e:  # fails this sequence only
                self.remove([row.request.uid])
                step.failed.append((row.request.uid, e))
                continue
            self._prefills[row.request.uid] = Prefill(self._model, self._session, request, chunk)
        joining, part = ([], None) if waits else self._next_prompts(chunk, together=together)
        if part is not None and not together:
            try:
                part.run()
                step.prompts[part.uid] = part.held
            except Exception as e:  # fails this sequence only
                self.remove([part.uid])
                step.failed.append((part.uid, e))
        requests = [self._prefills.pop(uid).joining(chunk) for uid in joining]
        here = len(self._rows) - len(self._prefills)
        if not here:
            return []
        several = (len(self._rows) if together else here) > 1 and not room.apart
        if self._batch is None or several != isinstance(self._batch, BatchDecoder):
            others = self._taken_out({*joining, *self._prefills})
            requests = [*(row.go_on() for row in others), *requests]
            self._batch = self._decoder(together=several)
        shared_part = part if together else None
        began, waited = metrics.clock(), metrics.stall_s
        step.tokens = self._batch.step(requests, chunk, [] if shared_part is None else shared_part.passes)
        if shared_part is not None:
            shared_part.computed()
            step.prompts[shared_part.uid] = shared_part.held
            if metrics.stall_s - waited > (metrics.clock() - began) / 2:
                # The pass mostly waited for weights, so twice as many chunks fit into the same time.
                self._prefills.chunks *= 2
        step.drafts = self._batch.drafts
        for uid in joining:
            self._rows[uid].request.close_media()
        metrics.tokens += len(step.tokens)
        return joining

    def _decoder(self, *, together: bool) -> SpeculativeDecoder | BatchDecoder:
        """Makes a decoder with a row of shared caches for each sequence (``together``), or with separate caches."""
        if together:
            return BatchDecoder(self._model, self._session)
        return SpeculativeDecoder(self._model, self._session, ends=self.ends, most=self._drafted)

    def _next_prompts(self, chunk: int, *, together: bool) -> tuple[list[int], Prefill | None]:
        """Returns the prompts to finish in this step, and one prompt of which to compute some chunks."""
        going = len(self._rows) > len(self._prefills)
        if self._planned or not self._session.transport.alone or (together and not going):
            # Ranks compute one chunk each at the same time; where no sequence waits, whole prompts are computed.
            return self._prefills.next(chunk, math.inf)
        # The planned chunk may be short because prompts were; several of these together make a chunk of good length.
        room = (self._asked_step or max(chunk, ENOUGH_STEP)) * (self._prefills.chunks if together else 1)
        longest = max(chunk, self._session.plan.prefill_step)
        return self._prefills.next(chunk, min(room, self._session.size.in_reading(longest)))

    def _taken_out(self, new: Collection[int]) -> list[ScheduledSequence]:
        """Closes the current decoder, to change to one of the other kind. Returns its sequences, with their caches;
        ``new`` sequences are not in it yet."""
        batch, self._batch = self._batch, None
        if batch is None:
            return []
        rows = [row for uid, row in self._rows.items() if uid not in new]
        for row in rows:
            row.cache, held = batch.take_out(row.request.uid)
            row.held += held
            row.rewind()
        batch.close()
        return rows
