"""How many tokens of context to plan for, and how many sequences share a pass.

More sequences get more out of each pass, and leave less memory for resident layers. Of the numbers that fit the budget,
the one that answers all requests soonest in simulation is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import BudgetError, PromptError
from .model_size import ModelSize
from .plan import ANSWER, Plan
from .planner import WORTH, reading_sizes

# Default limit of sequences: mlx-lm's number, and the most that compute is calibrated for.
MOST = 32

# Most tokens of prompts that join in one pass, since all are in memory at once. A single longer prompt may join.
JOINING = 4096

# Room is tried for sequences as long as the longest of all requests, of the shortest 90 %, and of the shortest half.
SHARES = (1.0, 0.9, 0.5)


def for_sequences(size: ModelSize, sequences: int, prompts: int | None = None) -> ModelSize:
    """Returns the model's size with several sequences, each of ``size.context`` tokens.

    Args:
        prompts: tokens of all their prompts together; None: as if each had the longest.
    """
    if sequences == 1:
        return replace(size, sequences=1)
    prompts = sequences * size.prompt if prompts is None else prompts
    return replace(size, sequences=sequences, joining=max(size.prompt, min(JOINING, prompts)))


@dataclass(frozen=True)
class Workload:
    """The requests of a batch.

    Attributes:
        requests: tokens of each prompt, and most tokens of its answer.
        most: how many sequences may share a pass.
        least: how many sequences must share a pass.
    """

    requests: tuple[tuple[int, int], ...]
    most: int = MOST
    least: int = 1

    @property
    def context(self) -> int:
        """Tokens of the longest request."""
        return self._needs[0]

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(prompt for prompt, _ in self.requests)

    @cached_property
    def _needs(self) -> list[int]:
        return sorted(map(sum, self.requests), reverse=True)

    def sizes(self, size: ModelSize) -> Iterator[ModelSize]:
        """Yields sizes with numbers of sequences worth comparing: fewest first, then most room first."""
        most = min(self.most, len(self.requests))
        least = min(self.least, most)
        prompts = sum(prompt for prompt, _ in self.requests) / len(self.requests)
        for n in sorted({n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if least <= n <= most} | {most}):
            several = for_sequences(size, n, int(n * prompts))
            likely = [self._needs[int((1 - share) * (len(self._needs) - 1))] for share in SHARES]
            for room in sorted({max(size.context, n * need) for need in likely}, reverse=True):
                yield replace(several, shared=room)

    def passes(self, size: ModelSize) -> float:
        """Returns how many passes all requests take, if the longest begin first."""
        answers = sorted(((prompt + answer, answer) for prompt, answer in self.requests), reverse=True)
        decoding = sum(answer / max(1, min(size.sequences, size.room // need)) for need, answer in answers)
        prompts = sum(prompt for prompt, _ in self.requests) / max(size.joining, size.prompt)
        return max(decoding, prompts, *(answer for _, answer in answers))

    def choose(self, size: ModelSize, plan_for: Callable[[ModelSize], Plan]) -> tuple[ModelSize, Plan]:
        """Returns the size and plan that answer all requests soonest; among nearly equal ones, the fewest sequences.

        Raises:
            BudgetError: not even the fewest sequences fit.
        """
        best: tuple[ModelSize, Plan] | None = None
        shorter = reading_sizes(next(self.sizes(size)))  # the last resort
        for candidate in (*self.sizes(size), *shorter[1:]):
            if best is not None and candidate.reading < size.reading:
                break
            with suppress(BudgetError):
                plan = plan_for(candidate)
                if best is None or self._seconds(candidate, plan) < WORTH * self._seconds(*best):
                    best = candidate, plan
        return best or (shorter[-1], plan_for(shorter[-1]))  # which raises again

    def _seconds(self, size: ModelSize, plan: Plan) -> float:
        return self.passes(size) * plan.token_s


# Tokens of context that memory is reserved for by default.
CONTEXT = 2048


def planned_context(longest: int | None, positions: int | None, asked: int | None, prompt: int | None) -> int:
    """Returns the tokens to plan for: ``asked``, or else a default that holds the prompt and an answer.

    Args:
        longest: tokens that the model was trained for; it answers beyond them too, as in mlx-lm.
        positions: most tokens that it accepts; None: any number.
        prompt: tokens of the longest prompt, if known.

    Raises:
        PromptError: the prompt has more tokens than the model has positions.
    """
    if positions is not None and prompt is not None and prompt > positions:
        raise PromptError(f"the prompt has {prompt} tokens; this model has {positions} positions: shorten the prompt")
    if asked is None:
        usual = max(CONTEXT, (prompt or 0) + ANSWER)
        asked = max(min(usual, longest or usual), (prompt or 0) + 1)
    return min(asked, positions or asked)
