"""The command line as its user meets it: what is printed where, exit statuses, bad input, Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

import outcore
import zoo
from interrupts import heard
from outcore.cli.main import main
from outcore_tools.demo import DEMO_PACKAGE as PACKAGE

PROMPT = ["-p", "def read_lines(path):", "--ignore-chat-template"]
STREAMED = ["--memory", "300MB", "--resident", "1"]


@pytest.fixture(scope="module")
def quick(quick_models: Callable[[int], Path]) -> Path:
    return quick_models(3)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(args)
    out = capsys.readouterr()
    return status, out.out, out.err


def test_generate_prints_text_and_a_summary(capsys: pytest.CaptureFixture[str], quick: Path) -> None:
    status, out, err = run(capsys, "generate", "--model", str(quick), *STREAMED, *PROMPT, "-m", "6", "--json")
    assert status == 0
    model, tokenizer = mlx_lm.load(str(quick))
    expected = mlx_lm.generate(model, tokenizer, "def read_lines(path):", max_tokens=6)
    assert expected in err
    record = json.loads(out)
    assert record["text"] == expected
    # The text's own repetitions are followed where something is streamed.
    assert record["generation_tokens"] == len(record["tokens"]) == record["sweeps"] + record["accepted_tokens"] == 6
    assert record["streamed_units"] > 0 and record["bytes_read"] > 0 and record["read_gbps"] > 0
    assert record["peak_memory_bytes"] > 0 and record["budget_bytes"] == 300_000_000
    rates = {"prompt_tps", "generation_tps", "ttft_s", "stall_s"}
    counts = {"prompt_tokens", "finish_reason", "resident_units", "slots", "peak_rss_bytes"}
    assert rates | counts <= record.keys()
    assert "tokens per second" in err and "GB/s" in err and "of 300 MB budget" in err


def test_verbose_false_prints_the_answer_alone(capsys: pytest.CaptureFixture[str], quick: Path) -> None:
    status, out, err = run(capsys, "generate", "--model", str(quick), *PROMPT, "-m", "3", "--verbose", "F")
    assert (status, err) == (0, "")
    assert out.count("\n") == 1 or out.endswith("\n")


def test_info_reads_no_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header:] = os.urandom(len(data) - header)
    file.write_bytes(data)
    status, out, err = run(capsys, "info", str(folder), "--memory", "5MB", "--context", "64", "--json")
    assert status == 0
    record = json.loads(out.splitlines()[-1])
    assert record["layers"] == record["streamable_layers"] == 4
    assert record["weight_bytes"] == record["checkpoint_bytes"]
    assert "smallest budget" in err and "all resident from" in err


def test_pack_then_generate_from_the_copy(capsys: pytest.CaptureFixture[str], quick: Path, tmp_path: Path) -> None:
    copy = tmp_path / "packed"
    status, out, _ = run(capsys, "pack", str(quick), "--output", str(copy))
    assert status == 0 and str(copy) in out and "already there" not in out
    status, out, _ = run(capsys, "pack", str(quick), "--output", str(copy))
    assert status == 0 and "already there; --force writes it again" in out
    args = [*PROMPT, "-m", "4", *STREAMED, "--json"]
    texts = []
    for model in (quick, copy):
        status, out, _ = run(capsys, "generate", "--model", str(model), *args)
        record = json.loads(out.splitlines()[-1])
        assert status == 0 and record["streamed_units"] > 0
        texts.append(record["tokens"])
    assert texts[0] == texts[1]


def test_demo_checks_its_own_tokens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore_tools import demo

    real, results = demo._run, list[dict[str, Any]]()

    def kept(*args: Any) -> dict[str, Any]:
        results.append(real(*args))
        return results[-1]

    monkeypatch.setattr(demo, "_run", kept)
    status, out, _ = run(capsys, "demo", "-m", "2", "-p", "def", "--json")
    assert status == 0
    record = json.loads(out.splitlines()[-1])
    assert record["same_tokens"]
    peaks = [record[way]["peak_memory_bytes"] for way in ("streamed", "resident")]
    assert peaks[0] < record["weight_bytes"] < peaks[1]
    assert record["streamed"]["sweeps"] == 2 and record["resident"]["sweeps"] == 0
    assert record["streamed"]["tokens_a_pass"] == 1 <= record["drafted"]["tokens_a_pass"]
    assert record["drafted"]["peak_memory_bytes"] < record["weight_bytes"]
    assert (record["streamed"]["drafter"], record["drafted"]["drafter"]) == ("none", "drafter")
    assert all(record[way]["tps"] > 0 for way in ("streamed", "drafted", "resident"))
    assert 0 <= record["streamed"]["waiting"] <= 1 and record["resident"]["waiting"] == 0
    # Where they differ, it fails.
    results[0]["tokens"] = [*results[0]["tokens"][:-1], results[0]["tokens"][-1] + 1]
    monkeypatch.setattr(demo, "_run", lambda *_: results.pop(0))
    status, out, err = run(capsys, "demo", "-m", "2", "-p", "def")
    assert status == 1 and "NO" in out and "tokens differ" in err


def test_demo_without_its_model_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    status, out, err = run(capsys, "demo")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "pip install outcore-demo-model" in err and "pip install ./demo-model" in err


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--help")[0] == 0
    assert run(capsys)[0] == 2
    for words in (("generat",), ("help", "generat")):
        status, _, err = run(capsys, *words)
        assert status == 2 and "did you mean generate?" in err


@pytest.mark.parametrize("command", ["help", "generate", "report"])
def test_help_of_a_command_is_its_own(capsys: pytest.CaptureFixture[str], command: str) -> None:
    main([command, "--help"] if command != "help" else ["--help"])
    own = capsys.readouterr().out
    assert main(["help", command]) == 0
    assert capsys.readouterr().out == own != ""


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["--memory", "900TB"], 1, "larger than what there is"),
        (["--memory", "2MB"], 1, "smallest that works"),
        (["--resident", "99", "--memory", "300MB"], 2, "3 layers"),
        (["--io", "fast"], 2, "auto, direct, cached"),
        (["--dtype", "int8"], 2, "float32"),
        (["-m", "0"], 2, "give at least 1, or -1"),
        (["--prefill-step-size", "0", "--memory", "300MB"], 2, "at least 1"),
        (["--adapter-path", "nowhere"], 1, "nowhere"),
        (["--prompt-cache-file", "nowhere.safetensors"], 2, "nowhere"),
    ],
)
def test_bad_arguments_give_one_line(
    capsys: pytest.CaptureFixture[str], quick: Path, args: list[str], status: int, says: str
) -> None:
    prompt = ["-p", "hi", "-m", "3"] if "-m" not in args else ["-p", "hi"]
    got, out, err = run(capsys, "generate", "--model", str(quick), *prompt, *args)
    assert (got, out) == (status, "")
    assert says in err and err.count("\n") == 1, err


@pytest.fixture
def broken(quick: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quick, tmp_path / "broken"))


def changed(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | {k: v for k, v in values.items() if k in config["text_config"]}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text} | values))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: os.truncate(folder / "model.safetensors", 3_000_000), "half-downloaded"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: changed(folder, model_type="no_such_type"), "no_such_type"),
        (lambda folder: changed(folder, intermediate_size=512), "could not make a model"),
    ],
)
def test_a_broken_model_is_one_line(
    how: Callable[[Path], Any], says: str, capsys: pytest.CaptureFixture[str], broken: Path
) -> None:
    how(broken)
    for command in (["generate", "-p", "hi", "--model"], ["info"], ["pack"]):
        status, _, err = run(capsys, *command, str(broken))
        assert status == 1 and says in err and err.count("\n") == 1, err


def test_a_model_without_a_tokenizer_is_refused_alike_everywhere(
    capsys: pytest.CaptureFixture[str], broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would make a tokenizer of its special tokens alone: a prompt would be empty, an answer too."""
    (broken / "tokenizer.json").unlink()
    for module in ("cli.generate", "cli.chat", "serve.service", "decode.loader"):
        monkeypatch.setattr(f"outcore.{module}.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    for words in (["generate", "-p", "hi"], ["chat"], ["serve", "--port", "0"]):
        status, out, err = run(capsys, *words, "--model", str(broken))
        says = f"{broken}: no tokenizer.json here; download it again\n"
        assert (status, out, err) == (1, "", f"outcore {words[0]}: {says}")
    with pytest.raises(outcore.MissingFileError, match=f"{broken}: no tokenizer.json here; download it again"):
        outcore.load(str(broken))


def test_code_that_comes_with_a_model_runs_only_when_allowed(capsys: pytest.CaptureFixture[str], broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (broken / "own.py").write_text("from mlx_lm.models.qwen3_5 import Model, ModelArgs\n")
    status, _, err = run(capsys, "generate", "--model", str(broken), "-p", "hi", "-m", "3")
    assert status == 1 and "--trust-remote-code" in err and err.count("\n") == 1
    args = ["-p", "hi", "-m", "3", *STREAMED, "--json", "--trust-remote-code"]
    status, out, _ = run(capsys, "generate", "--model", str(broken), *args)
    assert status == 0
    record = json.loads(out.splitlines()[-1])
    assert record["streamed_units"] > 0
    status, out, _ = run(capsys, "generate", "--model", str(broken.parent / "broken"), *args)
    assert json.loads(out.splitlines()[-1])["tokens"] == record["tokens"]


def test_a_file_cut_short_while_it_runs(quick: Path, tmp_path: Path) -> None:
    import outcore

    folder = Path(shutil.copytree(quick, tmp_path / "model"))
    model, tokenizer = outcore.load(str(folder), memory="300MB", resident=0, slots=2, context=64, prompt=8)
    with model.outcore:
        run_ = outcore.stream_generate(model, tokenizer, "def f(x):", max_tokens=30)
        next(run_)
        os.truncate(folder / "model.safetensors", 4096)
        with pytest.raises(outcore.ReadError, match=r"model\.safetensors: reading .*(layers|row).*ended"):
            list(run_)


@contextmanager
def started(*args: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """``outcore`` in a process of its own, which does not outlive the block."""
    with heard():
        process = subprocess.Popen(
            [sys.executable, "-m", "outcore", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], there: Callable[[], bool]) -> None:
    while not there():
        assert process.poll() is None
        time.sleep(0.01)


def assert_interrupted(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.rstrip().endswith("interrupted") and "Traceback" not in err
    return err


ENDLESS = [*PROMPT, *STREAMED, "-m", "4000"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see how far the process is")
def test_ctrl_c_before_anything_is_generated_ends_with_130(quick: Path) -> None:
    with started("generate", "--model", str(quick), *ENDLESS) as process:
        # From when Outcore, not Python's own start, is there to answer: while it imports MLX.
        wait_for(process, lambda: "libmlx" in Path(f"/proc/{process.pid}/maps").read_text())
        assert_interrupted(process)


def test_ctrl_c_in_an_answer_shows_its_summary(quick: Path) -> None:
    with started("generate", "--model", str(quick), *ENDLESS) as process:
        assert process.stdout is not None
        process.stdout.read(20)
        assert "Generation: " in assert_interrupted(process)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="MLX must find a compiler")
def test_ctrl_c_while_mlx_looks_for_a_compiler_is_not_lost(quick: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ : > {asked}; sleep 0.5; }}\nexec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with started("generate", "--model", str(quick), *ENDLESS, PATH=path) as process:
        wait_for(process, asked.exists)
        assert_interrupted(process)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see how far the process is")
def test_where_ctrl_c_is_ignored_it_stays_ignored_until_the_reader_leaves(quick: Path) -> None:
    """As for all programs that a shell has put in the background, or that ``nohup`` started."""
    command = [sys.executable, "-m", "outcore", "generate", "--model", str(quick), *ENDLESS]
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    with process:
        wait_for(process, lambda: "libmlx" in Path(f"/proc/{process.pid}/maps").read_text())
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read(20)
        process.stdout.close()
        process.wait(timeout=60)
        err = process.stderr.read()
        assert "Traceback" not in err and "interrupted" not in err
