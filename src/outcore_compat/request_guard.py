"""mlx-lm's server, so that a prompt that there is no room for is one client's error: where its thread computes, any
error ends it for all.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from outcore.modules.mlx_lm_compat import request_tokenizer, set_request_tokenizer

from .prompt_room import check_room

SERVER = "mlx_lm.server"


def guard_requests() -> None:
    """Have the server look at each prompt where it still answers with errors, if it is loaded. Safe to call twice."""
    server = sys.modules.get(SERVER)
    if server is None or hasattr(request_tokenizer(server), "unguarded"):
        return
    original = request_tokenizer(server)

    @functools.wraps(original)
    def guarded(generator: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        found = original(generator, tokenizer, request, args)
        session = getattr(generator.model_provider.model, "outcore", None)
        if session is not None:
            check_room(session, len(found[0]), len(found[0]))
        return found

    guarded.unguarded = original  # type: ignore[attr-defined]
    set_request_tokenizer(server, guarded)


def unguard_requests() -> None:
    """The server as mlx-lm made it. Safe to call twice."""
    server = sys.modules.get(SERVER)
    original = getattr(request_tokenizer(server), "unguarded", None) if server is not None else None
    if server is not None and original is not None:
        set_request_tokenizer(server, original)
