"""Answers to one message after the other, as the user of ``outcore chat`` sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..decode import saved_conversation
from ..decode.conversation import ChatTemplate, Conversation
from ..decode.eviction import note_bounds
from ..decode.generate import stream_generate
from ..decode.one_text import make_room
from ..decode.prompt import check_prompt
from ..decode.saved_conversation import Saved, SavedTurn
from ..decode.speculative.speculate import Processor
from ..engine.session import Session
from ..engine.transport import Agreement, transport_of
from ..errors import BudgetError, PromptError, StoreError, UsageError
from ..machine.random_state import random_state, set_random_state
from ..sizes import format_size
from ..text import counted, one_line
from .answering import AnswerOutput, interruptible, until_stop
from .engine import ProgressBar, sweep_progress
from .output import say
from .parsers import CHAT_FILES, CHAT_KEYS, CHAT_LINES, CHAT_TYPED, TYPED_ELSEWHERE

COMMAND = re.compile(r"/[a-z]+")

RESET, WARN = "r resets the conversation", "yellow"


class _Stopped(Exception):
    """Ctrl-C while a prompt was computed."""


class Chat:
    """A conversation as its user sees it: answers on standard output, all else on standard error.

    Args:
        options: arguments of ``stream_generate``.
        name: the model's, as it was given.
        stop: strings that end an answer.

    Attributes:
        turns: records of the answers.
        tokens: ids of all answers.
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
        self.tokens: list[int] = []
        self._name, self._stop = name, stop
        self._said: list[SavedTurn] = []
        self._path: Path | None = None  # where the conversation is kept
        self._kept: str | None = None  # under which name its caches are
        self._longest = 0  # tokens that a conversation was found to have memory for at most
        self._answering = False
        self._model, self._options, self._bar = model, options, bar
        self._session: Session = model.outcore
        self._tokenizer = template.tokenizer
        # Otherwise what goes is chosen by the text, and caches keep all that they are given.
        self._rotates = options["kv_eviction"] in (None, "window")
        window = options["max_kv_size"] if self._rotates else None
        if window is not None:
            note_bounds(model, self._session)
        self._conversation = Conversation(template, lambda: make_prompt_cache(model, window))

    def greet(self) -> None:
        """Say what runs, and what can be typed."""
        plan = self._session.plan
        layers = len(plan.resident) + len(plan.streamed)
        self._say(
            f"{self._name}: {len(plan.streamed)} of {layers} layers streamed, "
            f"{format_size(plan.budget_bytes)} of memory, {plan.context} tokens of conversation reserved",
            "bold",
        )
        self._help()

    def hear(self, line: str) -> None:
        """A command, or a message to answer."""
        word, _, rest = line.strip().partition(" ")
        if line.startswith("/") and COMMAND.fullmatch(word):
            self._command(word, rest.strip())
        elif line.strip() == "h":
            self._help()
        elif line.strip() == "r":
            self._conversation.clear()
            self._said = []
            self._say("the conversation begins anew")
        else:
            self._answer(line)

    def _help(self) -> None:
        self._say(CHAT_KEYS)
        self._say(self._more())

    def _more(self) -> str:
        """Further keys, but for those that say nothing here."""
        if TYPED_ELSEWHERE in os.environ:
            return CHAT_LINES
        return f"{CHAT_FILES}, {CHAT_TYPED}" if transport_of(self._model).alone else CHAT_TYPED

    def _command(self, word: str, rest: str) -> None:
        if word == "/help":
            self._help()
        elif word not in ("/save", "/load"):
            self._say(f"{word}: no such command; a space before it makes it a message. {self._more()}", WARN)
        elif not rest:
            self._say(f"{word}: give a file", WARN)
        elif not transport_of(self._model).alone:
            self._say(f"{word}: not over several machines", WARN)
        else:
            try:
                (self._save if word == "/save" else self._load)(Path(rest))
            except UsageError as e:
                self._say(f"{word} {e}", WARN)

    def _save(self, path: Path) -> None:
        self._write(path)
        self._keep()
        said, text = counted(len(self._said), "turn"), counted(len(self._conversation.text), "token")
        self._say(f"{path}: {said}, {text}")

    def _write(self, path: Path) -> None:
        text, held = self._conversation.text, self._conversation.held
        saved_conversation.save(path, self._name, self._tokenizer, Saved(self._said, text, random_state(), held))

    def _keep(self) -> None:
        """Keep what was computed of the conversation, for whoever goes on with it."""
        conversation, prefix = self._conversation, self._session.prefix
        # An answer that broke off in an unforeseen way may have left more in the caches than is known.
        if prefix is not None and conversation.held and not self._session.closed and not self._answering:
            text = conversation.text[: conversation.held]
            self._kept = prefix.keep(text, conversation.cache, self._kept)

    def _load(self, path: Path) -> None:
        saved = saved_conversation.load(path, self._tokenizer, self._session.vocabulary)
        # What was there goes before other caches come.
        self._conversation.goes_on(saved.tokens, None, 0)
        self._kept = self._restored(saved)
        self._said = saved.turns
        set_random_state(saved.random)
        how = "none of it is computed again" if self._kept else "the next answer computes them first"
        self._say(f"{path}: {counted(len(saved.turns), 'turn')}, {counted(len(saved.tokens), 'token')}; {how}")
        if Path(saved.model).name != Path(self._name).name:
            self._say(f"it was kept with {one_line(saved.model)[:200]}, another model", WARN)

    def _restored(self, saved: Saved) -> str | None:
        """Have the caches of a conversation back, if there are some and room for them; their name."""
        prefix = self._session.prefix
        if prefix is None or not saved.held or self._answering:
            return None
        try:
            make_room(self._session, len(saved.tokens) + 1)
        except BudgetError:
            return None
        if self._session.plan.kv_slot:
            return None  # all of it would have to be in memory at once
        cache = self._conversation.new_cache()
        name = prefix.kept(saved.tokens[: saved.held], cache)
        if name is not None:
            self._conversation.goes_on(saved.tokens, cache, saved.held)
        return name

    def resume(self, path: Path) -> bool:
        """Go on with the conversation in a file, and keep this one there; begin one if there is none. Returns whether
        there was one.

        Raises:
            UsageError: the file holds another model's, or none; or nothing can be written there.
        """
        there = path.exists()
        if there:
            self._load(path)
        else:
            self._write(path)
        self._path = path
        return there and bool(self._said)

    def leave(self) -> None:
        """The conversation goes on another time."""
        if self._path is not None:
            self._keep_text(self._path)
            self._keep()

    def _keep_text(self, path: Path) -> None:
        """A conversation goes on, whether it can be kept or not."""
        try:
            self._write(path)
        except UsageError as e:
            self._say(f"the conversation is not kept: {e}", WARN)

    def record(self) -> dict[str, Any]:
        """All turns, for JSON."""
        return {
            "turns": self.turns,
            "tokens": self.tokens,
            "prompt_tokens": sum(t["prompt_tokens"] for t in self.turns),
            "generation_tokens": len(self.tokens),
            "context_tokens": len(self._conversation.text),
        }

    def _answer(self, message: str) -> None:
        session, conversation = self._session, self._conversation
        try:
            prompt = conversation.prompt(message)
        except PromptError as e:  # its template's own words
            self._say(f"{e}; {RESET}", WARN)
            return
        sweeps = session.metrics.sweeps
        self._answering = True
        answer = AnswerOutput()
        failed: Exception | None = None
        agreement = transport_of(self._model)
        alone, agreed = agreement.alone, False
        with (
            interruptible() as pressed,
            self._prompt_progress(pressed if alone else lambda: False) as (progress, begun),
        ):
            try:
                most = self._agreed_most(agreement, len(prompt))
                agreed = True
                caches: dict[str, Any] = {
                    "prompt_cache": conversation.cache,
                    "history": conversation.text[: conversation.held],
                    # The next message's sweep computes it.
                    "leave_last": True,
                    "shared_prefix": conversation.shared(prompt),
                }
                given = {**caches, **progress, **self._options, **self._processors(), "max_tokens": most}
                responses = until_stop(stream_generate(self._model, self._tokenizer, prompt, **given), self._stop)
                # Closed at once: only then do the caches hold what was said.
                with closing(responses):  # type: ignore[type-var]
                    for response in responses:
                        begun()
                        answer.add(response)
                        say(response.text)
                        if agreement.numbers(lambda: [int(pressed())])[0] and response.finish_reason is None:
                            answer.finish = "interrupted"
                            break
            except (PromptError, BudgetError, StoreError, _Stopped) as e:  # the caches are as they were
                if agreed and not alone:  # others go on with an answer that this one cannot give
                    raise
                failed = e
        self._answering = bool(answer.tokens)
        all_of_it = conversation.held + len(prompt) + len(answer.tokens)
        gone = "" if session.text is None else f", {all_of_it - len(session.text)} older ones went"
        if answer.tokens:
            print(flush=True)
            conversation.add(prompt, answer.tokens, session.in_cache, session.text)
            if self._stopped(answer):
                conversation.end_answer(answer.text)
            self._answering = False
            self._said.append(SavedTurn(message=message, answer=answer.text))
            if self._path is not None:
                self._keep_text(self._path)
        elif session.text is not None:
            conversation.held = 0  # the caches were given up for what should have stayed
        if failed is not None:
            self._say(*self._why(failed, len(prompt), answer))
        if answer.last is not None:
            self.tokens += answer.tokens
            ended = {"finish_reason": answer.finish, "sweeps": session.metrics.sweeps - sweeps}
            self.turns.append({"message": message, "cached_tokens": session.found} | answer.record() | ended)
            stopped = ", stopped" if answer.finish == "interrupted" else ""
            found = f", {session.found} of them found on disk," if session.found else ""
            self._say(
                f"{len(prompt)} tokens{found} computed in {answer.ttft:.2f} s; "
                f"answer of {len(answer.tokens)}{stopped}, {answer.last.generation_tps:.2f} a second; "
                f"{len(conversation.text)} in the conversation{gone}"
            )
            if answer.finish == "length" and len(answer.tokens) != self._options["max_tokens"]:
                self._say(self._full, WARN)

    @property
    def _bound(self) -> int | None:
        """Tokens that the conversation may have, where none of them goes."""
        most: int | None = self._options["max_kv_size"] if self._options["kv_eviction"] == "none" else None
        return most

    @property
    def _full(self) -> str:
        """Why an answer ends that the model did not end."""
        said = len(self._conversation.text)
        if self._bound is not None and said >= self._bound:
            return f"the answer ends here: --max-kv-size {self._bound}; {RESET}"
        longest = self._session.positions
        if longest is not None and said > longest:  # the last token has none
            return f"the answer ends here: the model has positions for {longest} tokens; {RESET}"
        return f"the answer ends here: no memory for more than {said} tokens; {RESET}"

    def _stopped(self, answer: AnswerOutput) -> bool:
        """Whether a stop string ended it: then it is among its tokens, and not in its text."""
        if not self._stop or answer.finish != "stop":
            return False
        last = len(answer.tokens) - (answer.tokens[-1] in self._tokenizer.eos_token_ids)
        text = self._tokenizer.decode(answer.tokens[:last])
        return any(stop in text for stop in self._stop)

    def _processors(self) -> dict[str, Any]:
        """Those of the options, which see what was said before too."""
        before = mx.array(self._conversation.text[: self._conversation.held], dtype=mx.int32)

        def whole(process: Processor) -> Processor:
            return lambda tokens, logits: process(mx.concatenate([before, tokens]), logits)

        found = self._options.get("logits_processors")
        return {"logits_processors": [whole(process) for process in found]} if found else {}

    def _agreed_most(self, agreement: Agreement, prompt: int) -> int:
        """``_most``, of the rank that has the least room; whatever it raises, all raise."""
        why, most = PromptError("another machine has no room for it"), 0
        try:
            most = self._most(prompt)
        except PromptError as e:
            why = e
        (agreed,) = agreement.leasts([most])
        if agreed == 0:
            raise why
        return agreed

    def _most(self, prompt: int) -> int:
        """Tokens that an answer to a prompt of so many may have: what was asked for, or what there is room for."""
        most, held = self._options["max_tokens"], self._conversation.held
        bounded = self._options["max_kv_size"] is None
        if self._options["kv_eviction"] == "halve":
            return int(most)  # there is always room

        def had(tokens: int) -> int:
            return check_prompt(prompt, tokens, self._session, held, bounded)

        with suppress(PromptError):
            return had(most)
        if most < 2:
            return had(most)
        # The most that there can be memory for: what is needed grows with each token.
        fits, no = 0, int(most)
        while no - fits > 1:
            tokens = (fits + no) // 2
            try:
                had(tokens)
                fits = tokens
            except PromptError:
                no = tokens
        if fits == 0:
            return had(1)
        self._longest = held + prompt + fits
        return had(fits)

    def _why(self, failed: Exception, prompt: int, answer: AnswerOutput) -> tuple[str, str]:
        """What to tell of an answer that did not come, or not to its end; and how."""
        if isinstance(failed, _Stopped):
            return "stopped before the answer began: the message is not part of the conversation", "dim"
        if isinstance(failed, StoreError):
            kept = "what was said is kept" if answer.tokens else "the message is not part of the conversation"
            return f"{failed}; {kept}", WARN
        said, longest = len(self._conversation.text), self._session.positions
        if answer.tokens:
            return self._full, WARN
        tokens = self._conversation.held + prompt
        room = max(self._longest, self._session.plan.context)
        limit = f"the {room} that there is memory for"
        if tokens < room and self._bound is None:
            return f"no memory for a message of {prompt} tokens here; send a shorter one, or {RESET}", WARN
        if self._bound is not None:
            limit = f"the {self._bound} of --max-kv-size"
        if longest is not None and tokens > longest:
            limit = f"the {longest} that the model has positions for"
        hint = RESET if said else "send a shorter one"
        return f"no room for this message: {tokens} tokens and an answer pass {limit}; {hint}", WARN

    @contextmanager
    def _prompt_progress(self, asked: Callable[[], bool]) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        """Shows a prompt's sweep, and breaks it off when asked to. Gives arguments for ``stream_generate``, and what to
        call with the first token."""
        streaming = self._session.streaming
        first_token = sweep_progress(self._bar, self._session)

        def unit() -> None:
            if asked():
                raise _Stopped

        def chunk(done: int, total: int) -> None:
            if done < total and asked():
                raise _Stopped

        if streaming is not None:
            streaming.after_unit.join(unit)

        def begun() -> None:
            first_token()
            if streaming is not None:
                streaming.after_unit.leave(unit)

        try:
            yield {"prompt_progress_callback": chunk}, begun
        finally:
            begun()

    def _say(self, text: str, style: str = "dim") -> None:
        self._bar.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
