"""``outcore cache-prompt``: the file that ``mlx_lm.cache_prompt`` writes, byte for byte, and whole or not at all."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm.cache_prompt
import pytest
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

import outcore
from outcore.checkpoint import prompt_cache
from outcore.checkpoint.prompt_cache import PromptCacheFile
from outcore.cli.main import main

PROMPT = "def add(a, b):\n    return a + b\n\n\nclass A:\n"


@pytest.fixture(scope="module")
def quick(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent layer, and one with attention."""
    folder = tmp_path_factory.mktemp("cache-prompt") / "quick"
    shutil.copytree(quick_models(2), folder)
    shutil.copy(demo_model / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module")
def least(quick: Path) -> str:
    """A budget that does not hold all layers."""
    return f"{outcore.plan_model(quick, memory='1GB').smallest_budget_bytes}B"


def theirs(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    """``mlx_lm.cache_prompt``, as it is."""
    monkeypatch.setattr(sys, "argv", ["cache_prompt", *args])
    mlx_lm.cache_prompt.main()


@pytest.mark.parametrize(
    ("prompt", "flags"),
    [
        (PROMPT, []),
        ("-", []),
        (PROMPT, ["--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", "8"]),
        (PROMPT, ["--max-kv-size", "16"]),
    ],
)
def test_the_file_is_mlx_lms_own_though_weights_are_streamed(
    prompt: str, flags: list[str], quick: Path, least: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A name without its ending is completed, as MLX does.
    given = ["--model", str(quick), "--prompt", prompt, *flags, "--prompt-cache-file"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    theirs(monkeypatch, *given, str(tmp_path / "theirs"))
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(["cache-prompt", *given, str(tmp_path / "ours"), "--memory", least, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert not any("quantized" in note for note in record["notes"])
    assert record["streamed_units"] > 0 and record["file"] == str(tmp_path / "ours.safetensors")
    ours = (tmp_path / "ours.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes() and record["bytes"] == len(ours)
    assert {p.name for p in tmp_path.iterdir()} >= {"ours.safetensors", "theirs.safetensors"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_generate_goes_on_from_it_as_from_mlx_lms(
    quick: Path, least: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "c.safetensors")
    model = ["--model", str(quick)]
    assert main(["cache-prompt", *model, "--prompt", PROMPT, "--prompt-cache-file", file, "--memory", least]) == 0
    capsys.readouterr()
    asked = [*model, "--prompt", "go on", "--prompt-cache-file", file, "-m", "5"]
    assert main(["generate", *asked, "--memory", least, "--json", "--verbose", "F"]) == 0
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    said: list[int] = []
    module = sys.modules["mlx_lm.generate"]
    plain = module.stream_generate

    def heard(*args: Any, **kwargs: Any) -> Any:
        for response in plain(*args, **kwargs):
            said.append(response.token)
            yield response

    monkeypatch.setattr(module, "stream_generate", heard)
    monkeypatch.setattr(sys, "argv", ["generate", *asked, "--verbose", "F"])
    module.main()
    assert ours["tokens"] == said and len(said) == 5


def test_nothing_stays_of_one_that_was_broken_off_and_what_was_there_stays(
    quick: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out" / "c.safetensors"
    file.parent.mkdir()
    save_prompt_cache(str(file), [KVCache()], {"model": "before"})
    before = file.read_bytes()

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prompt_cache, "save_prompt_cache", broken)
    args = ["cache-prompt", "--model", str(quick), "--prompt", "x", "--prompt-cache-file", str(file)]
    assert main(args) == 130
    assert [p.name for p in file.parent.iterdir()] == ["c.safetensors"] and file.read_bytes() == before


def test_while_it_is_written_it_has_another_name_that_goes(tmp_path: Path) -> None:
    target = tmp_path / "there.safetensors"
    save_prompt_cache(str(target), [KVCache()], {"model": "old"})
    link = tmp_path / "link.safetensors"
    link.symlink_to(target)
    with PromptCacheFile(str(link)) as file:
        assert len(list(tmp_path.iterdir())) == 3
        file.save([KVCache()], "m", {})
    assert {p.name for p in tmp_path.iterdir()} == {"there.safetensors", "link.safetensors"} and link.is_symlink()
    assert load_prompt_cache(str(target), return_metadata=True)[1]["model"] == "m"
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()
    with pytest.raises(ZeroDivisionError), PromptCacheFile(str(tmp_path / "new")):
        raise ZeroDivisionError
    assert len(list(tmp_path.iterdir())) == 2


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    quick: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.decode.loader.load_model", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "folder.safetensors").mkdir()
    for name, says in ((tmp_path / "no" / "c", "No such file"), (tmp_path / "folder", "not a prompt cache")):
        args = ["cache-prompt", "--model", str(quick), "--prompt", "x", "--prompt-cache-file", str(name)]
        assert main(args) == 2
        out, err = capsys.readouterr()
        assert says in err and out == "" and err.count("\n") == 1


def test_what_is_no_prompt_cache_is_not_written_over(quick: Path, tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "model"
    shutil.copytree(quick, own)
    weights = own / "model.safetensors"
    before = weights.read_bytes()
    assert main(["cache-prompt", str(own), "--prompt", "x", "--prompt-cache-file", str(weights)]) == 2
    assert "not a prompt cache; give another name" in capsys.readouterr().err
    assert weights.read_bytes() == before


def test_generate_takes_the_model_from_the_file_and_the_folder_however_it_is_spelled(
    quick: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "c.safetensors")
    assert main(["cache-prompt", "--model", str(quick), "-p", PROMPT, "--prompt-cache-file", file]) == 0
    (tmp_path / "link").symlink_to(quick)
    monkeypatch.chdir(quick)
    monkeypatch.setenv("OUTCORE_MODEL", "an/other")
    capsys.readouterr()
    asked = ["generate", "--prompt-cache-file", file, "-p", "x", "-m", "2", "--json"]
    said = set()
    for name in (None, f"{quick}/", ".", str(tmp_path / "link")):
        assert main([*asked, *([] if name is None else ["--model", name])]) == 0, name
        said.add(json.loads(capsys.readouterr().out)["text"])
    assert len(said) == 1
    assert main([*asked, "--model", str(tmp_path)]) == 2
    assert f"made with {quick}, not with {tmp_path}" in capsys.readouterr().err


def test_a_file_that_names_no_model_needs_one(quick: Path, tmp_path: Path, capsys: Any) -> None:
    file = str(tmp_path / "c.safetensors")
    assert main(["cache-prompt", "--model", str(quick), "-p", PROMPT, "--prompt-cache-file", file]) == 0
    save_prompt_cache(file, load_prompt_cache(file), {"tokenizer_config": "{}"})
    assert main(["generate", "--prompt-cache-file", file, "-p", "x"]) == 2
    assert "names no model; give --model NAME" in capsys.readouterr().err
