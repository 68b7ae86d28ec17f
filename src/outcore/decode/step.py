"""What a step of several sequences brings each of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .batch_engine import Token


@dataclass
class StepResult:
    """What a step brought.

    Attributes:
        tokens: one of each sequence under way; with drafts, of each that the last sweep brought another.
        joined: sequences that joined with it, for the first time, and seconds since their prompts were begun;
            ``found``: tokens of their prompts that the prefix cache had.
        prompts: of sequences that have not joined, tokens of their prompts that are computed.
        drafts: of each, tokens that were drafted and those that were right.
        full: those that end because there is no memory for a longer context; those that ``failed``, and why.
    """

    tokens: list[Token] = field(default_factory=list)
    joined: dict[int, float] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    full: list[int] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)

    def without(self, gone: Collection[int]) -> StepResult:
        """What it brought the others."""
        return StepResult(
            [token for token in self.tokens if token.uid not in gone],
            {uid: seconds for uid, seconds in self.joined.items() if uid not in gone},
            {uid: found for uid, found in self.found.items() if uid not in gone},
            {uid: held for uid, held in self.prompts.items() if uid not in gone},
            {uid: drafts for uid, drafts in self.drafts.items() if uid not in gone},
            [uid for uid in self.full if uid not in gone],
            [(uid, error) for uid, error in self.failed if uid not in gone],
        )
