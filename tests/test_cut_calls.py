"""A call of a tool that ``max_tokens`` cuts: of a served model nothing of it is told."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from chat_tokenizers import HERMES
from outcore.serve.events import Called, Ended, GenerationRequest
from test_service import heard, serving, text_of

HI = [{"role": "user", "content": "hi"}]


def test_a_served_models_call_is_reported_when_it_is_whole_and_not_before(
    quick_models: Callable[..., Path], tmp_path: Path
) -> None:
    """A call that the model has to make, with fewer tokens than it takes."""
    folder = shutil.copytree(quick_models(2), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(HERMES)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [0, 2]}))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    tool["function"]["parameters"]["additionalProperties"] = False
    ask = GenerationRequest(messages=tuple(HI), tools=(tool,), tool_choice="look", max_tokens=60)
    with serving(folder, memory="60MB") as service:
        whole = asyncio.run(heard(service, ask))
        (call,), (end,) = ([e for e in whole if isinstance(e, kind)] for kind in (Called, Ended))
        assert (call.name, end.reason) == ("look", "tool_calls") and not text_of(whole)
        for tokens in (1, end.tokens // 2, end.tokens - 2):
            said = asyncio.run(heard(service, replace(ask, max_tokens=tokens)))
            assert not text_of(said) and not any(isinstance(e, Called) for e in said)
            assert [e.reason for e in said if isinstance(e, Ended)] == ["length"]
