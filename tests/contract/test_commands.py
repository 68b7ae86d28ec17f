"""What scripts rely on of ``outcore COMMAND``: exit statuses, the keys of ``--json`` (golden/commands.json), and that
standard output has the answer, or one JSON document, and nothing else. By ``python -m outcore``, here or in a process
of its own."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import json_shapes as shapes
import pytest
from huggingface_hub import constants

COMMANDS = {
    "batch", "bench", "cache", "cache-prompt", "calibrate", "chat", "completion", "convert", "demo", "doctor", "draft",
    "embed", "generate", "info", "launch", "list", "matrix", "monitor", "pack", "perplexity", "plan", "ps", "pull",
    "report", "serve", "stop",
}  # fmt: skip

GENERATE = {
    "text", "prompt_tokens", "generation_tokens", "prompt_tps", "generation_tps", "ttft_s", "finish_reason",
    "bytes_read", "read_gbps", "stall_s", "resident_units", "streamed_units", "slots",
    "peak_memory_bytes", "peak_rss_bytes", "budget_bytes", "tokens",
}  # fmt: skip
"""At least; and forward passes, by that name or as ``sweeps``."""

PLAN = {
    "predicted_tps", "predicted_ttft_s", "predicted_peak_bytes", "smallest_budget_bytes", "resident_units",
    "streamed_units", "slots", "bytes_per_token", "curve",
}  # fmt: skip

Run = Callable[..., tuple[Any, str, str]]

STREAMED = ["--memory", "300MB", "--resident", "1"]


@pytest.fixture(scope="module")
def small(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three layers and a chat template."""
    folder = tmp_path_factory.mktemp("commands") / "model"
    shutil.copytree(quick_models(3), folder)
    shutil.copy(demo_model / "chat_template.jinja", folder)
    return str(folder)


def one_document(out: str) -> Any:
    assert out.endswith("\n") and out.count("\n") == 1, "one line"
    return json.loads(out)


def test_the_commands_are_these(outcore_here: Run) -> None:
    status, out, _ = outcore_here("--help")
    assert status == 0
    listed = out[out.index("Run language models") : out.index("outcore help COMMAND")]
    assert set(re.findall(r"^  ([a-z][a-z-]+)  ", listed, re.MULTILINE)) == COMMANDS
    status, out, _ = outcore_here("--version")
    assert status == 0 and re.fullmatch(r"outcore \d+\.\d+\.\d+\S*\n", out)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_wrong_usage_is_2_and_one_line(command: str, outcore_here: Run) -> None:
    status, out, err = outcore_here(command, "--nonsense")
    assert (status, out) == (2, "") and err.count("\n") == 1 and f"outcore {command}: " in err
    status, out, err = outcore_here(command, "--nonsense", "--json")
    told = one_document(out)
    assert status == told["exit_status"] == 2 and told["error"] in err


@pytest.mark.parametrize("command", ["generate", "plan", "batch", "pack", "perplexity", "cache-prompt"])
def test_what_fails_is_1_and_one_line_that_names_it(command: str, outcore_here: Run, tmp_path: Path) -> None:
    more = {
        "generate": ["-p", "x"],
        "batch": ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")],
        "cache-prompt": ["-p", "x", "--prompt-cache-file", str(tmp_path / "file")],
        "perplexity": ["--data-path", str(tmp_path / "in")],
    }
    (tmp_path / "in").write_text('{"custom_id": "a"}\n')
    (tmp_path / "model").mkdir()
    status, out, err = outcore_here(command, "--model", str(tmp_path / "model"), *more.get(command, []))
    assert (status, out) == (1, "") and str(tmp_path / "model") in err and "Traceback" not in err
    status, out, _ = outcore_here(command, "--model", str(tmp_path / "model"), *more.get(command, []), "--json")
    assert status == one_document(out)["exit_status"] == 1


def test_a_budget_that_is_too_small_is_1_and_names_the_smallest_that_works(outcore_here: Run, small: str) -> None:
    words = ["generate", small, "-p", "x", "-m", "1", "--ignore-chat-template"]
    status, out, err = outcore_here(*words, "--memory", "1MB")
    found = re.search(r"smallest that works is ([\d.]+ [MG]B)", err)
    assert (status, out) == (1, "") and found is not None
    status, out, _ = outcore_here(*words, "--memory", found[1].replace(" ", ""), "--json")
    record = one_document(out)
    assert status == 0 and record["peak_memory_bytes"] <= record["budget_bytes"]


def test_the_answer_alone_is_on_standard_output(outcore_here: Run, small: str) -> None:
    words = ["generate", small, "-p", "def add(a, b):", "-m", "8", *STREAMED]
    status, out, err = outcore_here(*words)
    record = one_document(outcore_here(*words, "--json")[1])
    assert status == 0 and record["text"] in out and "Streaming" not in out and "budget" in err and "Streaming" in err
    quiet = outcore_here(*words, "--quiet", "--verbose", "F")
    assert quiet[0] == 0 and quiet[1] == record["text"] + "\n"
    assert len(record["tokens"]) == record["generation_tokens"] == 8


def test_the_keys_of_each_commands_json(
    outcore_here: Run, small: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = small, dict[str, Any]()
    (tmp_path / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x = ", "max_tokens": 4}}\n'
        '{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", '
        '"body": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}}\n'
        '{"custom_id": "c", "method": "POST", "url": "/v1/nowhere", "body": {}}\n'
    )
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n" * 40)
    answers = tmp_path / "out.jsonl"
    words = {
        "generate": [model, "-p", "x = ", "-m", "4", *STREAMED],
        "generate.drafted": [model, "-p", "x = ", "-m", "4", *STREAMED, "--draft", "ngram"],
        "plan": [model, "--memory", "60MB", "--no-calibrate"],
        "batch": [model, "-i", str(tmp_path / "in.jsonl"), "-o", str(answers), *STREAMED],
        "cache-prompt": [model, "-p", "x = ", "--prompt-cache-file", str(tmp_path / "p"), *STREAMED],
        "pack": [model, "--output", str(tmp_path / "packed")],
        "perplexity": [
            *[model, "--data-path", str(tmp_path / "text"), *STREAMED],
            *["--sequence-length", "16", "--num-samples", "2", "--batch-size", "2"],
        ],
        "cache": ["ls"],
        "demo": ["-m", "2", "-p", "x"],
        "info": [str(demo_model), "--memory", "60MB"],  # of weights in several types
        "list": [],
    }
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, given in words.items():
        status, out, _ = outcore_here(name.partition(".")[0], *given, "--json")
        assert status == (1 if name == "batch" else 0), name  # one of its lines fails
        found[name] = shapes.shape(one_document(out)) if out else None
    assert {"forward_passes", "sweeps"} & set(found["generate"])
    assert set(found["generate"]) >= GENERATE and set(found["plan"]) >= PLAN
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    found["batch.answers"] = {each["custom_id"]: shapes.shape(each) for each in lines}
    for name in ("machine", "rows"):
        found["perplexity"][name] = "a machine's own"
    shapes.same("commands", found, loose=True)


def test_ctrl_c_is_130(small: str) -> None:
    words = ["generate", small, "-p", "x = ", "-m", "9000", *STREAMED, "--json"]
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here would be ignored there
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "outcore", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.stderr is not None
    child.stderr.readline()  # how it is held in memory: it is about to write
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in err
    assert one_document(out)["exit_status"] == 130
