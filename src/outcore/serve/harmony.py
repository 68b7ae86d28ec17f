"""The form of gpt-oss's answers, which mlx-lm does not parse (https://cookbook.openai.com/articles/openai-harmony).

    <|channel|>analysis<|message|>THOUGHT<|end|>
    <|start|>assistant<|channel|>final<|message|>ANSWER
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}

A call ends the answer: its last token is an end-of-text token.
"""

from __future__ import annotations

import re
from typing import Any

from .parsing import Markers

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
