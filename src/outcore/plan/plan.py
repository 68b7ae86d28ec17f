"""What a plan is: which layers stay, which are streamed through how many slots, where the bytes go. Numbers, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..sizes import format_size, slot_bytes
from .partition import StreamedPart

ANSWER = 256
"""Tokens of an answer, as long as they usually are."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Where a plan's bytes go.

    Attributes:
        weight_bytes: that stay. ``pool_bytes``: slots for single experts.
        slots: of the ring; ``unit_bytes``: the largest unit that one holds.
        kv_slot: of a slot for a layer's keys and values; 0: all of them stay in memory.
        allocator_bytes: freed memory that is kept for reuse.
    """

    weight_bytes: int
    slots: int
    unit_bytes: int
    cache_bytes: int
    activation_bytes: int
    allocator_bytes: int
    pool_bytes: int = 0
    kv_slot: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that a slot takes."""
        return slot_bytes(self.unit_bytes) if self.slots else 0

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes in use at once, if all goes as planned."""
        return (
            self.weight_bytes
            + self.slots * self.slot_bytes
            + self.pool_bytes
            + self.cache_bytes
            + self.activation_bytes
            + self.allocator_bytes
        )


@dataclass(frozen=True, kw_only=True)
class Plan(MemoryUse):
    """What is resident, and what is streamed. All sizes in bytes.

    Attributes:
        resident: indices of layers that stay in memory as a whole; streamed: those of which something is streamed.
        kept: pieces of streamed layers that stay in memory.
        parts: what is streamed, in the order of layers and of calls inside them; the head is not one of them.
        pools: slots for single experts, by layer; ``experts``: that these layers have.
            Of such layers the rest stays in memory, and parts are streamed for long passes alone.
        head_streamed: the head is streamed in slices of at most ``unit_bytes``.
        prefill_step: tokens of a prompt computed at a time.
        smallest_budget_bytes: the smallest budget with which this model, context and number of slots would work.
        token_s, ttft_s: predicted seconds for a token (of every sequence), and from a prompt of ``prompt`` tokens to
            the first one.
        calibrated: the prediction rests on measurements of this machine, not on assumptions.
    """

    budget_bytes: int
    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    kept: tuple[tuple[int, tuple[int, ...]], ...]
    parts: tuple[StreamedPart, ...]
    head_streamed: bool
    prefill_step: int
    context: int
    bytes_per_token: int
    smallest_budget_bytes: int
    pools: tuple[tuple[int, int], ...] = ()
    experts: int = 0
    token_s: float = 0.0
    ttft_s: float = 0.0
    calibrated: bool = False

    def __repr__(self) -> str:
        ring = f", {format_size(self.bytes_per_token)} read a token through {self.slots} slots" * self.streams
        if self.pools:
            ring = f", {format_size(self.bytes_per_token)} read a token"
        peak, budget = format_size(self.peak_bytes), format_size(self.budget_bytes)
        speed = f"; {1 / self.token_s:.2f} tokens a second" if self.token_s and self.foretold else ""
        how = f" {'predicted' if self.calibrated else 'assumed, not measured'}" if speed else ""
        return f"<Plan: {self.held} resident{ring}; {peak} at most of {budget}; context {self.context}{speed}{how}>"

    @property
    def foretold(self) -> bool:
        """Whether ``token_s`` says anything: where nothing is read, it is how fast this device computes, of which
        nothing is known before it was measured. Disks are more alike."""
        return self.calibrated or self.streams

    @property
    def held(self) -> str:
        """What stays in memory, in words."""
        if self.pools:
            return f"{sum(n for _, n in self.pools)} of {self.experts} experts and all else"
        return f"{len(self.resident)} of {len(self.resident) + len(self.streamed)} layers"

    @property
    def streams(self) -> bool:
        """Whether anything at all is streamed."""
        return bool(self.streamed) or self.head_streamed

    @property
    def run_s(self) -> float:
        """Seconds for a prompt and an answer, by which plans are compared."""
        return self.ttft_s + ANSWER * self.token_s

    @property
    def split(self) -> bool:
        """Whether parts of layers are streamed one after the other."""
        return len(self.parts) > len(self.streamed)
