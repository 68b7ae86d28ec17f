"""Saves and loads the conversation of ``outcore chat``: its text in a file, its KV caches in the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode import saved_conversation
from ..decode.conversation import Conversation
from ..decode.one_text import make_room
from ..decode.saved_conversation import Saved, SavedTurn
from ..engine.session import Session
from ..errors import BudgetError, UsageError
from ..machine.random_state import random_state, set_random_state
from ..text import counted, one_line

WARN = "yellow"


class KeptChat:
    """Saves a conversation, and continues a saved one.

    Args:
        name: the model's name as the user typed it.
        say: prints a line; with ``WARN`` as the second argument, a warning.

    Attributes:
        unsure: an answer is being generated, or failed unexpectedly, so the caches may hold tokens that the
            conversation does not.
    """

    def __init__(
        self,
        session: Session,
        conversation: Conversation,
        tokenizer: TokenizerWrapper,
        name: str,
        say: Callable[..., None],
    ) -> None:
        self.turns: list[SavedTurn] = []
        self.unsure = False
        self._session, self._conversation, self._tokenizer = session, conversation, tokenizer
        self._name, self._say = name, say
        self._path: Path | None = None
        self._caches: str | None = None  # the name under which the prefix cache has its caches

    def save(self, path: Path) -> None:
        self._write(path)
        self._keep_caches()
        self._say(f"{path}: {counted(len(self.turns), 'turn')}, {counted(len(self._conversation.text), 'token')}")

    def load(self, path: Path) -> None:
        saved = saved_conversation.load(path, self._tokenizer, self._session.vocabulary)
        # Frees the present caches before others are loaded.
        self._conversation.goes_on(saved.tokens, None, 0)
        self._caches = self._restored(saved)
        self.turns = saved.turns
        set_random_state(saved.random)
        how = "its cache was loaded too" if self._caches else "the next answer computes them first"
        self._say(f"{path}: {counted(len(saved.turns), 'turn')}, {counted(len(saved.tokens), 'token')}; {how}")
        if Path(saved.model).name != Path(self._name).name:
            self._say(f"it was saved with another model, {one_line(saved.model)[:200]}", WARN)

    def _restored(self, saved: Saved) -> str | None:
        """Loads the conversation's caches, if they exist and fit, and returns their name."""
        prefix = self._session.prefix
        if prefix is None or not saved.held or self.unsure:
            return None
        try:
            make_room(self._session, len(saved.tokens) + 1)
        except BudgetError:
            return None
        if self._session.plan.kv_slot:
            return None  # with KV offload, all of it would have to be in memory at once
        cache = self._conversation.make_cache()
        name = prefix.kept(saved.tokens[: saved.held], cache)
        if name is not None:
            self._conversation.goes_on(saved.tokens, cache, saved.held)
        return name

    def resume(self, path: Path) -> bool:
        """Continues the conversation in a session's file, or begins one there. Returns whether it had turns."""
        exists = path.exists()
        (self.load if exists else self._write)(path)
        self._path = path
        return exists and bool(self.turns)

    def added(self, turn: SavedTurn) -> None:
        """Saves another turn; a file that cannot be written is a warning and does not end the chat."""
        self.turns.append(turn)
        self._keep_text()

    def leave(self) -> None:
        if self._path is not None:
            self._keep_text()
            self._keep_caches()

    def _keep_text(self) -> None:
        if self._path is not None:
            try:
                self._write(self._path)
            except UsageError as e:
                self._say(f"the conversation is not saved: {e}", WARN)

    def _write(self, path: Path) -> None:
        tokens, held = self._conversation.text, self._conversation.held
        text = {"model": self._name, "turns": self.turns, "text": self._tokenizer.decode(tokens), "held": held}
        saved_conversation.save(path, **text, tokens=tokens, random=random_state())

    def _keep_caches(self) -> None:
        conversation, prefix = self._conversation, self._session.prefix
        if prefix is not None and conversation.held and not self._session.closed and not self.unsure:
            text = conversation.text[: conversation.held]
            self._caches = prefix.keep(text, conversation.cache, self._caches)
