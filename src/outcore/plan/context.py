"""How many tokens of context memory is planned for: as many as were asked for, or as are usual."""

from __future__ import annotations

from ..errors import PromptError, UsageError
from .plan import ANSWER

CONTEXT = 2048
"""Tokens of context that memory is reserved for when nothing is asked for."""

MOST_CONTEXT = 2**31 - 1
"""Tokens that can be asked for of a model that does not say how many it was made for: MLX counts in int32."""


def planned_context(longest: int | None, positions: int | None, asked: int | None, prompt: int | None) -> int:
    """Tokens to plan for: as asked; else what is usual, and at least the prompt and an answer.

    Args:
        longest: tokens that the model was made for, if it says so. It answers beyond them too, as in mlx-lm.
        positions: tokens that it can be given at all; None: any number.
        prompt: tokens of the longest prompt, if known.

    Raises:
        UsageError: the context is not positive, or larger than can be counted.
        PromptError: the model has no positions for the prompt.
    """
    if positions is not None and prompt is not None and prompt > positions:
        raise PromptError(f"the prompt has {prompt} tokens; this model has {positions} positions: shorten the prompt")
    if prompt is not None and prompt < 0:
        raise UsageError(f"a prompt of {prompt} tokens: it cannot have fewer than none")
    most = positions or MOST_CONTEXT
    if asked is None:
        usual = max(CONTEXT, (prompt or 0) + ANSWER)
        return min(max(min(usual, longest or usual), (prompt or 0) + 1), most)
    if asked < 1:
        raise UsageError(f"a context of {asked} tokens: at least 1 is needed")
    if asked > MOST_CONTEXT:
        raise UsageError(
            f"a context of {_short(asked)} tokens: {MOST_CONTEXT} are the most that can be counted; ask for fewer"
        )
    return min(asked, most)


def _short(number: int) -> str:
    """A number that a person can read, however many digits were typed."""
    return str(number) if number < 10**15 else f"about 10^{len(str(number)) - 1}"
