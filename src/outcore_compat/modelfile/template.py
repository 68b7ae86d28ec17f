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
class Text:
    """Written as it is."""

    text: str


@dataclass(frozen=True)
class TemplateField:
    """One of ``FIELDS``."""

    name: str


@dataclass(frozen=True)
class If:
    """A condition, an expression of Jinja's, and what is written if it holds, and if not."""

    condition: str
    then: tuple[Node, ...]
    otherwise: tuple[Node, ...] = ()


Node = Text | TemplateField | If


@dataclass(frozen=True)
class GoTemplate:
    """A turn of a conversation.

    Attributes:
        text: as it stands in the Modelfile.
    """

    text: str
    nodes: tuple[Node, ...]

    def jinja(self, begin: str = "") -> str:
        """A chat template for ``tokenizer.apply_chat_template``; its messages are of system, user and assistant.

        Args:
            begin: what every text begins with: the token that the tokenizer puts in front, if it does.
        """
        until, _ = _until_response(self.nodes)
        parts = {"turn": _written(self.nodes), "last": _written(until), "begin": _literal(begin)}
        return (CONVERSATION % parts).rstrip("\n")


CONVERSATION = """\
{%%- macro turn(System, Prompt, Response) -%%}%(turn)s{%%- endmacro -%%}
{%%- macro last(System, Prompt, Response) -%%}%(last)s{%%- endmacro -%%}
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
{%%- if add_generation_prompt or now.role != "assistant" -%%}{{- last(now.system, now.prompt, now.response) -}}
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
    nodes = _Parser(instruction).nodes()
    if not _responds(nodes):
        nodes = (*nodes, TemplateField("Response"))
    return GoTemplate(text, nodes)


class _Parser:
    """Of one template: a stack of open conditions, each with what was written before its ``else``."""

    def __init__(self, instruction: Instruction) -> None:
        self._text, self._line = instruction.value, instruction.line

    def nodes(self) -> tuple[Node, ...]:
        written: list[Node] = []
        # Conditions that are open: where they began, what was written before them; for each of its branches the
        # condition, None for else, and what is written then.
        open_: list[tuple[int, list[Node], list[tuple[str | None, list[Node]]]]] = []
        for at, piece in self._pieces():
            if isinstance(piece, Text):
                written.append(piece)
                continue
            word, words = (piece[0], piece[1:]) if piece else ("", [])
            if word == "if":
                self._check_depth(sum(len(branches) for *_, branches in open_), at)
                open_.append((at, written, [(self._condition(words, at), written := [])]))
            elif word == "else":
                if not open_ or open_[-1][2][-1][0] is None:
                    raise self._error(at, "else without an if before it")
                if words and words[0] != "if":
                    raise self._error(at, f"else {shortened(' '.join(words))}: there is else, and else if")
                self._check_depth(sum(len(branches) for *_, branches in open_), at)
                open_[-1][2].append((self._condition(words[1:], at) if words else None, written := []))
            elif word == "end" and not words:
                if not open_:
                    raise self._error(at, "end without an if before it")
                _, written, branches = open_.pop()
                written.append(_chain(branches))
            else:
                written.append(TemplateField(self._field(piece, at)))
        if open_:
            raise self._error(open_[-1][0], "if without an end")
        return tuple(written)

    def _pieces(self) -> list[tuple[int, Text | list[str]]]:
        """Texts, and the words of actions, with where they stand; without comments, and without what is trimmed."""
        found: list[tuple[int, Text | list[str]]] = []
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
                found.append((at, Text(between)))
            body = body[left : len(body) - right].strip(SPACE)
            if not COMMENT.fullmatch(body):
                found.append((begin, self._words(body, begin)))
            at, trims = end + 2, right
        rest = text[at:].lstrip(SPACE) if trims else text[at:]
        return [*found, (at, Text(rest))] if rest else found

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

    def _check_depth(self, depth: int, at: int) -> None:
        if depth >= DEEPEST:
            raise self._error(at, f"more than {DEEPEST} conditions within each other")

    def _error(self, at: int, why: str) -> LineError:
        return LineError(self._line + self._text.count("\n", 0, at), f"TEMPLATE: {why}")


def _chain(branches: Sequence[tuple[str | None, list[Node]]]) -> If:
    """``if``, ``else if`` and ``else`` as conditions within each other."""
    otherwise: tuple[Node, ...] = ()
    found: If | None = None
    for condition, nodes in reversed(branches):
        if condition is None:
            otherwise = tuple(nodes)
        else:
            found = If(condition, tuple(nodes), otherwise)
            otherwise = (found,)
    assert found is not None
    return found


def _responds(nodes: Sequence[Node]) -> bool:
    """Whether ``.Response`` is there, in a condition too."""
    return any(
        node == TemplateField("Response")
        or (isinstance(node, If) and ("Response" in node.condition or _responds((*node.then, *node.otherwise))))
        for node in nodes
    )


def _until_response(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], bool]:
    """What stands before the first ``.Response``, that included, and whether it is there."""
    kept: list[Node] = []
    for node in nodes:
        cut = node == TemplateField("Response")
        if isinstance(node, If):
            then, cut = _until_response(node.then)
            otherwise: tuple[Node, ...] = ()
            if not cut:
                otherwise, cut = _until_response(node.otherwise)
            node = If(node.condition, then, otherwise)
        kept.append(node)
        if cut:
            return tuple(kept), True
    return tuple(kept), False


def _written(nodes: Sequence[Node]) -> str:
    """As Jinja, in which nothing depends on how its white space is treated."""
    parts = []
    for node in nodes:
        if isinstance(node, Text):
            parts.append(f"{{{{- {_literal(node.text)} -}}}}")
        elif isinstance(node, TemplateField):
            parts.append(f"{{{{- {node.name} -}}}}")
        else:
            otherwise = f"{{%- else -%}}{_written(node.otherwise)}" if node.otherwise else ""
            parts.append(f"{{%- if {node.condition} -%}}{_written(node.then)}{otherwise}{{%- endif -%}}")
    return "".join(parts)


def _literal(text: str) -> str:
    """A string of Jinja's. JSON's escapes are among those that it knows, but for halves of characters."""
    return json.dumps(text, ensure_ascii=False)
