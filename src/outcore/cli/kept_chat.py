"""The conversation of ``outcore chat`` in a file: its text, and the name under which its caches are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode import saved_conversation
from ..decode.conversation import Conversation
from ..decode.one_text import make_room
from ..decode.saved_conversation import Saved, SavedTurn
from ..engine.engine import State
from ..engine.session import Session
from ..errors import BudgetError, UsageError
from ..machine.random_state import random_state, set_random_state
from ..text import counted, one_line

WARN = "yellow"
"""The style of what is not as it was asked for."""


class KeptChat:
    """Keeps a conversation, and goes on with one that was kept.

    Args:
        name: the model's, as it was given.
        say: told what was done; with ``WARN`` where it is a warning.

    Attributes:
        turns: what was said.
        unsure: an answer is made, or broke off in an unforeseen way: caches may hold more than is known.
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
        self._caches: str | None = None  # the name of the caches that are kept of it

    def save(self, path: Path) -> None:
        self._write(path)
        self._keep_caches()
        self._say(f"{path}: {counted(len(self.turns), 'turn')}, {counted(len(self._conversation.text), 'token')}")

    def load(self, path: Path) -> None:
        """Go on with the one in a file."""
        saved = saved_conversation.load(path, self._tokenizer, self._session.vocabulary)
        # What was there goes before other caches come.
        self._conversation.goes_on(saved.tokens, None, 0)
        self._caches = self._restored(saved)
        self.turns = saved.turns
        set_random_state(saved.random)
        how = "none of it is computed again" if self._caches else "the next answer computes them first"
        self._say(f"{path}: {counted(len(saved.turns), 'turn')}, {counted(len(saved.tokens), 'token')}; {how}")
        if Path(saved.model).name != Path(self._name).name:
            self._say(f"it was kept with {one_line(saved.model)[:200]}, another model", WARN)

    def _restored(self, saved: Saved) -> str | None:
        """Have the caches of a conversation back, if there are some and room for them; their name."""
        prefix = self._session.prefix
        if prefix is None or not saved.held or self.unsure:
            return None
        try:
            make_room(self._session, len(saved.tokens) + 1)
        except BudgetError:
            return None
        if self._session.plan.kv_slot:
            return None  # all of it would have to be in memory at once
        cache = self._conversation.make_cache()
        name = prefix.kept(saved.tokens[: saved.held], cache)
        if name is not None:
            self._conversation.goes_on(saved.tokens, cache, saved.held)
        return name

    def resume(self, path: Path) -> bool:
        """Go on with the conversation in a file, and keep this one there; begin one if there is none. Returns whether
        there was one."""
        there = path.exists()
        (self.load if there else self._write)(path)
        self._path = path
        return there and bool(self.turns)

    def added(self, turn: SavedTurn) -> None:
        """It has a turn more. It goes on, whether that can be kept or not."""
        self.turns.append(turn)
        self._keep_text()

    def leave(self) -> None:
        """The conversation goes on another time."""
        if self._path is not None:
            self._keep_text()
            self._keep_caches()

    def _keep_text(self) -> None:
        if self._path is not None:
            try:
                self._write(self._path)
            except UsageError as e:
                self._say(f"the conversation is not kept: {e}", WARN)

    def _write(self, path: Path) -> None:
        tokens, held = self._conversation.text, self._conversation.held
        said = {"model": self._name, "turns": self.turns, "text": self._tokenizer.decode(tokens), "held": held}
        saved_conversation.save(path, **said, tokens=tokens, random=random_state())

    def _keep_caches(self) -> None:
        """Keep what was computed of the conversation, for whoever goes on with it."""
        conversation, prefix = self._conversation, self._session.prefix
        if prefix is not None and conversation.held and self._session.state is not State.CLOSED and not self.unsure:
            text = conversation.text[: conversation.held]
            self._caches = prefix.keep(text, conversation.cache, self._caches)
