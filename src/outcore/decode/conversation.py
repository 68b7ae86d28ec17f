"""A conversation: one text of token ids, and the caches that hold it up to its end.

mlx-lm's chat renders each message by itself; here the template writes what stands between two answers, so that the text
is the one that the model was trained on: a system prompt once, and every answer closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.tokenizer import whole_text
from ..errors import CheckpointError, PromptError, UsageError
from ..text import one_line
from .prompt import same_tokens

# Placeholders for messages, which show what a template writes after an answer.
QUESTION, ANSWER = "question", "the-answer-stands-here"


class ChatTemplate:
    """A model's chat template, which renders messages to token ids: the system prompt and ``messages``, then the chat.

    Raises:
        CheckpointError: there is no template, or it cannot be used.
        UsageError: it cannot be used with this system prompt or these options.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        messages: Sequence[Mapping[str, str]] = (),
    ) -> None:
        if not tokenizer.has_chat_template:
            raise CheckpointError(
                "this model has no chat template: it was not made to converse; outcore generate continues a text"
            )
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        self._begin = [*[_said("system", system or "")] * (system is not None), *messages]
        try:
            self._other = self.opening(QUESTION)
        except PromptError as e:
            why = f"the model's chat template cannot be used: {one_line(e.__cause__ or e)}"
            if system is None and not options and not messages:
                raise CheckpointError(why) from e
            raise UsageError(f"{why}; try it without --system-prompt and --chat-template-config") from e

    def opening(self, message: str) -> list[int]:
        """A conversation's first tokens, until its first answer begins; ``PromptError`` if the template refuses the
        message."""
        return self.encode(self._render([*self._begin, _said("user", message)]))

    def shared(self, prompt: Sequence[int]) -> int:
        """How many first tokens of a prompt every conversation begins with."""
        return same_tokens(prompt, self._other)

    def following(self, message: str, last: int) -> list[int]:
        """The tokens between an answer, which ends with the token ``last``, and the next; an end-of-turn token is not
        repeated."""
        text = self._after_answer(message)
        if last in self.tokenizer.eos_token_ids:
            closing = self.tokenizer.decode([last])
            if closing and text.lstrip().startswith(closing):
                text = text.lstrip().removeprefix(closing)
        return self.encode(text)

    def _after_answer(self, message: str) -> str:
        messages = [_said("user", QUESTION), _said("assistant", ANSWER), _said("user", message)]
        try:
            _, found, text = self._render(messages).partition(ANSWER)
        except PromptError:
            found = text = ""
        # The template takes no answers: render each message by itself, as mlx-lm does.
        return text if found else self._render(messages[-1:])

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._options
            )
        except Exception as e:  # a template is code that comes with the model: it raises what it likes
            raise PromptError(f"the model's chat template refuses this: {one_line(e)}") from e
        return whole_text(str(rendered), "the chat template's text")

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Conversation:
    """A conversation that grows by a message and an answer at a time; ``held`` counts the tokens in its caches.

    Earlier text stays as it was. Many templates would leave an answer's thoughts out of later prompts, but then the
    answer had to be computed again, and with states that cannot be taken back all before it too.
    """

    def __init__(self, template: ChatTemplate, make_cache: Callable[[], list[Any]]) -> None:
        self._template = template
        self.make_cache = make_cache
        self.clear()

    def clear(self) -> None:
        self.text: list[int] = []
        self.cache = self.make_cache()
        self.held = self._answer = 0

    def goes_on(self, text: Sequence[int], cache: list[Any] | None, held: int) -> None:
        """Continue with this text and caches that hold ``held`` tokens of it; None: none do."""
        self.clear()
        self.text = list(text)
        if cache is not None:
            self.cache, self.held = cache, held

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt other conversations begin with too: those of a system prompt."""
        return 0 if self.held else self._template.shared(prompt)

    def prompt(self, message: str) -> list[int]:
        """The tokens to be answered: the text that no cache holds, and the message."""
        new = self._template.following(message, self.text[-1]) if self.text else self._template.opening(message)
        return [*self.text[self.held :], *new]

    def add(self, prompt: Sequence[int], answer: Sequence[int], in_cache: int) -> None:
        """Record the answer to a prompt, whole or not; the caches hold ``in_cache`` tokens of both
        (``Session.in_cache``)."""
        self._answer = self.held + len(prompt)
        self.text = [*self.text[: self.held], *prompt, *answer]
        self.held += in_cache

    def end_answer(self, text: str) -> None:
        """Shorten the last answer to ``text``, its beginning, and trim the caches to match."""
        kept = [*self.text[: self._answer], *self._template.encode(text)]
        same = same_tokens(self.text, kept)
        self.text = kept
        surplus = self.held - same
        if surplus <= 0:
            return
        if can_trim_prompt_cache(self.cache):
            trim_prompt_cache(self.cache, surplus)
            self.held -= surplus
        else:
            self.cache, self.held = self.make_cache(), 0
