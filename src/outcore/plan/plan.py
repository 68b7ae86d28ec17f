"""A plan: which layers are resident, which are streamed through how many slots, and where the bytes go."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from ..sizes import format_size, slot_bytes
from .partition import StreamedPart

ANSWER = 256
"""Tokens of a typical answer."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Where a plan's bytes go.

    Attributes:
        weight_bytes: bytes of resident weights.
        pool_bytes: bytes of expert caches.
        slots: how many slots the ring has.
        unit_bytes: bytes of the largest unit in a slot.
        kv_slot: bytes of a slot for a layer's keys and values; 0 without KV offload.
        allocator_bytes: freed memory that MLX keeps for reuse.
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
        """Bytes of memory of one slot."""
        return slot_bytes(self.unit_bytes) if self.slots else 0

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes in use at once, as planned."""
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
        budget_bytes: the budget that the plan was made for.
        resident: indices of layers that stay in memory as a whole.
        streamed: indices of layers of which something is streamed.
        kept: index of each streamed layer with resident pieces, and the indices of these.
        parts: streamed units in order of computing, without the head.
        head_streamed: whether the head is streamed, in slices of at most ``unit_bytes``.
        prefill_step: tokens of a prompt computed at once.
        context: tokens that memory is planned for.
        bytes_per_token: bytes read from disk for each token.
        smallest_budget_bytes: the smallest budget that works for this model, context and number of slots.
        pools: index of each layer whose experts are read one by one, and how many its cache has room for; 0: they are
            read into the slots, behind ``shared_at``. Parts that are experts are streamed only in long passes.
        experts: routed experts of these layers together.
        token_s: predicted seconds for a token (of every sequence).
        ttft_s: predicted seconds from a prompt to the first token.
        calibrated: whether predictions rest on measurements of this machine, not on assumptions.
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
        speed = f"; {1 / self.token_s:.2f} tokens a second" if self.token_s and self.predicted else ""
        how = f" {'predicted' if self.calibrated else 'assumed, not measured'}" if speed else ""
        return f"<Plan: {self.held} resident{ring}; {peak} at most of {budget}; context {self.context}{speed}{how}>"

    def __dir__(self) -> list[str]:
        return [*(each.name for each in fields(self)), "held", "peak_bytes", "streams"]

    @property
    def predicted(self) -> bool:
        """Whether ``token_s`` is worth showing.

        Not if nothing is streamed and the device was not measured: devices differ more in speed than disks.
        """
        return self.calibrated or self.streams

    @property
    def held(self) -> str:
        """Describes what stays in memory."""
        if self.pools:
            more = "part of the rest" if self.head_streamed or not all(p.experts for p in self.parts) else "all else"
            return f"{sum(n for _, n in self.pools)} of {self.experts} experts and {more}"
        return f"{len(self.resident)} of {len(self.resident) + len(self.streamed)} layers"

    @cached_property
    def shared_at(self) -> int:
        """Where the part of a slot begins that units without experts leave free."""
        least = self.unit_bytes // 4 if self.head_streamed else 0  # few slices of the head
        return max([least, *(p.slot for p in self.parts if not p.experts)])

    @property
    def streams(self) -> bool:
        """Whether anything is streamed."""
        return bool(self.streamed) or self.head_streamed

    @property
    def run_s(self) -> float:
        """Predicted seconds for a prompt and an answer, by which plans are compared."""
        return self.ttft_s + ANSWER * self.token_s

    @property
    def split(self) -> bool:
        """Whether layers are streamed in several parts."""
        return len(self.parts) > len(self.streamed)
