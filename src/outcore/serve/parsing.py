"""Splits generated text into answer, reasoning and tool calls.

Text comes in pieces that may be cut anywhere, which does not change the result: text that may be the beginning of a
mark is held back.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..text import half_character
from .events import Called, TextPart
from .prompted_tools import CALL as PROMPTED_CALL
from .prompted_tools import CALL_END, read_object

# Number of failed calls after which an answer's text is no longer searched for calls, as each is read twice.
TRIES = 16

SPACE = " \t\r\n"
NAME = re.compile(r"[\w.:/-]+")


class Stopper:
    """Finds the stop string that ends first in a text that arrives in pieces.

    Attributes:
        found: that stop string, the longer one if two end together; None: not found yet.
        rest: the text after the stop string in the piece in which it ends.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None
        self.rest = ""

    def feed(self, text: str) -> str:
        """Adds a piece; returns the text before a stop string, without an end that a stop string may begin with."""
        if self.found is not None:
            return ""
        whole, self._held = self._held + text, ""
        places = ((whole.find(s), s) for s in self._strings)
        ends = [(at + len(s), -len(s), s) for at, s in places if at >= 0]
        if ends:
            end, _, self.found = min(ends)
            self.rest = whole[end:]
            return whole[: end - len(self.found)]
        # Holds back the longest end of the text that is the beginning of a stop string.
        free = next((n for n in range(len(whole)) if any(s.startswith(whole[n:]) for s in self._strings)), len(whole))
        self._held = whole[free:]
        return whole[:free]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class Markers:
    """How a model marks the parts of its text.

    Attributes:
        marks: for each state, the marks that end it and the states that they lead to. The states are ``normal``,
            ``reasoning``, ``tool`` and the model's own, whose text is dropped. A call without an end mark takes the
            rest of the text.
        parse: parses the text of a call, given the tools (``mlx_lm.tool_parsers``).
        initial: the first state.
        tokens: marks of one token each, which a text cannot end within.
    """

    marks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    parse: Callable[[str, Any], Any] | None = None
    initial: str = "normal"
    tokens: frozenset[str] = frozenset()


def markers_of(tokenizer: TokenizerWrapper, tools: bool, prompted: bool = False) -> Markers:
    """The tokenizer's marks, as in mlx-lm's ``make_text_state_machine``; those of calls only with ``tools``.

    Args:
        prompted: calls have the form of ``prompted_tools``.
    """
    if tools and prompted:
        plain = markers_of(tokenizer, False)
        made = {**plain.marks, "normal": {**plain.marks["normal"], PROMPTED_CALL: "tool"}, "tool": {CALL_END: "normal"}}
        return replace(plain, marks=made, parse=read_object)
    calls = tools and tokenizer.has_tool_calling
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    marks: dict[str, dict[str, str]] = {"normal": {}, "reasoning": {}, "tool": {end: "normal"} if calls and end else {}}
    if tokenizer.has_thinking:
        marks["normal"][tokenizer.think_start] = "reasoning"
        marks["reasoning"][tokenizer.think_end] = "normal"
    own = tokenizer.response_transitions
    if calls and not any(to == "tool" for each in own.values() for _, to in each):
        marks["normal"][start] = "tool"
    if calls and tokenizer.has_thinking:
        marks["reasoning"][start] = "tool"
    marks["normal"] |= dict.fromkeys(tokenizer.structural_markers, "normal")
    for state, each in own.items():
        marks.setdefault(state, {}).update({mark: to for mark, to in each if to != "tool" or calls})
    tokens = {start} if calls and len(tokenizer.tool_call_start_tokens or ()) == 1 else ()
    return Markers(marks, tokenizer.tool_parser, tokenizer.response_initial_state or "normal", frozenset(tokens))


class TextParser:
    """Parses the text of one choice.

    A call that cannot be parsed is ordinary text; a call that the token limit cut is dropped. Marks of reasoning count
    only before the answer has begun, since an answer may mention them. White space between the parts is dropped.

    Args:
        index: the choice's number.
        markers: None: all text is the answer.
        thinking: the text begins within the reasoning.
        continued: the text continues an answer or reasoning.
        parallel: several calls are allowed; else the text ends with the first.

    Attributes:
        ids: of the calls so far.
        over: the text has ended, and more of it is ignored.
    """

    def __init__(
        self,
        index: int,
        markers: Markers | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool = False,
        continued: bool = False,
        parallel: bool = True,
    ) -> None:
        self.index, self._tools, self._parallel = index, tools, parallel
        self._markers = markers or Markers()
        self.ids: set[str] = set()
        self.over = False
        self._tries = TRIES
        self._answered = continued and not thinking  # the answer has begun
        # Whether the current part is still empty, and whether it is the first part.
        self._begins: Literal["", "first", "next"] = "" if continued else "first"
        self._space = ""  # white space held back, before a part or within the reasoning
        self._opened = ("normal", "")  # the state in which a call began, and its mark
        self._body: list[str] = []  # the call's text
        self._aside: list[str] | None = []  # text of the model's own states, until any part was returned
        self._out: list[TextPart | Called] = []
        self._enter("reasoning" if thinking else "normal" if continued else self._markers.initial)

    @property
    def thinking(self) -> bool:
        return (self._opened[0] if self._state == "tool" else self._state) == "reasoning"

    def feed(self, text: str) -> list[TextPart | Called]:
        if self._plain:
            return [TextPart(self.index, text)] if text else []
        self._read(text)
        return self._take_out()

    def finish(self, cut: bool = False) -> list[TextPart | Called]:
        """The parts and calls that were held back; ``cut``: the token limit ended the text."""
        while not (self._plain or self.over):
            held = self._scanner.finish()
            if cut and self._begins_call(held):
                self._space, self._aside = "", None
                break
            self._take(held)
            if self._state != "tool":
                break
            body, open_end = "".join(self._body), not self._markers.marks["tool"]
            if (open_end or not cut) and self._call(body):
                break
            if cut:
                if open_end:  # keeps the calls before the one that was cut
                    self._call(body.rpartition(self._opened[1])[0])
                self._aside = None
                break
            self._read(self._no_call(body))
        if self._state == "normal" and self._begins == "first":
            self._say(self._space)
        if self._aside:  # the model did not follow its form
            self._say("".join(self._aside))
        self.over = True
        return self._take_out()

    @property
    def _plain(self) -> bool:
        return not any(self._markers.marks.values())

    def _begins_call(self, text: str) -> bool:
        """Whether text that was held back may be part of a mark at which a call begins."""
        marks = self._markers.marks.get(self._state, {}).items()
        own = self._markers.tokens
        return bool(text) and any(to == "tool" and mark not in own and mark.startswith(text) for mark, to in marks)

    def _take_out(self) -> list[TextPart | Called]:
        out, self._out = self._out, []
        return out

    def _read(self, text: str) -> None:
        while text and not self.over:
            self._take(self._scanner.feed(text))
            mark = self._scanner.found
            text = "" if mark is None else self._passed(mark, self._scanner.rest)

    def _enter(self, state: str) -> None:
        marks = self._markers.marks.get(state, {})
        self._state = state
        self._scanner = Stopper([mark for mark, to in marks.items() if self._tries > 0 or to != "tool"])

    def _passed(self, mark: str, rest: str) -> str:
        """Change the state after a mark; returns the text to parse next."""
        state, to = self._state, self._markers.marks[self._state][mark]
        if state == "tool":
            body = "".join(self._body)
            if not self._call(body):
                if self._tries <= 0 or not _in_string(body):
                    return self._no_call(body + mark + rest)
                self._tries -= 1
                self._body.append(mark)
                to = state
        elif to == "tool":
            self._opened, self._body = (state, mark), []
        elif to == "reasoning" and self._answered:
            self._take(mark)
            to = state
        else:
            self._part_ended()
        self._enter(to)
        return rest

    def _part_ended(self) -> None:
        self._space, self._begins = "", "next"
        if self._aside:
            self._aside.clear()

    def _no_call(self, text: str) -> str:
        """Treat a failed call as text: emits its mark, and returns the text after it to be parsed again."""
        self._tries -= 1
        state, mark = self._opened
        self._enter("reasoning" if state == "reasoning" else "normal")
        self._take(mark)
        return text

    def _take(self, text: str) -> None:
        if self._state == "tool":
            self._body.append(text)
        elif self._state not in ("normal", "reasoning"):
            if self._aside is not None:
                self._aside.append(text)
        elif self._begins and not text.lstrip(SPACE):
            self._space += text
        else:
            if self._begins:
                own = self._begins == "first" and self._state == "normal"
                text, self._space = self._space + text if own else text.lstrip(SPACE), ""
                self._begins = ""
            if self._state == "normal":
                self._answered = self._answered or bool(text)
                self._say(text)
            elif kept := text.rstrip(SPACE):
                self._say("", self._space + kept)
                self._space = text[len(kept) :]
            else:
                self._space += text

    def _say(self, text: str, reasoning: str = "") -> None:
        if not (text or reasoning):
            return
        self._aside = None
        last = self._out[-1] if self._out else None
        if isinstance(last, TextPart) and bool(last.text) == bool(text):
            text, reasoning = last.text + text, last.reasoning + reasoning
            self._out.pop()
        self._out.append(TextPart(self.index, text, reasoning))

    def _call(self, body: str) -> bool:
        found = read_calls(self._markers.parse, body, self._tools)
        if not found:
            return False
        for name, arguments, given in found if self._parallel else found[:1]:
            made = given if given and given not in self.ids else f"call_{secrets.token_hex(12)}"
            self._out.append(Called(self.index, name, arguments, made, len(self.ids)))
            self.ids.add(made)
        self._part_ended()
        self._aside = None
        self.over = not self._parallel
        return True


def _in_string(text: str) -> bool:
    """Whether JSON ends within a string, so that a mark there is a part of it."""
    try:
        json.loads(text)
        return False
    except (ValueError, RecursionError) as e:
        return str(e).startswith("Unterminated string")


def read_calls(
    parse: Callable[[str, Any], Any] | None, body: str, tools: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """Name, arguments as JSON, and the model's own id or an empty string, of each call; empty if parsing fails.

    Args:
        parse: mlx-lm's parser, which may return one call, a list, or any JSON value.
    """
    try:
        found = parse(body, [dict(t) for t in tools]) if parse is not None else []
        return [_call(each, tools) for each in (found if isinstance(found, list) else [found])]
    except Exception:  # mlx-lm's parsers raise anything for malformed text
        return []


def _call(found: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    name, arguments, given = found["name"], found.get("arguments", found.get("parameters")), found.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not (isinstance(name, str) and name and isinstance(arguments, dict)) or half_character(name) is not None:
        raise ValueError("no call")
    offered = any(t["function"]["name"] == name for t in tools)
    if not offered and (arguments.keys() == {"raw"} or not NAME.fullmatch(name)):
        raise ValueError("no call")  # mlx-lm's glm47 parser accepts any text
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if half_character(text) is not None:
        text = json.dumps(arguments)
    return name, text, given if isinstance(given, str) and half_character(given) is None else ""


FINAL = "<|channel|>final<|message|>"
CALL = "to=functions."
PARTS = {"<|channel|>analysis<|message|>": "reasoning", "<|channel|>commentary<|message|>": "normal", FINAL: "normal"}
PART_ENDS = {"<|end|>": "header", "<|start|>assistant": "header"}


def is_harmony(template: str) -> bool:
    return all(token in template for token in ("<|start|>", "<|channel|>", "<|message|>", "<|call|>"))


def harmony_markers(tools: bool) -> Markers:
    header = PARTS | ({CALL: "tool"} if tools else {})
    return Markers({"header": header, "normal": PART_ENDS, "reasoning": PART_ENDS, "tool": {}}, read_call, "header")


def read_call(text: str, tools: Any = None) -> dict[str, Any]:
    """Parses ``NAME ...<|message|>{...}``, with the signature of mlx-lm's parsers. Raises ValueError for other text."""
    found = re.match(r"([\w.:/-]+)[^{]*?<\|message\|>(.*?)(?:<\|call\|>)?\s*$", text, re.DOTALL)
    if found is None:
        raise ValueError("no call")
    return {"name": found[1], "arguments": found[2]}
