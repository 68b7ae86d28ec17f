"""From generated text to what it is: the answer, what was thought before it, and calls of tools.

Text comes in pieces cut anywhere; what comes out of them does not depend on the cuts. What may begin a mark is held
back until more is known.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..text import half_character
from .events import Called, TextPart

TRIES = 16
"""Texts of an answer that begin as calls and are none, after which no more are looked at: each is read twice."""

SPACE = " \t\r\n"
NAME = re.compile(r"[\w.:/-]+")


class Stopper:
    """Finds the first of some strings that is complete in a text that comes in pieces.

    The time that a piece takes depends on its length and those of the strings, not on what came before it.

    Attributes:
        found: the string; None: none of them so far. Of two that end at the same place it is the longer one.
        rest: of the piece that it ended in, what stands behind it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._matched = [0] * len(self._strings)  # characters of each that the text ends with
        self._held = ""
        self.found: str | None = None
        self.rest = ""

    def feed(self, text: str) -> str:
        """The text so far that belongs to none of the strings, without what was returned before."""
        if self.found is not None:
            return ""
        ends = [(end, -len(s), s) for n, s in enumerate(self._strings) if (end := self._search(n, text)) is not None]
        whole, before = self._held + text, len(self._held)
        if ends:
            end, _, self.found = min(ends)
            self.rest, self._held = text[end:], ""
            return whole[: before + end - len(self.found)]
        free = len(whole) - max(self._matched, default=0)
        self._held = whole[free:]
        return whole[:free]

    def finish(self) -> str:
        """What was held back: the text has ended."""
        held, self._held = self._held, ""
        return held

    def _search(self, number: int, text: str) -> int | None:
        """Where in the text this string first ends (Knuth, Morris, Pratt); None: it does not."""
        string, matched, at = self._strings[number], self._matched[number], 0
        fallback = _fallback(string)
        while at < len(text):
            if matched == 0:
                at = text.find(string[0], at)
                if at < 0:
                    break
            while matched and text[at] != string[matched]:
                matched = fallback[matched - 1]
            matched += text[at] == string[matched]
            at += 1
            if matched == len(string):
                return at
        self._matched[number] = matched
        return None


@functools.lru_cache(maxsize=256)
def _fallback(string: str) -> tuple[int, ...]:
    """For each beginning of a string, the length of the longest shorter one that it ends with."""
    found = [0] * len(string)
    k = 0
    for i in range(1, len(string)):
        while k and string[i] != string[k]:
            k = found[k - 1]
        k += string[i] == string[k]
        found[i] = k
    return tuple(found)


@dataclass(frozen=True)
class Markers:
    """How a model marks the parts of its text.

    Attributes:
        think: begin and end of what is thought.
        call: begin and end of calls; an empty end: they take the rest of the text.
        parse: reads what stands between them, given the tools (``mlx_lm.tool_parsers``).
        dropped: marks that say nothing.
        transitions: more of them: from a state (``normal``, ``reasoning``, ``tool``, or one of the model's own, whose
            text is dropped) by a mark to a state.
        initial: the state that a text begins in, if it is not ``normal``.
        tokens: marks that are one token each, so that no text ends within one.
    """

    think: tuple[str, str] | None = None
    call: tuple[str, str] | None = None
    parse: Callable[[str, Any], Any] | None = None
    dropped: tuple[str, ...] = ()
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    initial: str = "normal"
    tokens: frozenset[str] = frozenset()

    @functools.cached_property
    def marks(self) -> dict[str, dict[str, str]]:
        """Of each state, the marks that end it and the states they lead to; as ``make_text_state_machine`` of mlx-lm
        has them."""
        found: dict[str, dict[str, str]] = {"normal": {}, "reasoning": {}, "tool": {}}
        if self.think is not None:
            found["normal"][self.think[0]] = "reasoning"
            found["reasoning"][self.think[1]] = "normal"
        own = any(to == "tool" for marks in self.transitions.values() for _, to in marks)
        if self.call is not None:
            if not own:
                found["normal"][self.call[0]] = "tool"
            if self.think is not None:
                found["reasoning"][self.call[0]] = "tool"
            if self.call[1]:
                found["tool"][self.call[1]] = "normal"
        found["normal"] |= dict.fromkeys(self.dropped, "normal")
        for state, marks in self.transitions.items():
            taken = {mark: to for mark, to in marks if to != "tool" or self.call is not None}
            found[state] = found.get(state, {}) | taken
        return found


class TextParser:
    """Reads the text of one choice.

    A text that begins as a call and cannot be read as one is text like any other, unless the answer was cut within it:
    that is part of a call, which nobody gets. Thoughts are looked for only before
    the answer has begun: in an answer, their mark is a word that it speaks of. White space between the parts is
    dropped.

    Args:
        index: of the choice.
        markers: None: all of it is the answer.
        tools: that may be called, for the parser of calls.
        thinking: the text begins within what is thought.
        continued: it goes on with something, be it an answer or a thought.
        parallel: it may hold several calls; otherwise it is over with the first.

    Attributes:
        calls: how many there were.
        over: nothing more will come: whatever is fed is dropped.
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
        self._index, self._tools, self._parallel = index, tools, parallel
        self._markers = markers or Markers()
        self.calls, self.over = 0, False
        self._ids: set[str] = set()
        self._tries = TRIES
        self._plain = not any(self._markers.marks.values())
        self._answered = continued and not thinking  # some of the answer is there
        self._begins = not continued  # nothing is there yet of this part
        self._between = False  # some part has ended: white space before the next is dropped
        self._space = ""  # held back: before the first part or within what is thought
        self._origin, self._opening = "normal", ""  # where what may be a call began, and by which mark
        self._body: list[str] = []  # of it
        self._aside: list[str] = []  # text of a state of the model's own
        self._heard = False  # anything came out
        self._out: list[TextPart | Called] = []
        self._enter("reasoning" if thinking else "normal" if continued else self._markers.initial)

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thought, as far as is known."""
        return self._state == "reasoning" or (self._state == "tool" and self._origin == "reasoning")

    def feed(self, text: str) -> list[TextPart | Called]:
        """What the text so far turned out to hold, without what was returned before."""
        if self._plain:
            return [TextPart(self._index, text)] if text else []
        self._read(text)
        return self._given()

    def finish(self, cut: bool = False) -> list[TextPart | Called]:
        """What was held back.

        Args:
            cut: the text did not end by itself. A call that it had begun is dropped.
        """
        while not (self._plain or self.over):
            held = self._scanner.finish()
            if cut and self._begins_call(held):
                self._heard = True
                return self._ended()
            self._take(held)
            if self._state != "tool":
                break
            body, open_end = "".join(self._body), not self._markers.marks["tool"]
            if (open_end or not cut) and self._call(body):
                break
            if cut:
                if open_end:  # those before the one that was cut
                    self._call(body.rpartition(self._opening)[0])
                self._heard = True
                return self._ended()
            self._read(self._no_call(body))
        if self._state == "normal" and self._begins and not self._between:
            self._say(self._space)
        if not self._heard:
            # A model that did not keep to its form.
            self._say("".join(self._aside))
        return self._ended()

    def _begins_call(self, text: str) -> bool:
        """Whether the end of a text, which was held back, may be a part of a mark that a call begins with."""
        marks = self._markers.marks.get(self._state, {}).items()
        own = self._markers.tokens
        return bool(text) and any(to == "tool" and mark not in own and mark.startswith(text) for mark, to in marks)

    def _ended(self) -> list[TextPart | Called]:
        self.over = True
        return self._given()

    def _given(self) -> list[TextPart | Called]:
        out, self._out = self._out, []
        return out

    def _read(self, text: str) -> None:
        while text and not self.over:
            self._take(self._scanner.feed(text))
            mark = self._scanner.found
            text = "" if mark is None else self._passed(mark, self._scanner.rest)

    def _enter(self, state: str) -> None:
        marks = self._markers.marks.get(state, {})
        if self._tries <= 0:
            marks = {mark: to for mark, to in marks.items() if to != "tool"}
        self._state, self._scanner = state, Stopper(tuple(marks))

    def _passed(self, mark: str, rest: str) -> str:
        """Go on behind a mark; returns the text to go on with."""
        state, to = self._state, self._markers.marks[self._state][mark]
        if state == "tool":
            body = "".join(self._body)
            if not self._call(body):
                return self._no_call(body + mark + rest)
        elif to == "tool":
            self._origin, self._opening, self._body = state, mark, []
        elif to == "reasoning" and self._answered:
            self._take(mark)
            to = state
        else:
            self._part_ended()
        self._enter(to)
        return rest

    def _part_ended(self) -> None:
        self._space, self._between, self._begins = "", True, True
        self._aside.clear()

    def _no_call(self, text: str) -> str:
        """What began as a call is none: its mark is text, and what follows is looked at again."""
        self._tries -= 1
        self._enter("reasoning" if self._origin == "reasoning" else "normal")
        self._take(self._opening)
        return text

    def _take(self, text: str) -> None:
        """Text of the present state, without marks."""
        if self._state == "tool":
            self._body.append(text)
        elif self._state in ("normal", "reasoning"):
            if self._begins and not (text := self._beginning(text)):
                return
            if self._state == "normal":
                self._answered = self._answered or bool(text)
                self._say(text)
            elif kept := text.rstrip(SPACE):
                self._say("", self._space + kept)
                self._space = text[len(kept) :]
            else:
                self._space += text
        else:
            self._aside.append(text)

    def _beginning(self, text: str) -> str:
        """The text of a part that begins with this, if it does."""
        rest = text.lstrip(SPACE)
        if not rest:
            self._space += text
            return ""
        own = not self._between and self._state == "normal"
        text, self._space = self._space + text if own else rest, ""
        self._begins = False
        return text

    def _say(self, text: str, reasoning: str = "") -> None:
        if not (text or reasoning):
            return
        self._heard = True
        last = self._out[-1] if self._out else None
        if isinstance(last, TextPart) and bool(last.text) == bool(text):
            text, reasoning = last.text + text, last.reasoning + reasoning
            self._out.pop()
        self._out.append(TextPart(self._index, text, reasoning))

    def _call(self, body: str) -> bool:
        """Whether that is a call, or several."""
        found = read_calls(self._markers.parse, body, self._tools)
        if not found:
            return False
        for name, arguments, given in found if self._parallel else found[:1]:
            made = given if given and given not in self._ids else f"call_{secrets.token_hex(12)}"
            self._ids.add(made)
            self._out.append(Called(self._index, name, arguments, made, self.calls))
            self.calls += 1
        self._heard = True
        self._part_ended()
        self.over = not self._parallel
        return True


def read_calls(
    parse: Callable[[str, Any], Any] | None, body: str, tools: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """Name, arguments as JSON, and the model's own id (or nothing) of each call; empty: it cannot be read as calls.

    Args:
        parse: of mlx-lm; some give one call, some a list, some whatever JSON there was.
    """
    try:
        found = parse(body, [dict(t) for t in tools]) if parse is not None else []
        return [_call(each, tools) for each in (found if isinstance(found, list) else [found])]
    except Exception:  # what a model writes may be anything, and these parsers raise whatever comes
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
        raise ValueError("no call")  # glm47 takes any text for one
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if half_character(text) is not None:
        text = json.dumps(arguments)
    return name, text, given if isinstance(given, str) and half_character(given) is None else ""
