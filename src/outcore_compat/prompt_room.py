"""Whether a prompt can be answered at all."""

from __future__ import annotations

from outcore.decode.batch import check_prompt_length
from outcore.engine.session import Session
from outcore.errors import PromptError
from outcore.sizes import format_size


def check_room(session: Session, tokens: int, prompt: int, held: int = 0) -> None:
    """Refuse a prompt that the model has no positions for, or that there can be no memory for.

    Args:
        tokens: that caches will hold; ``prompt``: of those, the prompt's; ``held``: before it.

    Raises:
        PromptError: it is one.
    """
    check_prompt_length(prompt, held, session, "the prompt")
    if tokens < session.plan.context and prompt <= session.size.prompt:
        return
    if session.residency is not None and not session.residency.holds(tokens + 1, prompt):
        budget = format_size(session.plan.budget_bytes)
        raise PromptError(
            f"the prompt has {tokens} tokens, for which {budget} are not enough with this model: shorten it, or give "
            "it more memory"
        )
