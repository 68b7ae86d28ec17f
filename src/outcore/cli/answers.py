"""Answers to one message after the other, as the user of ``outcore chat`` sees them."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..decode.conversation import ChatTemplate, Conversation
from ..decode.generate import stream_generate
from ..decode.prompt import check_prompt, note_bounds
from ..decode.sampling import Processor
from ..decode.saved_conversation import SavedTurn
from ..engine.session import Session
from ..engine.transport import Agreement, transport_of
from ..errors import BudgetError, PromptError, StoreError, UsageError
from ..sizes import format_size
from .answering import AnswerOutput, interruptible, until_stop
from .engine import ProgressBar, sweep_progress
from .kept_chat import KeptChat
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
        kept: the conversation in a file.
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
        self._longest = 0  # tokens that a conversation was found to have memory for at most
        self._model, self._options, self._bar = model, options, bar
        self._session: Session = model.outcore
        self._tokenizer = template.tokenizer
        window = options["max_kv_size"]
        if window is not None:
            note_bounds(model, self._session)
        self._conversation = Conversation(template, lambda: make_prompt_cache(model, window))
        self.kept = KeptChat(
            self._session,
            self._conversation,
            self._tokenizer,
            name,
            lambda text, warns: self._say(text, WARN if warns else "dim"),
        )

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
            self.kept.turns = []
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
                (self.kept.save if word == "/save" else self.kept.load)(Path(rest))
            except UsageError as e:
                self._say(f"{word} {e}", WARN)

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
        self.kept.unsure = True
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
        self.kept.unsure = bool(answer.tokens)
        if answer.tokens:
            print(flush=True)
            conversation.add(prompt, answer.tokens, session.in_cache)
            if self._stopped(answer):
                conversation.end_answer(answer.text)
            self.kept.unsure = False
            self.kept.added(SavedTurn(message=message, answer=answer.text))
        if failed is not None:
            self._say(*self._why(failed, len(prompt), answer))
        if answer.last is not None:
            self._tell(message, len(prompt), answer, session.metrics.sweeps - sweeps)

    def _tell(self, message: str, prompt: int, answer: AnswerOutput, sweeps: int) -> None:
        """Note an answer to a prompt of so many tokens, and say how long it took."""
        found, last = self._session.found, answer.last
        assert last is not None
        self.tokens += answer.tokens
        ended = {"finish_reason": answer.finish, "sweeps": sweeps}
        self.turns.append({"message": message, "cached_tokens": found} | answer.record() | ended)
        self._say(
            f"{prompt} tokens{f', {found} of them found on disk,' if found else ''} computed in {answer.ttft:.2f} s; "
            f"answer of {len(answer.tokens)}{', stopped' if answer.finish == 'interrupted' else ''}, "
            f"{last.generation_tps:.2f} a second; {len(self._conversation.text)} in the conversation"
        )
        if answer.finish == "length" and len(answer.tokens) != self._options["max_tokens"]:
            self._say(self._full, WARN)

    @property
    def _full(self) -> str:
        """Why an answer ends that the model did not end."""
        said = len(self._conversation.text)
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

        def had(tokens: int) -> int:
            return check_prompt(prompt, tokens, self._session, held, bounded)

        with suppress(PromptError):
            return had(most)
        if most < 2:
            return had(most)

        def refused(tokens: int) -> bool:
            try:
                return had(tokens) < 0
            except PromptError:
                return True

        # The most that there can be memory for: what is needed grows with each token.
        fits = bisect_left(range(1, int(most)), True, key=refused)
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
        if tokens < room:
            return f"no memory for a message of {prompt} tokens here; send a shorter one, or {RESET}", WARN
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
