"""``TEMPLATE``: translates the part of Go's templates that Ollama's use for a turn into a Jinja chat template.

A template of ``.System``, ``.Prompt`` and ``.Response`` describes one turn. Ollama runs it once for each answer of a
conversation, and a last time up to ``.Response``, where the model continues; the Jinja template does the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from outcore.text import shortened

from .syntax import Instruction, LineError

# Most characters of a template.
LONGEST = 1 << 16

# Deepest nesting of conditions; Python limits that of the code that Jinja compiles.
DEEPEST = 20

SPACE = r"[ \t\r\n]"
# An action in braces, with the white space that it trims.
ACTION = re.compile(
    rf"(?:(?<!{SPACE}){SPACE}*\{{\{{-(?={SPACE})|\{{\{{)(.*?)(?:(?<={SPACE})-\}}\}}{SPACE}*|\}}\}})", re.DOTALL
)
FIELD = re.compile(r"\.(System|Prompt|Response)")
IF = re.compile(rf"if (not )?{FIELD.pattern}")


@dataclass(frozen=True)
class GoTemplate:
    """The template of one turn.

    Attributes:
        text: as it stands in the Modelfile.
        body: the same in Jinja, with ``System``, ``Prompt``, ``Response``, and ``mark`` after the first ``.Response``.
    """

    text: str
    body: str

    def jinja(self, begin: str = "") -> str:
        """Returns a chat template for the roles system, user and assistant; ``begin``: the token that the tokenizer
        puts in front of every text, if it does."""
        parts = {"turn": self.body, "mark": _literal(MARK), "begin": _literal(begin)}
        return (CONVERSATION % parts).rstrip("\n")


MARK = "\x02.Response\x03"

# Ollama's rule for templates of one turn (template/template.go, Execute and collate).
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


def parse_template(instruction: Instruction) -> GoTemplate:
    """Parses a template; ``.Response`` is added at the end if it is missing, as in Ollama. Raises ``LineError`` if it
    is invalid, or uses what only Ollama supports."""
    text, at = instruction.value, 0
    if len(text) > LONGEST:
        raise instruction.refused(f"{len(text)} characters; at most {LONGEST}")
    written: list[str] = []  # Jinja that does not depend on its white space options
    opened: list[int] = []  # where open conditions began
    ended = named = False  # .Response was written, or is named

    def error(at: int, why: str) -> LineError:
        return LineError(instruction.line + text.count("\n", 0, at), f"TEMPLATE: {why}")

    if text.find("}}", begin := text.rfind("{{")) < 0 <= begin:
        raise error(begin, "{{ without }}")
    for found in ACTION.finditer(text):
        written.append(_written(text[at : found.start()]))
        at, body = found.end(), " ".join(found[1].split())
        if body.startswith("/*") and body.endswith("*/"):
            continue
        named |= ".Response" in body
        if field := FIELD.fullmatch(body):
            written.append(f"{{{{- {field[1]} -}}}}")
            ended |= field[1] == "Response"
        elif (condition := IF.fullmatch(body)) and len(opened) < DEEPEST:
            opened.append(found.start(1))
            written.append(f"{{%- if {condition[1] or ''}{condition[2]} -%}}")
        elif body == "end" and opened:
            opened.pop()
            written.append("{%- endif -%}")
        else:
            raise error(
                found.start(1),
                f"{{{{ {shortened(body)} }}}}: not supported; use .System, .Prompt, .Response, if, if not and end, "
                f"at most {DEEPEST} deep; or leave TEMPLATE out, to use the model's own chat template",
            )
        # Ollama runs a template for the model's turn up to .Response only.
        if ended:
            written.append("{{- mark -}}")
    written.append(_written(text[at:]))
    if opened:
        raise error(opened[-1], "{{ if }} without {{ end }}")
    if not named:
        written += ["{{- Response -}}", "{{- mark -}}"]
    return GoTemplate(text, "".join(written))


def _written(text: str) -> str:
    return f"{{{{- {_literal(text)} -}}}}" if text else ""


def _literal(text: str) -> str:
    """Returns a Jinja string. Jinja knows JSON's escapes, but not surrogates."""
    return json.dumps(text, ensure_ascii=False)
