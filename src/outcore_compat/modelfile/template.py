"""``TEMPLATE``: the part of Go's templates that Ollama's describe a turn with, as a Jinja chat template.

A template of ``.System``, ``.Prompt`` and ``.Response`` stands for one turn. Ollama runs it once for every answer of a
conversation, and a last time up to ``.Response``, where the model goes on; what is made here does the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from outcore.text import shortened

from .syntax import Instruction, LineError

FIELDS = ("System", "Prompt", "Response")

LONGEST = 1 << 16
"""Characters of a template."""

DEEPEST = 20
"""Conditions within each other: Python compiles what Jinja makes of them, and has a limit."""

WORDIEST = 64
"""Words between ``{{`` and ``}}``."""

SPACE = " \t\r\n"
COMMENT = re.compile(r"/\*.*\*/", re.DOTALL)
WORD = re.compile(r"[()]|[^\s()]+")
OPERATORS = {"and": " and ", "or": " or "}


@dataclass(frozen=True)
class GoTemplate:
    """A turn of a conversation.

    Attributes:
        text: as it stands in the Modelfile.
        body: the same in Jinja, of ``System``, ``Prompt``, ``Response``, and ``mark``, which stands where the first
            ``.Response`` ends.
    """

    text: str
    body: str

    def jinja(self, begin: str = "") -> str:
        """A chat template for ``tokenizer.apply_chat_template``; its messages are of system, user and assistant.

        Args:
            begin: what every text begins with: the token that the tokenizer puts in front, if it does.
        """
        parts = {"turn": self.body, "mark": _literal(MARK), "begin": _literal(begin)}
        return (CONVERSATION % parts).rstrip("\n")


MARK = "\x02.Response\x03"

CONVERSATION = """\
{%%- macro turn(System, Prompt, Response, mark="") -%%}%(turn)s{%%- endmacro -%%}
{%%- set now = namespace(system="", prompt="", response="", role="") -%%}
{%%- set text -%%}
{%%- for message in messages -%%}
{%%- set said = message.content or "" -%%}
{%%- if said is not string -%%}{{- raise_exception("TEMPLATE takes messages of text alone") -}}{%%- endif -%%}
{%%- if message.role == now.role -%%}
{%%- if now.role == "system" -%%}{%%- set now.system = now.system ~ "\\n\\n" ~ said -%%}
{%%- elif now.role == "user" -%%}{%%- set now.prompt = now.prompt ~ "\\n\\n" ~ said -%%}
{%%- else -%%}{%%- set now.response = now.response ~ "\\n\\n" ~ said -%%}{%%- endif -%%}
{%%- elif message.role == "assistant" -%%}{%%- set now.response = said -%%}
{%%- elif message.role in ("system", "user") -%%}
{%%- if now.response or (message.role == "system" and now.prompt) -%%}
{{- turn(now.system, now.prompt, now.response) -}}
{%%- set now.system = "" -%%}{%%- set now.prompt = "" -%%}{%%- set now.response = "" -%%}
{%%- endif -%%}
{%%- if message.role == "system" -%%}{%%- set now.system = said -%%}
{%%- else -%%}{%%- set now.prompt = said -%%}{%%- endif -%%}
{%%- else -%%}{{- raise_exception("a message of role " ~ message.role ~ ": TEMPLATE has no place for it") -}}
{%%- endif -%%}
{%%- set now.role = message.role -%%}
{%%- endfor -%%}
{%%- if add_generation_prompt or now.role != "assistant" -%%}
{{- turn(now.system, now.prompt, now.response, %(mark)s).split(%(mark)s)[0] -}}
{%%- else -%%}{{- turn(now.system, now.prompt, now.response) -}}{%%- endif -%%}
{%%- endset -%%}
{{- ("" if text.startswith(%(begin)s) else %(begin)s) ~ text -}}
"""
"""Ollama's rule for templates of one turn (template/template.go, Execute and collate)."""


def parse_template(instruction: Instruction) -> GoTemplate:
    """The template of an instruction. One without ``.Response`` has it at its end, as in Ollama.

    Raises:
        LineError: it is none, or of what only Ollama can do; says in which line.
    """
    text = instruction.value
    if len(text) > LONGEST:
        raise instruction.refused(f"{len(text)} characters; at most {LONGEST}")
    return GoTemplate(text, _Parser(instruction).body())


class _Parser:
    """Of one template, which it writes in Jinja: nothing there depends on how its white space is treated."""

    def __init__(self, instruction: Instruction) -> None:
        self._text, self._line = instruction.value, instruction.line
        self._written: list[str] = []
        self._open: list[tuple[int, int, bool]] = []  # conditions: where they began, their branches, and else was there
        self._ended = False  # .Response stands before this

    def body(self) -> str:
        for at, piece in self._pieces():
            if isinstance(piece, str):
                self._write(_literal(piece))
                continue
            word, words = (piece[0], piece[1:]) if piece else ("", [])
            if word == "if":
                self._branch("if", words, at, (at, 0, False))
            elif word == "else":
                if not self._open or self._open[-1][2]:
                    raise self._error(at, "else without an if before it")
                if words and words[0] != "if":
                    raise self._error(at, f"else {shortened(' '.join(words))}: there is else, and else if")
                self._branch("elif" if words else "else", words[1:], at, self._open.pop())
            elif word == "end" and not words:
                if not self._open:
                    raise self._error(at, "end without an if before it")
                self._open.pop()
                self._written.append("{%- endif -%}")
                self._mark()
            else:
                self._write(self._field(piece, at))
        if self._open:
            raise self._error(self._open[-1][0], "if without an end")
        if not any("Response" in part for part in self._written if not part.startswith('{{- "')):
            self._write("Response")
        return "".join(self._written)

    def _write(self, expression: str) -> None:
        self._written.append(f"{{{{- {expression} -}}}}")
        if expression == "Response":
            self._ended = True
            self._mark()

    def _mark(self) -> None:
        """Ollama runs a template up to ``.Response`` without what comes after it, in other branches too."""
        if self._ended:
            self._written.append("{{- mark -}}")

    def _branch(self, word: str, words: Sequence[str], at: int, of: tuple[int, int, bool]) -> None:
        if sum(branches for _, branches, _ in (*self._open, of)) >= DEEPEST:
            raise self._error(at, f"more than {DEEPEST} conditions within each other")
        condition = f" {self._condition(words, at)}" if word != "else" else ""
        self._open.append((of[0], of[1] + 1, word == "else"))
        self._written.append(f"{{%- {word}{condition} -%}}")
        if word != "if":
            self._mark()

    def _pieces(self) -> list[tuple[int, str | list[str]]]:
        """Texts, and the words of actions, with where they stand; without comments, and without what is trimmed."""
        found: list[tuple[int, str | list[str]]] = []
        text, at, trims = self._text, 0, False
        while (begin := text.find("{{", at)) >= 0:
            end = text.find("}}", begin)
            if end < 0:
                raise self._error(begin, "{{ without }}")
            body = text[begin + 2 : end]
            left = body.startswith("-") and body[1:2] in (*SPACE, "")
            right = body.endswith("-") and body[-2:-1] in (*SPACE, "")
            between = text[at:begin].lstrip(SPACE) if trims else text[at:begin]
            if between := between.rstrip(SPACE) if left else between:
                found.append((at, between))
            body = body[left : len(body) - right].strip(SPACE)
            if not COMMENT.fullmatch(body):
                found.append((begin, self._words(body, begin)))
            at, trims = end + 2, right
        rest = text[at:].lstrip(SPACE) if trims else text[at:]
        return [*found, (at, rest)] if rest else found

    def _words(self, body: str, at: int) -> list[str]:
        words = [word[0] for word in islice(WORD.finditer(body), WORDIEST + 1)]
        if len(words) > WORDIEST or words.count("(") > DEEPEST:
            raise self._error(at, f"{{{{ {shortened(body)} }}}} is too long")
        return words

    def _condition(self, words: Sequence[str], at: int) -> str:
        left = list(words)
        condition = self._operand(left, at) if len(left) == 1 else self._call(left, at)
        if left:
            raise self._error(at, f"{shortened(left[0])} is not expected here")
        return condition

    def _call(self, left: list[str], at: int) -> str:
        """``and``, ``or`` or ``not`` with what belongs to it, taken away from ``left``."""
        word = left.pop(0) if left else ""
        if word == "not":
            return f"(not {self._operand(left, at)})"
        if word not in OPERATORS:
            left.insert(0, word)
            return self._operand(left, at)
        operands = [self._operand(left, at)]
        while left and left[0] != ")":
            operands.append(self._operand(left, at))
        return f"({OPERATORS[word].join(operands)})"

    def _operand(self, left: list[str], at: int) -> str:
        word = left.pop(0) if left else ""
        if word != "(":
            return self._field([word], at)
        inner = self._call(left, at)
        if not left or left.pop(0) != ")":
            raise self._error(at, "( without )")
        return inner

    def _field(self, words: Sequence[str], at: int) -> str:
        name = words[0].removeprefix(".") if words else ""
        if len(words) == 1 and words[0].startswith(".") and name in FIELDS:
            return name
        raise self._error(
            at,
            f"{{{{ {shortened(' '.join(words))} }}}}: only .System, .Prompt, .Response, if, else, end, and, or and not "
            "are understood here; use them, or leave TEMPLATE out: then the model's own chat template is used",
        )

    def _error(self, at: int, why: str) -> LineError:
        return LineError(self._line + self._text.count("\n", 0, at), f"TEMPLATE: {why}")


def _literal(text: str) -> str:
    """A string of Jinja's. JSON's escapes are among those that it knows, but for halves of characters."""
    return json.dumps(text, ensure_ascii=False)
