"""Tokenizers of the demo model with other chat templates: as small as can be, and of the forms that real ones have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

GENERATION = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

PLAIN = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}"""

HERMES = (
    """{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for tool_call in m.tool_calls %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>{# tool_call.name #}{% endfor %}<|im_end|>
{% endfor %}"""
    + GENERATION
)
"""JSON between tags."""

OPENED = HERMES + "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}"
"""And what is thought is opened by the prompt."""

CLOSED = HERMES + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"

ELEMENTS = HERMES.replace(
    """{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}""",
    """<function={{ tool_call.function.name }}>
{% for name, value in tool_call.function.arguments.items() %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>""",
).replace("{# tool_call.name #}", "{# <tool_call>\n<function= #}")
"""Qwen3-Coder's."""

STRICT = (
    """{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}"""
    + GENERATION
)
"""Gemma's."""

HEADERS = (
    """{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}{%- if m.tool_calls %}
{%- for call in m.tool_calls %}{%- if call.id | length != 9 %}{{ raise_exception('ids of length 9') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments }}{% endfor %}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.content }}
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
    + GENERATION
)
"""Mistral's: short ids, arguments as a string."""

HARMONY = """{%- for m in messages %}<|start|>{{ m.role }}{% for call in m.tool_calls %} to=functions.
{{- call.function.name }}<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>
{%- else %}<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""gpt-oss's."""
HARMONY_TOKENS = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"


def chat_tokenizer(model: Path, folder: Path, template: str, tokens: tuple[str, ...] = ()) -> TokenizerWrapper:
    """A tokenizer.

    Args:
        model: the demo model. folder: for the files that differ.
        tokens: further ones, from 8192 on.
    """
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(model / name, folder)
    made = json.loads((model / "tokenizer.json").read_text())
    for token in tokens:
        made["added_tokens"].append(
            {"id": 8192 + tokens.index(token), "content": token, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": token.startswith("[")}
        )  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    found: TokenizerWrapper = load_tokenizer(folder)
    return found
