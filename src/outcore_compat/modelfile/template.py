"""``TEMPLATE``: the part of Go's templates that Ollama's describe a turn with, as a Jinja chat template.

A template of ``.System``, ``.Prompt`` and ``.Response`` stands for one turn. Ollama runs it once for every answer of a
conversation, and a last time up to ``.Response``, where the model goes on; what is made here does the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from outcore.text import shortened

from .syntax import Instruction, LineError

LONGEST = 1 << 16
"""Characters of a template."""

DEEPEST = 20
"""Conditions within each other: Python compiles what Jinja makes of them, and has a limit."""

SPACE = r"[ \t\r\n]"
ACTION = re.compile(
    rf"(?:(?<!{SPACE}){SPACE}*\{{\{{-(?={SPACE})|\{{\{{)(.*?)(?:(?<={SPACE})-\}}\}}{SPACE}*|\}}\}})", re.DOTALL
)
"""What stands in braces, with the white space that it trims."""
FIELD = re.compile(r"\.(System|Prompt|Response)")
IF = re.compile(rf"(else )?if (not )?{FIELD.pattern}")


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
    parser = _Parser(instruction)
    if text.find("}}", begin := text.rfind("{{")) < 0 <= begin:
        raise parser.error(begin, "{{ without }}")
    at = 0
    for found in ACTION.finditer(text):
        parser.literal(text[at : found.start()])
        at = found.end()
        body = " ".join(found[1].split())
        if not (body.startswith("/*") and body.endswith("*/")):
            parser.action(body, found.start(1))
    parser.literal(text[at:])
    return GoTemplate(text, parser.whole())


class _Parser:
    """Of one template, which it writes in Jinja: nothing there depends on how its white space is treated."""

    def __init__(self, instruction: Instruction) -> None:
        self._text, self._line = instruction.value, instruction.line
        self._written: list[str] = []
        self._open: list[tuple[int, int, bool]] = []  # conditions: where they began, their branches, and else was there
        self._ended = self._named = False  # .Response stands before this, or is named

    def literal(self, text: str) -> None:
        if text:
            self._written.append(f"{{{{- {_literal(text)} -}}}}")

    def action(self, body: str, at: int) -> None:
        """What stands in braces, its white space made single."""
        self._named |= ".Response" in body
        if field := FIELD.fullmatch(body):
            self._written.append(f"{{{{- {field[1]} -}}}}")
            self._ended |= field[1] == "Response"
        elif condition := IF.fullmatch(body):
            begun = self._branch(at, body) if condition[1] else (at, 0, False)
            self._open.append((begun[0], begun[1] + 1, False))
            if sum(branches for _, branches, _ in self._open) > DEEPEST:
                raise self.error(at, f"more than {DEEPEST} conditions within each other")
            self._written.append(f"{{%- {'elif' if condition[1] else 'if'} {condition[2] or ''}{condition[3]} -%}}")
        elif body == "else":
            begun = self._branch(at, body)
            self._open.append((begun[0], begun[1], True))
            self._written.append("{%- else -%}")
        elif body == "end":
            self._branch(at, body, ends=True)
            self._written.append("{%- endif -%}")
        else:
            raise self.error(
                at,
                f"{{{{ {shortened(body)} }}}}: only .System, .Prompt, .Response, if, if not, else and end are "
                "understood here; use them, or leave TEMPLATE out: then the model's own chat template is used",
            )
        # Ollama runs a template up to .Response without what comes after it, in other branches too.
        if self._ended and not body.startswith("if"):
            self._written.append("{{- mark -}}")

    def _branch(self, at: int, word: str, *, ends: bool = False) -> tuple[int, int, bool]:
        """The condition that this belongs to, taken away."""
        if not self._open or (self._open[-1][2] and not ends):
            raise self.error(at, f"{shortened(word)} without an if before it")
        return self._open.pop()

    def whole(self) -> str:
        if self._open:
            raise self.error(self._open[-1][0], "if without an end")
        if not self._named:
            self._written += ["{{- Response -}}", "{{- mark -}}"]
        return "".join(self._written)

    def error(self, at: int, why: str) -> LineError:
        return LineError(self._line + self._text.count("\n", 0, at), f"TEMPLATE: {why}")


def _literal(text: str) -> str:
    """A string of Jinja's. JSON's escapes are among those that it knows, but for halves of characters."""
    return json.dumps(text, ensure_ascii=False)
