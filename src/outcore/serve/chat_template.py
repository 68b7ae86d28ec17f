"""A model's chat template: what it supports, and the text of a request's messages."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode.prompt import render
from ..errors import RequestError
from ..modules.mlx_lm_tokenizer import has_template_code
from .events import GenerationRequest
from .harmony import is_harmony

CITY = "{'city': 'needle'}"
"""A call's arguments as Python prints a dict: the template should have been given a string."""

TOOL = {
    "type": "function",
    "function": {
        "name": "x",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_0", "type": "function", "function": {"name": "x", "arguments": {"city": "needle"}}}
CALLED = (
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "x", "name": "x", "tool_call_id": "call_0"},
)
OTHER = {"role": "user", "content": "\N{BLACK SQUARE}"}
"""A message that differs from any real one at its first character."""


class TokenizerTemplate:
    """One tokenizer's chat template.

    Attributes:
        text: its Jinja source; empty if there is none or it is Python code.
        tools: it renders tools, and the model's calls can be parsed.
        thinking: the model can reason before its answer.
        harmony: the model is of gpt-oss's form.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        found = tokenizer.chat_template
        if isinstance(found, Mapping):
            found = found.get("tool_use") or found.get("default") or next(iter(found.values()), "")
        self.text = found if isinstance(found, str) else ""
        code = tokenizer.has_chat_template and (not self.text or has_template_code(tokenizer))
        self._takes_tools = code or re.search(r"\btools\b", self.text) is not None
        self.harmony = is_harmony(self.text)
        self.tools = self._takes_tools and (tokenizer.has_tool_calling or self.harmony)
        marks = (tokenizer.think_start, tokenizer.think_end, "enable_thinking")
        known = tokenizer.has_thinking and (code or any(m in self.text for m in marks))
        self.thinking = known or self.harmony

    def render(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of a request's messages and ``tools``. Raises RequestError if the template cannot render them."""
        messages = request.messages or ()
        if not self._tokenizer.has_chat_template:
            why = "this model has no chat template; send a prompt instead"
            raise RequestError(f"messages: {why}", "unsupported_parameter", param="messages")
        if not messages:
            raise RequestError("messages: at least one is needed", param="messages")
        if tools and not self.tools:
            why = "this model's form of calls is unknown" if self._takes_tools else "the chat template takes none"
            raise RequestError(f"tools: {why}", "unsupported_parameter", param="tools")
        return self._render(messages, tools, request.template_options, continued=request.continued)

    def begin(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of another conversation with the same system messages and tools; empty if it cannot be rendered."""
        system = itertools.takewhile(lambda m: m.get("role") == "system", request.messages or ())
        try:
            return self._render([*system, OTHER], tools, request.template_options)
        except RequestError:
            return ""

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        continued: bool = False,
        form: tuple[bool, bool] | None = None,
    ) -> str:
        calls = any(m.get("tool_calls") for m in messages)
        strings, short = form or (self._form if calls else (False, False))
        given = [_formed(m, strings, short) for m in messages]
        how: dict[str, Any] = {"tools": [dict(t) for t in tools] or None, "add_generation_prompt": True}
        if continued:
            how |= {"add_generation_prompt": False, "continue_final_message": _continued(messages[-1])}
        return render(self._tokenizer, given, options, **how)

    @functools.cached_property
    def _form(self) -> tuple[bool, bool]:
        """Whether the template needs calls' arguments as a JSON string, and whether it needs short call ids."""
        for form in ((False, False), (False, True), (True, False), (True, True)):
            try:
                if CITY not in self._render(CALLED, (TOOL,), {}, form=form):
                    return form
            except RequestError:
                continue
        return (False, False)


def _continued(message: Mapping[str, Any]) -> bool | str:
    """transformers' ``continue_final_message``: which of the last message's texts the answer continues."""
    if message.get("role") != "assistant" or message.get("tool_calls"):
        why = "only an assistant's message without tool calls can be continued"
        raise RequestError(f"messages: {why}", param="messages")
    return "reasoning_content" if not message.get("content") and message.get("reasoning_content") else True


def _formed(message: Mapping[str, Any], strings: bool, short: bool) -> dict[str, Any]:
    made = {**message, "content": message.get("content") or ""}
    if short and "tool_call_id" in made:
        made["tool_call_id"] = _short(made["tool_call_id"])
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [dict(call, function=dict(call["function"])) for call in calls]
        for call in made["tool_calls"]:
            if short and "id" in call:
                call["id"] = _short(call["id"])
            if strings:
                call["function"]["arguments"] = json.dumps(call["function"].get("arguments", {}), ensure_ascii=False)
    return made


def _short(name: str) -> str:
    """An id of nine letters and digits, as Mistral's templates require."""
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:9]
