"""Files that an earlier Outcore wrote, in ``kept`` (made by ``make_kept.py``): read as they were meant, or refused by a
version; never a wrong token. Copies in which something was changed are refused by their name."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import outcore

KEPT = Path(__file__).parent / "kept"
TEXTS = json.loads((KEPT / "texts.json").read_text())
PROMPT = [1 + 7 * n % 60 for n in range(30)]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy of all of it, with the times that the model's files had."""
    folder = Path(shutil.copytree(KEPT, tmp_path / "kept"))
    for name, at in TEXTS["mtime_ns"].items():
        os.utime(folder / "model" / name, ns=(at, at))
    return folder


@pytest.mark.parametrize("name", ["packed", "compact"])
def test_a_packed_copy_has_the_bits_of_its_model(name: str, kept: Path, models: Any, load: Any) -> None:
    expected = models.theirs(kept / "model", PROMPT, 8)
    for resident in (0, 1, None):
        assert models.ours(load(kept / name, resident=resident), PROMPT, 8) == expected


@pytest.mark.parametrize("name", ["packed", "compact"])
def test_a_packed_copy_of_a_later_schema_or_with_another_byte_is_refused(name: str, kept: Path, load: Any) -> None:
    manifest, layer = kept / name / "manifest.json", kept / name / "layer_0001.safetensors"
    was = manifest.read_text()
    document = json.loads(was)
    manifest.write_text(json.dumps(document | {"schema": 99}))
    with pytest.raises(outcore.OutcoreError, match=r"manifest\.json"):
        load(kept / name, resident=0)
    manifest.write_text(was)
    data = bytearray(layer.read_bytes())
    data[-4097] ^= 1
    layer.write_bytes(data)
    with pytest.raises(outcore.OutcoreError, match=r"layer_0001\.safetensors"):
        load(kept / name, resident=0)


def test_a_prompt_cache_goes_on_as_one_that_is_made_now(
    kept: Path, outcore_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kept)
    few = ["--model", "model", "--memory", "1GB", "--resident", "0"]
    status, *_ = outcore_here("cache-prompt", *few, "-p", TEXTS["prompt"], "--prompt-cache-file", "now.safetensors")
    assert status == 0
    said = []
    for name in ("prompt.safetensors", "now.safetensors"):
        words = ["generate", *few, "--prompt-cache-file", name, "-p", "w7 w8", "-m", "6", "--draft", "none", "--json"]
        status, out, err = outcore_here(*words)
        assert status == 0, err
        said.append(json.loads(out)["tokens"])
    assert said[0] == said[1] and len(said[0]) > 0


def test_a_conversation_goes_on_as_if_it_had_never_been_left(
    kept: Path, outcore_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kept)

    def run(say: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(say))
        found: tuple[int, str, str] = outcore_here(*words)
        return found

    words = ["chat", "--model", "model", "--memory", "1GB", "--resident", "0", "--draft", "none", "-m", "6"]
    document = json.loads((kept / "conversation.json").read_text())
    (kept / "later.json").write_text(json.dumps(document | {"schema": 99}))
    status, out, err = run("/load later.json\nw1 w2 w3\nw4 w5\nw6 w7\nq\n")
    assert status == 0 and "later.json" in out + err and "schema" in out + err
    status, again, err = run("/load conversation.json\nw6 w7\nq\n")
    assert status == 0 and again.splitlines()[-1] == out.splitlines()[-1], err


def test_prompts_that_were_kept_are_found_or_computed_again(
    kept: Path, outcore_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names have the versions of MLX and of this machine in them, so elsewhere nothing is found."""
    how: dict[str, Any] = {"resident": 0, "memory": "1GB", "draft": "none", "context": 1024}
    monkeypatch.setenv("OUTCORE_CACHE", str(kept / "cache"))
    answers = []
    for prefix_cache in ("off", "on"):
        model, tokenizer = outcore.load(str(kept / "model"), prefix_cache=prefix_cache, **how)
        with model.outcore as session:
            asked = tokenizer.apply_chat_template(
                [{"role": "user", "content": TEXTS["long"]}], add_generation_prompt=True, return_dict=False
            )
            said = [r.token for r in outcore.stream_generate(model, tokenizer, asked, max_tokens=6)]
            answers.append(said)
            assert prefix_cache == "off" or session.metrics.prompt_found in (0, len(asked)), (
                session.metrics.prompt_found
            )
    assert answers[0] == answers[1]
    assert list((kept / "cache").rglob("*.kv")), "what is whole stays"
