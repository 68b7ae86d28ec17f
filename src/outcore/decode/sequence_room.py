"""Makes room in memory for sequences that come and go, on every rank that shares the model: their caches, and a little
more, displace resident layers, which are taken back when sequences have left."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..engine.session import Session
from ..errors import BudgetError
from ..machine.device import on_cpu
from ..plan.cache_size import SHARED_STEP
from ..plan.candidate import replanned_bytes
from ..plan.joint_plan import MOST, NGRAM, guess_s, pays_for_several
from ..plan.planner import prefill_steps
from ..plan.workload import JOINING, for_sequences
from ..sizes import KV_STEP, format_size
from .one_text import make_room
from .prefix_cache import captured_bytes, room_to_record
from .speculative.acceptance import AcceptanceStats, Seconds


class SequenceRoom:
    """Makes room for the sequences of one model; arguments as in ``Scheduler``.

    Attributes:
        drafted: tokens that several running sequences together may draft per pass; 0: no drafts for several.
        apart: several sequences have separate caches: for drafts, for exact texts, or because padding all to the
            longest would leave no room.
        records: there is room to store prompts in the prefix cache.
    """

    def __init__(
        self,
        session: Session,
        asked_step: int | None = None,
        asked_drafts: int | None = None,
        *,
        planned: bool = False,
    ) -> None:
        self._session, self._base, self._exact = session, session.size, session.profile.rounding.exact_batch
        # A prompt has the bits that it has alone if its chunks are those.
        self._asked_step = asked_step or (session.plan.prefill_step if self._exact else None)
        self._asked_drafts, self._planned = asked_drafts, planned
        self._draft = session.residency.layers.draft
        self._transport = session.transport
        self._transport.rest()
        self.drafted, self.apart, self.records = 0, self._exact, True
        self._captured = 0  # bytes reserved for states of joining prompts, to be stored
        self._agreed_step: int | None = None  # the shortest chunk length of all ranks

    @property
    def step(self) -> int:
        """Prompt tokens per chunk, the same on all ranks."""
        return self._asked_step or self._agreed_step or self._session.plan.prefill_step

    def fit(self, lengths: Sequence[int], joining: Sequence[int] = (), begun: Sequence[int] = ()) -> None:
        """Makes room for sequences; all ranks that share the model call it at the same time.

        Args:
            lengths: tokens of each sequence so far.
            joining: tokens to compute of each sequence that joins; ``begun``: of each with a partly computed prompt.

        Raises:
            BudgetError: there is no room within the budget, here or on another rank.
        """
        self._agreed_step = self._transport.fit(self._fit_here, lengths, joining, begun)

    def hold(self, nbytes: int) -> None:
        """Counts ``nbytes`` more bytes, or fewer if negative, in all sizes from now on."""
        self._base = replace(self._base, kept=max(0, self._base.kept + nbytes))

    def may_share(self, needs: Sequence[int], prompts: Sequence[int], joining: int) -> bool:
        """Whether sequences may run together, before room is made. ``needs``: the most tokens of each; ``prompts``:
        prompt tokens of those that join; ``joining``: how many of these join before the last one."""
        size = self._session.size
        if not self._planned:
            return not joining or sum(prompts) <= JOINING
        joins = not joining or sum(prompts) <= max(size.joining, size.prompt)
        return joins and len(needs) <= size.sequences and len(needs) * max(needs) <= size.room

    def _fit_here(self, lengths: Sequence[int], joining: Sequence[int], begun: Sequence[int] = ()) -> int:
        """Makes room on this rank; returns the tokens that the longest sequence has room for."""
        session = self._session
        residency, size = session.residency, session.size
        if self._planned:
            make_room(session, max(lengths) + 1, max(joining, default=1), self._asked_step)
            return session.size.context
        if len(lengths) > 1 and session.streaming is not None and session.streaming.kv is not None:
            # A layer's offloaded keys and values are those of one text; other texts would be computed with them.
            raise BudgetError("KV offload to disk works for one text at a time")
        given_up, self.records = self._see_draft(), True
        longest = max(lengths) + 1
        if len(lengths) == 1:
            prompt = max(joining, default=1)
            if size.sequences == 1 and size.drafted != self._base.drafted and residency.layers.adapts:
                self._base = replace(self._base, drafted=size.drafted)  # memory went to layers, or came back
            if size.sequences > 1 or (joining and size is not self._base):
                # Free the room of earlier sequences.
                residency.release(self._base)
            # A resident model decodes a token ahead and keeps the states from before, to drop that token.
            kept = self._base.states if session.streaming is None else 0
            # Ranks agree on room for drafted tokens before drafting: a rank without room would find out too late.
            ahead = 0 if self._transport.alone or session.drafting is None else MOST
            _, self.records = room_to_record(session, longest + ahead, prompt, self._asked_step, kept)
            return max(longest, session.plan.context - ahead)
        prompts = [*joining, *begun]
        kept = self._captured_bytes(begun) if self.apart else 0
        same = size.sequences == len(lengths) and not joining and not given_up and self._captured == kept
        held = sum(lengths) + len(lengths) if self.apart and not self.drafted else 0
        if same and longest + self.drafted <= size.context and held <= size.room:
            return size.context
        drafted = self.drafted if same else self._base.drafted if self._drafts_pay(len(lengths)) else 0
        if drafted:
            with contextlib.suppress(BudgetError):
                context = self._take(lengths, prompts, drafted, apart=True)
                self.drafted, self.apart = drafted, True
                return context
        try:
            context, apart = self._take(lengths, prompts, 0, apart=self._exact), self._exact
        except BudgetError:
            # Sequences in separate caches would each read their own experts.
            if self._exact or not self._transport.alone or session.plan.pools:
                raise
            context, apart = self._take(lengths, prompts, 0, apart=True), True
        self.drafted, self.apart = 0, apart
        return context

    def _take(self, lengths: Sequence[int], joining: Sequence[int], drafted: int, *, apart: bool = False) -> int:
        """Makes room for several sequences that together draft ``drafted`` tokens; ``apart``: in separate caches.
        Returns the tokens that the longest has room for."""
        session, size = self._session, self._session.size
        residency = session.residency
        longest, prompt = max(lengths) + 1 + drafted, max(joining, default=1)
        room = -(-longest // SHARED_STEP) * SHARED_STEP
        context = max(longest, min(room, session.max_context or room))
        one = replace(self._base.at_context(context), drafted=drafted, prompt=prompt)
        wanted = for_sequences(one, len(lengths), sum(joining) + drafted)
        # Each drafted text keeps states to go back to. With a draft copy they fit into the room of the copy's caches,
        # which exist for one text at a time.
        kept = one.kept + ((len(lengths) - 1) * one.states if drafted and self._draft is None else 0)
        # Prompts in separate caches are stored for the prefix cache; that room is given back after the pass.
        captured, before = self._captured_bytes(joining) if apart else 0, self._captured
        # Without drafts, separate caches are as long as each text; padded ones are as long as the longest.
        alone = sum(n // SHARED_STEP + 1 for n in lengths) * SHARED_STEP
        shared = alone if apart and not drafted else len(lengths) * context
        wanted = replace(wanted, shared=shared, step=KV_STEP if apart else SHARED_STEP, kept=kept + captured)
        if session.streaming is None:
            # A model that is all in memory is not streamed to make room.
            least = replace(session.plan, prefill_step=prefill_steps(prompt)[-1])
            needed = replanned_bytes(wanted, least, least.resident)
            if needed > least.budget_bytes:
                raise BudgetError("all weights are in memory, which leaves no room for another sequence", needed)
        steps = [min(self._asked_step, prompt)] if self._asked_step else None
        residency.accommodate(wanted, steps=steps, keep_draft=bool(drafted))
        if len(lengths) < size.sequences or captured < before:
            residency.release(wanted)
        self._captured = captured
        return context

    def _captured_bytes(self, prompts: Sequence[int]) -> int:
        """Returns the bytes of these prompts' states that are kept until the prefix cache stores them."""
        return sum(captured_bytes(self._session, tokens) for tokens in prompts)

    def _drafts_pay(self, texts: int) -> bool:
        """Whether drafts, with separate caches, make several texts faster."""
        session, residency = self._session, self._session.residency
        drafting, streaming, size = session.drafting, session.streaming, self._base
        if not self._transport.alone or streaming is None or drafting is None:
            return False
        if streaming.evaluates or session.plan.pools or not size.drafted or self._asked_drafts == 0:
            return False
        seen, blocks = session.acceptance or AcceptanceStats(), not (on_cpu() or session.profile.rounding.rows_differ)
        pays = partial(pays_for_several, size, session.plan, residency.calibration, texts, blocks)
        if drafting.kind == NGRAM:
            return pays(tokens=seen.made / seen.sweeps if seen.sweeps else None)
        if residency.layers.draft is None or not (draft := residency.layers.draft.draft).copies_model:
            return False  # the draft model has caches for one text
        guess = seen.guess.get(draft.kind, Seconds()).value
        if guess is None:
            guess = guess_s(size, draft, residency.calibration)
        chance = seen.typical(draft.kind) if draft.kind in seen.sources else draft.chance
        return pays(chance=min(chance, 0.999), guess_s=guess)

    def _see_draft(self) -> bool:
        """Returns whether the draft was given up or came back since the last call; the base size is without it, or with
        it, then."""
        residency, profile = self._session.residency, self._session.profile
        if (draft := residency.layers.draft) is self._draft:
            return False
        given, base = residency.without_draft, self._base
        self._base, self._draft = given(base) if draft is None else draft.size_with(replace(profile, size=base)), draft
        return True

    def check_alone(self, tokens: int, prompt: int) -> None:
        """Raises ``BudgetError`` if a waiting text of ``tokens`` tokens, ``prompt`` of them still to compute, has no
        room even by itself."""
        residency, budget = self._session.residency, self._session.plan.budget_bytes
        if not self._transport.alone or residency.holds(tokens + 1, prompt, self._base):
            return
        raise BudgetError(
            f"a context of {tokens + 1} tokens does not fit into {format_size(budget)} with this model, by itself "
            "either: give it more memory, or ask for fewer tokens"
        )

    def rest(self) -> None:
        """Frees the sequences' room when none is running, so that the next pass can take layers back."""
        self._transport.rest()
        if self._planned:
            return
        self._see_draft()
        if self._session.size is not self._base:
            self._session.residency.release(self._base)
