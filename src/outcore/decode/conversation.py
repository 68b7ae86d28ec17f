"""A conversation: one text of token ids, and the caches that hold its first tokens.

mlx-lm's chat renders each message by itself. Here the chat template writes the tokens between two answers, so that the
text has the form that the model was trained on: one system prompt, and an end-of-turn token after every answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.tokenizer import whole_text
from ..errors import CheckpointError, PromptError, UsageError
from ..text import one_line
from .prompt import same_tokens

Encode = Callable[[str], list[int]]  # makes tokens of a rendered text

# Messages that are rendered to find out what a template writes after an answer.
QUESTION, ANSWER = "question", "the-answer-stands-here"


class ChatTemplate:
    """Renders a chat to token ids by the model's chat template; ``system`` and ``messages`` come before the chat.

    Raises:
        CheckpointError: the model has no template, or one that cannot be used.
        UsageError: the template cannot be used with this system prompt, or these options or messages.
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

    def opening(self, message: str, encode: Encode | None = None) -> list[int]:
        """Returns a conversation's tokens up to its first answer. Raises ``PromptError`` if the template refuses the
        message. ``encode``: for a message with images."""
        return (encode or self.encode)(self._render([*self._begin, _said("user", message)]))

    def shared(self, prompt: Sequence[int]) -> int:
        """Returns how many of a prompt's first tokens are the same in every conversation with this system prompt."""
        return same_tokens(prompt, self._other)

    def following(self, message: str, last: int, encode: Encode | None = None) -> list[int]:
        """Returns the tokens from the end of an answer, whose last token is ``last``, to the answer to ``message``. If
        ``last`` is an end-of-turn token, it is not repeated."""
        text = self._after_answer(message)
        if last in self.tokenizer.eos_token_ids:
            closing = self.tokenizer.decode([last])
            if closing and text.lstrip().startswith(closing):
                text = text.lstrip().removeprefix(closing)
        return (encode or self.encode)(text)

    def _after_answer(self, message: str) -> str:
        messages = [_said("user", QUESTION), _said("assistant", ANSWER), _said("user", message)]
        try:
            _, found, text = self._render(messages).partition(ANSWER)
        except PromptError:
            found = text = ""
        # If the template refuses or leaves out answers, render each message by itself, as mlx-lm does.
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
    """A conversation, to which messages and answers are appended; ``held`` counts the tokens that its caches hold,
    ``images`` are those of its text, as the model's reader made them.

    Earlier text is never changed. Many templates leave an answer's thoughts out of later prompts, but then the answer
    would have to be computed again; with caches that cannot be trimmed, so would everything before it.
    """

    def __init__(self, template: ChatTemplate, make_cache: Callable[[], list[Any]]) -> None:
        self._template = template
        self.make_cache = make_cache
        self.clear()

    def clear(self) -> None:
        self.text: list[int] = []
        self.images: list[Any] = []
        self.cache = self.make_cache()
        self.held = self._answer = 0

    def goes_on(self, text: Sequence[int], cache: list[Any] | None, held: int) -> None:
        """Replaces the conversation by ``text``, whose first ``held`` tokens ``cache`` holds; None: no cache does."""
        self.clear()
        self.text = list(text)
        if cache is not None:
            self.cache, self.held = cache, held

    def retell(self, template: ChatTemplate, turns: Iterable[tuple[str, str]]) -> None:
        """Renders messages and their answers anew by another template. Raises ``PromptError`` if it refuses one."""
        text: list[int] = []
        for message, answer in turns:
            text += template.following(message, text[-1]) if text else template.opening(message)
            text += template.encode(answer)
        self._template = template
        self.goes_on(text, None, 0)

    def shared(self, prompt: Sequence[int]) -> int:
        """Returns how many of a prompt's first tokens (a system prompt) other conversations begin with too."""
        return 0 if self.held else self._template.shared(prompt)

    def prompt(self, message: str, encode: Encode | None = None) -> list[int]:
        """Returns the tokens to compute for the next answer: text that the caches do not hold, and the message."""
        template, text = self._template, self.text
        new = template.following(message, text[-1], encode) if text else template.opening(message, encode)
        return [*self.text[self.held :], *new]

    def add(self, prompt: Sequence[int], answer: Sequence[int], in_cache: int) -> None:
        """Appends a prompt and its answer, complete or not; ``in_cache``: how many of both's tokens the caches took
        (``Session.in_cache``)."""
        self._answer = self.held + len(prompt)
        self.text = [*self.text[: self.held], *prompt, *answer]
        self.held += in_cache

    def end_answer(self, text: str) -> None:
        """Shortens the last answer to its beginning ``text``, and trims the caches to match."""
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
