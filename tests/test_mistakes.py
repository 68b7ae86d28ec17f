"""The twenty likeliest mistakes of someone new: each gives one line that names the cause and what to do next."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outcore.cli.main import main

MISTAKES = {
    # What other programs have.
    "run M": (2, "no command 'run'; outcore chat MODEL talks with a model"),
    "download own/name": (2, "no command 'download'; outcore pull MODEL"),
    "generate M -p hi --temperature 0.5": (2, "did you mean --temp?"),
    "generate M -p hi --n-predict 9": (2, "did you mean --max-tokens?"),
    "chat M -c 4096": (2, "no flag -c (did you mean --context?)"),
    "generate M -p hi --ctx-size=4096": (2, "no flag --ctx-size (did you mean --max-kv-size?)"),
    "generate M -f prompt.txt": (2, "no flag -f; leave --prompt out and pipe the file in: < FILE"),
    "generate M -p hi --stream": (2, "no flag --stream; answers are shown as they come"),
    "chat M --verbose": (2, "no flag --verbose; --log-level INFO tells more"),
    "chat M -p hi": (2, "no flag -p; outcore generate MODEL -p PROMPT answers one prompt"),
    "serve M -p 8080": (2, "no flag -p (did you mean --port?)"),
    "serve M --api-key secret123": (2, "no flag --api-key; write the key into a file (chmod 600) and give --api-key-f"),
    "serve M --api-key=secret123": (2, "give --api-key-file FILE, or set OUTCORE_API_KEY"),
    # What goes where.
    "generate -p hi": (2, "no model: give --model NAME (outcore list shows those that are here)"),
    "chat": (2, ", such as outcore chat mlx-community/Qwen3-8B-4bit; see"),
    "generate M": (2, "no prompt: give --prompt TEXT, or pipe text in"),
    "generate M -p hi --max-tokens 0": (2, "--max-tokens 0: give at least 1"),
    "chat M hello": (2, "'hello' is not expected here; outcore generate MODEL --prompt PROMPT answers one prompt"),
    "generate M hello": (2, "'hello' is not expected here; a prompt goes after --prompt"),
    "generate --model M hello": (2, "give only one model; a prompt goes after --prompt"),
    "generate -m M -p hi": (2, "; a model goes after --model"),
    # The dial.
    "generate M -p hi --memory 4": (2, "--memory 4: no unit; write 4GB or 4GiB"),
    "generate M -p hi --memory 1MB": (1, "; a shorter prompt or fewer --max-tokens need less"),
    "generate M -p hi --memory 900TB": (1, "leave --memory out to use what is free"),
    # The model.
    "generate ./modle -p hi": (1, "'./modle': no such folder; check the path, or name a Hub model"),
    "generate llama3 -p hi": (1, "'llama3': is neither a folder here nor found on the Hub; Hub names are OWNER/NAME, "),
    "chat llama3:8b": (1, "Hub names are OWNER/NAME, such as mlx-community/Qwen3-8B-4bit; outcore list shows what is "),
    "generate https://huggingface.co/own/name -p hi": (1, "a web address; give the model's name: own/name"),
    "generate own/name-GGUF -p hi": (1, "get the model's MLX version, such as from mlx-community on the Hub"),
    "info M/model.safetensors": (1, "a file; give its folder instead: "),
    "chat models": (1, "no config.json here; a model folder holds config.json, model*.safetensors"),
    "generate half -p hi": (1, "half-downloaded"),
    "serve bare --port 0": (1, "bare: no tokenizer.json here; download it again"),
    "generate M -p hi --draft ngrm": (2, "no such folder; did you mean ngram?"),
    # The server.
    "serve M --port TAKEN": (1, "Address already in use; outcore ps lists your servers, --port 0 picks a free port"),
    "serve M --host 0.0.0.0": (2, "give --api-key-file FILE, set OUTCORE_API_KEY, or allow it with --insecure"),
}


@pytest.fixture(scope="module")
def place(quick_models: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model in ``models``, half of one, and one without a tokenizer."""
    place, model = tmp_path_factory.mktemp("mistakes"), quick_models(2)
    for name in ("models/M", "half", "bare"):
        shutil.copytree(model, place / name)
    os.truncate(place / "half" / "model.safetensors", 1_000_000)
    (place / "bare" / "tokenizer.json").unlink()
    yield place


@pytest.mark.parametrize("line", MISTAKES)
def test_one_line_names_the_cause_and_what_to_do(
    line: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, says = MISTAKES[line]
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = line.replace("TAKEN", str(taken.getsockname()[1])).replace(" M", " models/M")
        assert main(shlex.split(words)) == status
    out, err = capsys.readouterr()
    assert out == "" and "secret123" not in err and err.count("\n") == 1 and says in err, err
    assert err.startswith("outcore") and "Traceback" not in err and "bug" not in err


EARLY = "generate M -p hi --max-tokens 0", "generate ./modle -p hi", "chat llama3:8b"


@pytest.mark.parametrize("line", EARLY)
def test_what_needs_no_model_is_refused_before_mlx_is_imported(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.cli.main._work", lambda *_: pytest.fail("imported"))
    assert main(shlex.split(line)) == MISTAKES[line][0]
