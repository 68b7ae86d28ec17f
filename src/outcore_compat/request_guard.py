"""Has mlx-lm's server run a streamed model's requests one by one, and refuse prompts that do not fit."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from outcore.decode.prompt import check_length
from outcore.engine.session import Session
from outcore.errors import PromptError
from outcore.sizes import format_size

SERVER = "mlx_lm.server"
GUARDED = ("_tokenize", "_is_batchable")


def guard_requests() -> None:
    """Replaces two methods of the server if it is loaded. Safe to call twice."""
    server: Any = sys.modules.get(SERVER)
    if server is None or hasattr(server.ResponseGenerator._tokenize, "unguarded"):
        return
    for name, guarded in zip(GUARDED, (_tokenize, _is_batchable), strict=True):
        original = getattr(server.ResponseGenerator, name)
        setattr(server.ResponseGenerator, name, _instead(original, guarded))


def unguard_requests() -> None:
    """Restores the server's methods. Safe to call twice."""
    server: Any = sys.modules.get(SERVER)
    for name in GUARDED if server is not None else ():
        method = getattr(server.ResponseGenerator, name)
        setattr(server.ResponseGenerator, name, getattr(method, "unguarded", method))


def _instead(original: Callable[..., Any], guarded: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any) -> Any:
        return guarded(original, *args)

    method.unguarded = original  # type: ignore[attr-defined]
    return method


def _tokenize(original: Callable[..., Any], generator: Any, *args: Any) -> Any:
    """Tokenizes a request. The server answers it with the ``PromptError`` if the model has too few positions or too
    little memory."""
    found, session = original(generator, *args), _session(generator)
    if session is None:
        return found
    tokens = len(found[0])
    check_length(tokens, session, "the prompt")
    fits = tokens < session.plan.context and tokens <= session.size.prompt
    if not fits and not session.residency.holds(tokens + 1, tokens):
        budget = format_size(session.plan.budget_bytes)
        raise PromptError(
            f"the prompt has {tokens} tokens, too many for {budget} with this model: shorten it, or give the model "
            "more memory"
        )
    return found


def _is_batchable(original: Callable[..., Any], generator: Any, *args: Any) -> bool:
    """Keeps streamed models out of the server's own batches, which would take more memory than is planned."""
    return _session(generator) is None and bool(original(generator, *args))


def _session(generator: Any) -> Session | None:
    return getattr(generator.model_provider.model, "outcore", None)
