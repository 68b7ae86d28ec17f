"""The conversation of ``outcore chat``: its messages, commands, answers and warnings."""

from __future__ import annotations

import glob
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..decode import saved_conversation
from ..decode.conversation import ChatTemplate, Conversation
from ..decode.generate import stream_generate
from ..decode.media import VIRTUAL
from ..decode.one_text import make_room
from ..decode.prompt import most_tokens, note_bounds
from ..decode.sampling import Processor
from ..decode.saved_conversation import Saved, SavedTurn
from ..engine.session import Session
from ..errors import BudgetError, PromptError, StoreError, UsageError
from ..machine.random_state import random_state, set_random_state
from ..sizes import format_size
from ..text import counted, one_line, shortened
from .engine import AnswerOutput, ProgressBar, interruptible, prefill_progress

RESET, WAITING = "/clear begins a new one", "; its images wait for the next message, or /clear"


class _Stopped(Exception):
    """Ctrl-C was pressed during prefill."""


class Chat:
    """Runs a conversation: answers go to standard output, everything else to standard error.

    Args:
        options: arguments of ``stream_generate``.
        name: the model's name as the user typed it.
        stop: strings that end an answer.

    Attributes:
        turns: one JSON record per answer.
        kept: saves and loads the conversation.
        options: the given ones; they may be replaced between answers.
        pictures: images of the next message; None: it has none.
    """

    def __init__(
        self,
        model: nn.Module,
        template: ChatTemplate,
        options: dict[str, Any],
        bar: ProgressBar,
        name: str = "",
        stop: Sequence[str] = (),
    ) -> None:
        self.turns: list[dict[str, Any]] = []
        self.pictures: Any = None
        self._name, self._stop, self._model, self.options, self._bar = name, stop, model, options, bar
        self._room = 0  # tokens of the conversation when an answer ran out of memory
        self.session: Session = model.outcore
        self.agreement = self.session.transport
        self.template, self._tokenizer = template, template.tokenizer
        window = options.get("max_kv_size")
        if window is not None:
            note_bounds(model, self.session)
        self.conversation = Conversation(template, lambda: make_prompt_cache(model, window))
        self.kept = KeptChat(self, name)

    def greet(self) -> None:
        plan = self.session.plan
        layers = len(plan.resident) + len(plan.streamed)
        self.say(
            f"{self._name}: {len(plan.streamed)} of {layers} layers streamed, {format_size(plan.budget_bytes)} of "
            f"memory, room for {plan.context} tokens of conversation",
            "bold",
        )
        resume = "/resume continues the last conversation, " if self.kept.others() else ""
        self.say(f"/help lists commands, {resume}Ctrl-C stops an answer, Ctrl-D leaves")

    def retell(self, template: ChatTemplate, turns: Sequence[SavedTurn]) -> None:
        """Continues after ``turns`` as another template or model writes them."""
        self.conversation.retell(template, [(turn.message, turn.answer) for turn in turns])
        self.template, self.kept.turns = template, [*turns]

    def record(self) -> dict[str, Any]:
        tokens = [token for turn in self.turns for token in turn["tokens"]]
        return {
            "turns": self.turns,
            "tokens": tokens,
            "prompt_tokens": sum(turn["prompt_tokens"] for turn in self.turns),
            "generation_tokens": len(tokens),
            "context_tokens": len(self.conversation.text),
        }

    def answer(self, message: str) -> None:
        session, conversation = self.session, self.conversation
        given = self.pictures
        try:
            prompt = conversation.prompt(*((message,) if given is None else (given.mark + message, given.encode)))
        except PromptError as e:
            self.say(f"{e}; {RESET}{WAITING if given else ''}", WARN)
            return
        images = [*conversation.images, *(() if given is None else given.read)]
        sweeps, answer = session.metrics.sweeps, AnswerOutput()
        self.kept.unsure = True
        failed = self._generate(prompt, answer, images)
        self.kept.unsure = bool(answer.tokens)
        if not answer.tokens:
            self._print_refusal(failed, len(prompt))
            return
        print(flush=True)
        conversation.add(prompt, answer.tokens, session.in_cache)
        conversation.images, self.pictures = images, None
        if answer.cut:
            conversation.end_answer(answer.text)
        self.kept.unsure = False
        self.kept.added(SavedTurn(message=message, answer=answer.text))
        found = {"message": message, "cached_tokens": session.found}
        self.turns.append(found | answer.record() | {"sweeps": session.metrics.sweeps - sweeps})
        self._print_turn(self.turns[-1], len(prompt))
        if isinstance(failed, StoreError):
            self.say(f"{failed}; the answer so far stays in the conversation", WARN)
        elif failed is not None or (answer.finish == "length" and len(answer.tokens) != self.options["max_tokens"]):
            self._room = len(conversation.text)
            self.say(f"the answer was cut off at {self._limit(self._room, self._room)}; {RESET}", WARN)

    def _generate(self, prompt: list[int], answer: AnswerOutput, images: list[Any]) -> Exception | None:
        conversation, agreement, agreed = self.conversation, self.agreement, False
        with interruptible() as pressed:

            def check(*_: int) -> None:
                if agreement.alone and pressed():
                    raise _Stopped

            begun = prefill_progress(self._bar, self.session, check)
            try:
                most = self._most(len(prompt))
                agreed = True
                given: dict[str, Any] = {
                    "prompt_cache": conversation.cache,
                    "history": conversation.text[: conversation.held],
                    "leave_last": True,  # the next message's forward pass computes it
                    "shared_prefix": conversation.shared(prompt),
                    "prompt_progress_callback": lambda done, total: check() if done < total else None,
                    "images": images,
                    **self.options,
                    **self._processors(),
                    "max_tokens": most,
                }
                tokens = stream_generate(self._model, self._tokenizer, prompt, **given)
                with closing(answer.shown(tokens, self._stop, begun)) as responses:
                    for response in responses:
                        if agreement.numbers(lambda: [int(pressed())])[0] and response.finish_reason is None:
                            answer.finish = "interrupted"
                            break
            except (PromptError, BudgetError, StoreError, _Stopped) as e:
                if agreed and not agreement.alone:  # the other ranks have begun an answer that this one cannot give
                    raise
                return e
            finally:
                begun()
        return None

    def _print_turn(self, turn: dict[str, Any], prompt: int) -> None:
        found = f", {n} of them found on disk," if (n := turn["cached_tokens"]) else ""
        stopped = ", stopped" if turn["finish_reason"] == "interrupted" else ""
        self.say(
            f"{prompt} tokens{found} computed in {turn['ttft_s']:.2f} s; answer of {len(turn['tokens'])}{stopped}, "
            f"{turn['generation_tps']:.2f} a second; {len(self.conversation.text)} in the conversation"
        )

    def _print_refusal(self, failed: Exception | None, prompt: int) -> None:
        tokens, room = self.conversation.held + prompt, max(self._room, self.session.plan.context)
        hint = RESET if self.conversation.text else "send a shorter one"
        line = f"no room for this message: {tokens} tokens and an answer exceed {self._limit(tokens, room)}; {hint}"
        if isinstance(failed, StoreError):
            line = f"{failed}; the message was dropped"
        elif tokens < room:
            line = f"not enough memory for a message of {prompt} tokens; send a shorter one, or {RESET}"
        if isinstance(failed, _Stopped):
            line = "stopped before the answer began; the message was dropped"
        self.say(f"{line}{WAITING if self.pictures else ''}", WARN)

    def _limit(self, tokens: int, room: int) -> str:
        longest = self.session.positions
        if longest is not None and tokens > longest:  # the last token has no position
            return f"the model's maximum of {longest} tokens"
        return f"the {room} tokens that fit in memory"

    def _processors(self) -> dict[str, Any]:
        held = self.conversation.text[: self.conversation.held]
        before = mx.array([token for token in held if token < VIRTUAL], dtype=mx.int32)

        def whole(process: Processor) -> Processor:
            return lambda tokens, logits: process(mx.concatenate([before, tokens]), logits)

        given = self.options.get("logits_processors")
        return {"logits_processors": [whole(process) for process in given]} if given else {}

    def _most(self, prompt: int) -> int:
        """Returns the longest answer that every rank has room for, at most ``max_tokens``.

        Raises:
            PromptError: on all ranks, if one of them has no room.
        """
        errors, most = [PromptError("another machine has too little memory: shorten this text")], 0
        wanted, bounded = self.options["max_tokens"], self.options.get("max_kv_size") is None
        try:
            most = most_tokens(prompt, wanted, self.session, self.conversation.held, bounded)
        except PromptError as e:
            errors = [e]
        (agreed,) = self.agreement.leasts([most])
        if agreed == 0:
            raise errors.pop()
        return agreed

    def say(self, text: str, style: str = "dim") -> None:
        self._bar.console.print(
            text, style=style, markup=False, highlight=False, soft_wrap=not self._bar.console.is_terminal
        )


WARN = "yellow"


# Conversations with a model that are kept without a name; then the oldest goes.
KEPT = 10


class KeptChat:
    """Saves the conversation of a chat with the model ``name``, and continues a saved one.

    Attributes:
        unsure: an answer is being generated, or failed unexpectedly, so the caches may hold tokens that the
            conversation does not.
        path: the file that the conversation is kept in; None: it is not kept.
        stem: the beginning of the paths of conversations with this model; None: there is no place for them.
        typed: a conversation without a file that the user named is kept, each in one of its own.
    """

    def __init__(self, chat: Chat, name: str) -> None:
        self.turns: list[SavedTurn] = []
        self.unsure = False
        self._session, self._conversation, self._tokenizer = chat.session, chat.conversation, chat.template.tokenizer
        self._name, self._say = name, chat.say
        self.path: Path | None = None
        self.stem: Path | None = None
        self.typed = False
        self._caches: str | None = None  # the name under which the prefix cache has its caches

    def save(self, path: Path) -> None:
        if self._conversation.images:
            raise UsageError("conversations with images are not saved")
        self._write(path)
        self._keep_caches()
        self._say(f"{path}: {counted(len(self.turns), 'turn')}, {counted(len(self._conversation.text), 'token')}")

    def load(self, path: Path) -> None:
        self._go_on(saved_conversation.load(path, self._tokenizer, self._session.vocabulary), str(path))

    def begin(self) -> None:
        """Keeps what follows in another file, so that the conversation until now stays in its own."""
        if self.typed and self.stem is not None:
            self.path = self.stem.with_name(f"{self.stem.name}+{time.time_ns()}.json")

    def others(self) -> list[Path]:
        """Returns the files of other conversations with this model, last begun first."""
        if self.stem is None:
            return []
        return sorted({*self.stem.parent.glob(f"{glob.escape(self.stem.name)}+*.json")} - {self.path}, reverse=True)

    def _go_on(self, saved: Saved, what: str) -> None:
        self.begin()
        # Frees the present caches before others are loaded.
        self._conversation.goes_on(saved.tokens, None, 0)
        self._caches = self._restored(saved)
        self.turns = saved.turns
        set_random_state(saved.random)
        how = "its cache was loaded too" if self._caches else "the next answer computes them first"
        self._say(f"{what}: {counted(len(saved.turns), 'turn')}, {counted(len(saved.tokens), 'token')}; {how}")
        if Path(saved.model).name != Path(self._name).name:
            self._say(f"it was saved with another model, {one_line(saved.model)[:200]}", WARN)

    def _restored(self, saved: Saved) -> str | None:
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
        self.typed = False
        (self.load if exists else self._write)(path)
        self.path = path
        return exists and bool(self.turns)

    def resume_last(self) -> None:
        """Continues the conversation before this one. Raises ``UsageError`` if there is none."""
        for file in self.others():
            try:
                saved = saved_conversation.load(file, self._tokenizer, self._session.vocabulary)
            except UsageError as e:
                self._say(f"not resumed: {e}", WARN)
                continue
            self._go_on(saved, "the last conversation")
            for turn in saved.turns[-1:]:
                self._say(f"its last message: {shortened(turn.message, 100)}")
            if self.typed and self._keep_text():
                file.unlink(missing_ok=True)  # it has moved
            return
        raise UsageError("no conversation with this model was kept")

    def added(self, turn: SavedTurn) -> None:
        """Saves another turn; a file that cannot be written is a warning and does not end the chat."""
        self.turns.append(turn)
        if self._keep_text() and self.typed:
            for old in self.others()[KEPT - 1 :]:
                old.unlink(missing_ok=True)

    def leave(self) -> None:
        if self.path is not None and not self.typed:
            self._keep_text()
            self._keep_caches()

    def _keep_text(self) -> bool:
        if self.path is not None and not self._conversation.images:
            try:
                self._write(self.path)
                return True
            except UsageError as e:
                self._say(f"the conversation is not saved: {e}", WARN)
        return False

    def _write(self, path: Path) -> None:
        tokens, held = self._conversation.text, self._conversation.held
        text = {"model": self._name, "turns": self.turns, "text": self._tokenizer.decode(tokens), "held": held}
        saved_conversation.save(path, **text, tokens=tokens, random=random_state())

    def _keep_caches(self) -> None:
        conversation, prefix, over = self._conversation, self._session.prefix, self._session.closed or self.unsure
        if prefix is not None and conversation.held and not over and not conversation.images:
            text = conversation.text[: conversation.held]
            self._caches = prefix.keep(text, conversation.cache, self._caches)
