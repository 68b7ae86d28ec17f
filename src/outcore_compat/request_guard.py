"""mlx-lm's server, so that it serves a streamed model one request after the other, and a prompt that there is no room
for is answered with an error.
"""

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
    """Replace two methods of the server's, if it is loaded. Safe to call twice."""
    server: Any = sys.modules.get(SERVER)
    if server is None or hasattr(server.ResponseGenerator._tokenize, "unguarded"):
        return
    for name, guarded in zip(GUARDED, (_tokenize, _is_batchable), strict=True):
        original = getattr(server.ResponseGenerator, name)
        setattr(server.ResponseGenerator, name, _instead(original, guarded))


def unguard_requests() -> None:
    """The server as mlx-lm made it. Safe to call twice."""
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
    """Makes tokens of a request, to a tuple of which they are the first. An error here answers the request.

    Raises:
        PromptError: the model has no positions for so many, or there can be no memory for them.
    """
    found, session = original(generator, *args), _session(generator)
    if session is None:
        return found
    tokens = len(found[0])
    check_length(tokens, session, "the prompt")
    fits = tokens < session.plan.context and tokens <= session.size.prompt
    if not fits and not session.residency.holds(tokens + 1, tokens):
        budget = format_size(session.plan.budget_bytes)
        raise PromptError(
            f"the prompt has {tokens} tokens, for which {budget} are not enough with this model: shorten it, or give "
            "it more memory"
        )
    return found


def _is_batchable(original: Callable[..., Any], generator: Any, *args: Any) -> bool:
    """Batches of the server's own would take more memory than is planned for."""
    return _session(generator) is None and bool(original(generator, *args))


def _session(generator: Any) -> Session | None:
    return getattr(generator.model_provider.model, "outcore", None)
