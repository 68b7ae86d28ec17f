"""Modelfiles' templates: what they make of conversations, by hand and by Ollama's rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.modules.mlx_lm_tokenizer import set_chat_template
from outcore_compat.modelfile.options import parse_modelfile
from outcore_compat.modelfile.syntax import Instruction, LineError
from outcore_compat.modelfile.template import GoTemplate, parse_template

CHATML = """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>
"""
LLAMA2 = """[INST] <<SYS>>{{ if .System }}{{ .System }}{{ end }}<</SYS>>

{{ .Prompt }} [/INST] {{ .Response }}</s>
"""
LLAMA3 = """{{ if .System }}<|start_header_id|>system<|end_header_id|>

{{ .System }}<|eot_id|>{{ end }}{{ if .Prompt }}<|start_header_id|>user<|end_header_id|>

{{ .Prompt }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>

{{ .Response }}<|eot_id|>"""
ALPACA = """{{- if .System }}
{{ .System }}
{{ end }}
{{- /* the user's */ -}}
{{ if .Prompt }}
### Instruction:
{{ .Prompt }}
{{ end }}

### Response:
{{ .Response }}
"""
MISTRAL = "[INST] {{ if .System }}{{ .System }} {{ end }}{{ .Prompt }} [/INST]"

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi!"}
HELLO = {"role": "assistant", "content": "Hello."}
AGAIN = {"role": "user", "content": "And {{ you }}?"}


def template(text: str) -> GoTemplate:
    return parse_template(Instruction("template", "", text, 1))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> TokenizerWrapper:
    return load_tokenizer(demo_model)


def render(
    tokenizer: TokenizerWrapper, text: str, *messages: dict[str, str], begin: str = "", more: bool = True
) -> str:
    set_chat_template(tokenizer, template(text).jinja(begin))
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=more))


@pytest.mark.parametrize(
    ("text", "user", "all_four"),
    [
        (
            CHATML,
            "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
            "Hello.<|im_end|>\n<|im_start|>user\nAnd {{ you }}?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA2,
            "[INST] <<SYS>><</SYS>>\n\nHi! [/INST] ",
            "[INST] <<SYS>>Be brief.<</SYS>>\n\nHi! [/INST] Hello.</s>\n"
            "[INST] <<SYS>><</SYS>>\n\nAnd {{ you }}? [/INST] ",
        ),
        (
            LLAMA3,
            "<|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd {{ you }}?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            ALPACA,
            "\n### Instruction:\nHi!\n\n\n### Response:\n",
            "\nBe brief.\n\n### Instruction:\nHi!\n\n\n### Response:\nHello.\n"
            "\n### Instruction:\nAnd {{ you }}?\n\n\n### Response:\n",
        ),
        # Without .Response it is at the end.
        (MISTRAL, "[INST] Hi! [/INST]", "[INST] Be brief. Hi! [/INST]Hello.[INST] And {{ you }}? [/INST]"),
    ],
    ids=["chatml", "llama2", "llama3", "alpaca", "mistral"],
)
def test_common_templates_of_ollama(tokenizer: TokenizerWrapper, text: str, user: str, all_four: str) -> None:
    assert render(tokenizer, text, USER) == user
    assert render(tokenizer, text, SYSTEM, USER, HELLO, AGAIN) == all_four


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("a{{ .Prompt }}", "aHi!"),
        ("  a \n{{- .Prompt -}}\n\t b{{.Response}}x", "  aHi!b"),
        ("  a \n{{- /* c */ -}} {{ .Prompt -}}\n\t b{{.Response}}x", "  aHi!b"),
        ("{{ if not .System }}a{{ end }}{{ .Response }}", "a"),
        ("{{ if .Response }}never{{ end }}{{ .Prompt }}", "Hi!"),
        ("{{ if .Prompt }}{{ .Prompt }}{{ .Response }}x{{ end }}z", "Hi!"),
        ("\\n \"%s\" {% if %} {# #} 'é😀' }} {{ .Response }}", "\\n \"%s\" {% if %} {# #} 'é😀' }} "),
        ("\n\n{{ .Prompt }}\n\n{{ .Response }}", "\n\nHi!\n\n"),
        ("", ""),
    ],
)
def test_go_syntax(tokenizer: TokenizerWrapper, text: str, rendered: str) -> None:
    assert render(tokenizer, text, USER) == rendered


def test_messages_go_into_turns_by_ollamas_rule(tokenizer: TokenizerWrapper) -> None:
    text = "({{ .System }}|{{ .Prompt }}|{{ .Response }})"

    def made(*said: str, more: bool = True) -> str:
        roles = {"s": "system", "u": "user", "a": "assistant"}
        messages = [{"role": roles[word[0]], "content": word} for word in said]
        return render(tokenizer, text, *messages, more=more)

    assert made("u1") == "(|u1|"
    assert made("s1", "u1", "a1", "u2") == "(s1|u1|a1)(|u2|"
    assert made("u1", "u2") == "(|u1\n\nu2|"
    assert made("s1", "s2", "u1") == "(s1\n\ns2|u1|"
    assert made("u1", "a1", "a2", "u2") == "(|u1|a1\n\na2)(|u2|"
    assert made("u1", "s1", "u2") == "(|u1|)(s1|u2|"
    assert made("u1", "a1", "s1", "u2") == "(|u1|a1)(s1|u2|"
    assert made("a1", "u1") == "(||a1)(|u1|"
    # An answer that is begun is gone on with; one that is not, is closed.
    assert made("u1", "a1") == "(|u1|a1"
    assert made("u1", "a1", more=False) == "(|u1|a1)"
    set_chat_template(tokenizer, template(text).jinja())
    begun = [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "a1"}]
    assert tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True) == "(|u1|a1"


def test_the_token_that_texts_begin_with_stands_there_once(tokenizer: TokenizerWrapper) -> None:
    assert render(tokenizer, "a{{ .Prompt }}", USER, begin="<s>") == "<s>aHi!"
    assert render(tokenizer, "<s>a{{ .Prompt }}", USER, begin="<s>") == "<s>aHi!"


@pytest.mark.parametrize("message", [{"role": "tool", "content": "x"}, {"role": "user", "content": [{"type": "text"}]}])
def test_messages_that_a_template_has_no_place_for_are_refused(tokenizer: TokenizerWrapper, message: dict) -> None:
    with pytest.raises(Exception, match="TEMPLATE"):
        render(tokenizer, CHATML, USER, message)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\n{{ .Tools }}", "line 4: TEMPLATE: {{ .Tools }}: not supported; use .System, .Prompt, .Response"),
        ("{{ range .Messages }}{{ end }}", "line 3: TEMPLATE: {{ range .Messages }}"),
        ("\n\n{{ if .Messages }}{{ end }}", "line 5: TEMPLATE: {{ if .Messages }}"),
        ("{{ if eq .Prompt .System }}{{ end }}", "line 3: TEMPLATE: {{ if eq .Prompt .System }}"),
        ("{{ .Prompt | json }}", "line 3: TEMPLATE: {{ .Prompt | json }}"),
        ("{{ Prompt }}", "line 3: TEMPLATE: {{ Prompt }}"),
        ("{{ .prompt }}", "line 3: TEMPLATE: {{ .prompt }}"),
        ("{{ .Prompt.__class__ }}", "line 3: TEMPLATE: {{ .Prompt.__class__ }}"),
        ("{{}}", "line 3: TEMPLATE: {{  }}"),
        ("{{-.Prompt}}", "line 3: TEMPLATE: {{ -.Prompt }}"),
        ("a\n{{ .Prompt }", "line 4: TEMPLATE: {{ without }}"),
        ("\n{{ if .Prompt }}\n", "line 4: TEMPLATE: {{ if }} without {{ end }}"),
        ("{{ end }}", "line 3: TEMPLATE: {{ end }}"),
        ("{{ if .Prompt }}{{ else }}{{ end }}", "line 3: TEMPLATE: {{ else }}"),
        ("{{ if }}{{ end }}", "line 3: TEMPLATE: {{ if }}"),
        ("{{ if .Prompt .System }}{{ end }}", "line 3: TEMPLATE: {{ if .Prompt .System }}"),
        ("{{ if (.Prompt }}{{ end }}", "line 3: TEMPLATE: {{ if (.Prompt }}"),
        ("{{ if .Prompt }}" * 21, "line 3: TEMPLATE: {{ if .Prompt }} ... at most 20 deep"),
        ("{{ if and .System .Prompt }}{{ end }}", "line 3: TEMPLATE: {{ if and .System .Prompt }}"),
        ("{{ if " + "(" * 40000 + " }}", "line 3: TEMPLATE: {{ if ("),
        ("a" * 70000, "line 3: TEMPLATE: 70000 characters; at most 65536"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(LineError) as e:
        parse_modelfile(f'FROM a\n\nTEMPLATE """{text}"""\n')
    begin, _, end = told.partition(" ... ")
    assert str(e.value).startswith(begin) and end in str(e.value)


def test_the_largest_template_is_compiled_in_no_time(tokenizer: TokenizerWrapper) -> None:
    deep = "{{ if .Prompt }}" * 20 + "x" + "{{ end }}" * 20 + "{{ .Prompt }}{{ if .System }}{{ end }}" * 100
    assert render(tokenizer, deep, USER) == "x" + "Hi!" * 100
