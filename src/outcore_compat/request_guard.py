"""mlx-lm's server, so that a prompt that there is no room for is one client's error: where its thread computes, any
error ends it for all.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from outcore.decode.prompt import check_length
from outcore.engine.session import Session
from outcore.errors import PromptError
from outcore.sizes import format_size

SERVER = "mlx_lm.server"


def guard_requests() -> None:
    """Have the server look at each prompt where it still answers with errors, if it is loaded. Safe to call twice."""
    server: Any = sys.modules.get(SERVER)
    if server is None or hasattr(server.ResponseGenerator._tokenize, "unguarded"):
        return
    # What makes tokens of a request, to a tuple of which they are the first. An error there answers the request.
    original = server.ResponseGenerator._tokenize

    @functools.wraps(original)
    def guarded(generator: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        found = original(generator, tokenizer, request, args)
        session = getattr(generator.model_provider.model, "outcore", None)
        if session is not None:
            check_room(session, len(found[0]), len(found[0]))
        return found

    guarded.unguarded = original  # type: ignore[attr-defined]
    server.ResponseGenerator._tokenize = guarded


def unguard_requests() -> None:
    """The server as mlx-lm made it. Safe to call twice."""
    server: Any = sys.modules.get(SERVER)
    original = getattr(server.ResponseGenerator._tokenize, "unguarded", None) if server is not None else None
    if server is not None and original is not None:
        server.ResponseGenerator._tokenize = original


def check_room(session: Session, tokens: int, prompt: int, held: int = 0) -> None:
    """Refuse a prompt that the model has no positions for, or that there can be no memory for.

    Args:
        tokens: that caches will hold; ``prompt``: of those, the prompt's; ``held``: before it.

    Raises:
        PromptError: it is one.
    """
    check_length(prompt, session, "the prompt", held)
    if tokens < session.plan.context and prompt <= session.size.prompt:
        return
    if not session.residency.holds(tokens + 1, prompt):
        budget = format_size(session.plan.budget_bytes)
        raise PromptError(
            f"the prompt has {tokens} tokens, for which {budget} are not enough with this model: shorten it, or give "
            "it more memory"
        )
