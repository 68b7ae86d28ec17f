"""Tools for models whose chat template takes none, or whose form of calls mlx-lm cannot parse: the system message
describes them, and calls and their results are plain text in messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .requests import joined

CALL, CALL_END = "<tool_call>", "</tool_call>"
DESCRIPTION = f"""You can call functions. To call one, write this, with its name and with arguments of its JSON schema:
{CALL}
{{"name": "NAME", "arguments": {{}}}}
{CALL_END}
End your message after the calls; the next one has their results. Without need of a function, answer in plain text.
Functions, one a line:
"""


def read_object(text: str, tools: Any = None) -> Any:
    """Parses the text of a call, with the signature of mlx-lm's parsers."""
    return json.loads(text)


def written_out(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], system: bool
) -> list[dict[str, Any]]:
    """Messages that describe ``tools``, with calls and results as text.

    Args:
        system: the template renders system messages; without them the first message of the user describes the tools.
    """
    made: list[dict[str, Any]] = []
    results = False  # the last message has results
    for message in map(dict, messages):
        result = message["role"] == "tool"
        if result:
            name = f" name={json.dumps(message['name'])}" if message.get("name") else ""
            text = f"<tool_response{name}>\n{message.get('content') or ''}\n</tool_response>"
            message = {"role": "user", "content": text}
        elif calls := message.pop("tool_calls", None):
            said = [{"name": f["name"], "arguments": f.get("arguments") or {}} for f in (c["function"] for c in calls)]
            written = (json.dumps(call, ensure_ascii=False) for call in said)
            texts = [message.get("content") or "", *(f"{CALL}\n{text}\n{CALL_END}" for text in written)]
            message["content"] = "\n".join(filter(None, texts))
        if results and message["role"] == "user":  # many templates need turns that alternate
            made[-1]["content"] = joined([made[-1]["content"], message["content"]], "\n")
        else:
            made.append(message)
            results = result
    if tools:
        role = "system" if system else "user"
        described = DESCRIPTION + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        first = next((m for m in made[: 1 if system else None] if m["role"] == role), None)
        if first is None:
            made.insert(0, {"role": role, "content": described})
        elif system:
            first["content"] = f"{first['content']}\n\n{described}"
        else:
            first["content"] = joined([described, first["content"]], "\n\n")
    return made
