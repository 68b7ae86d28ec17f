"""Whatever a user can type: one line that says what is wrong, an exit status, and no traceback."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache, save_prompt_cache

import outcore
import zoo
from outcore import OutcoreError, PromptError, UsageError
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.cli import serve
from outcore.cli.commands import commands, parser_of
from outcore.cli.main import main
from outcore.decode.budget import given_budget
from outcore.decode.preparation import prepare
from outcore.decode.sampling import check_sampling
from outcore_bench.bench import Runner
from outcore_calibrate import command as calibrate
from outcore_tools import demo, doctor
from stand_ins import TokensOnly

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template and a tokenizer of few words."""
    folder = zoo.save_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny [red]")
    for file in [*demo_model.glob("tokenizer*"), *demo_model.glob("chat_template*")]:
        shutil.copy(file, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]
    words["vocab"] = {word: at for word, at in words["vocab"].items() if at < 300}
    words["merges"] = [pair for pair in words["merges"] if "".join(pair) in words["vocab"]]
    assert words["merges"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def least(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one layer, as it is opened some hundreds of times."""
    folder = tmp_path_factory.mktemp("models") / "least"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "llama", zoo.CONFIGS["llama"] | {"num_hidden_layers": 1})
        zoo.save_checkpoint("llama", folder)
    for file in [*model.glob("tokenizer*"), *model.glob("chat_template*")]:
        shutil.copy(file, folder)
    return folder


def run(capsys: Output, *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(args)
    # Half characters would not come through to who runs the tests.
    out, err = (text.encode("utf-8", "backslashreplace").decode() for text in capsys.readouterr())
    return status, out, err


# Every flag of every command

NUMBERS = ("", "x", "-1", "0", "1" + "0" * 30, "nan", "inf")
WORDS = ("", " ", "\udcff", "a\n[/]", "x" * 300)
PATHS = ("", "FOLDER", "FILE", "/dev/full", "no/such/x", "\udcff", "x" * 300)


def flags_of(command: str) -> list[argparse.Action]:
    """A command's flags that take a value; those that several declare alike, where they are first."""
    found = []
    for other in commands():
        flags = [a for a in parser_of(other)._actions if a.option_strings and a.nargs != 0]
        if other == command:
            return [a for a in flags if (a.option_strings, a.type, a.help) not in found]
        found += [(a.option_strings, a.type, a.help) for a in flags]
    raise KeyError(command)


def baseline(command: str, model: Path, folder: Path) -> list[str]:
    """Arguments that end a command before it loads anything: memory for it is too small, or its work is left out."""
    named = ["--model", str(model), "--memory", "1KB"]
    if command == "batch":
        (folder / "in").write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
        return [*named, "--input", str(folder / "in"), "--output", str(folder / "out")]
    if command == "perplexity":
        (folder / "text").write_text("x = 1\n" * 400)
        return [*named, "--data-path", str(folder / "text"), "--sequence-length", "16", "--num-samples", "2"]
    if command in ("generate", "chat"):
        return named
    if command == "cache-prompt":
        return [*named, "--prompt", "x", "--prompt-cache-file", str(folder / "cache")]
    if command == "cache":
        return ["ls"]
    if command == "report":
        (folder / "no.json").write_text("{}")
        return [str(folder / "no.json"), "--output", str(folder / "page")]
    if command == "info":
        return [str(model), "--memory", "1GB"]
    if command == "plan":
        return [str(model), "--memory", "1GB", "--no-calibrate", "--draft", "none"]
    if command == "pack":
        return [str(model), "--output", str(folder / "packed")]
    return [] if command in ("demo", "list") else [str(model)]


@pytest.mark.parametrize("command", commands())
def test_no_value_of_any_flag_ends_in_a_traceback(
    command: str, least: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: Any, **__: Any) -> Any:
        raise OutcoreError("reached")

    for where, name in (
        (Runner, "run"),
        (calibrate, "calibrated"),
        (demo, "_run"),
        (doctor, "examine"),
        (serve, "open_service"),
    ):
        monkeypatch.setattr(where, name, reached)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FILE").write_bytes(b"\xff[1]\n")
    base = baseline(command, least, tmp_path)
    capsys.readouterr()
    for flag in flags_of(command):
        for value in NUMBERS if flag.type in (int, float) else PATHS if flag.type is Path else WORDS + PATHS[1:3]:
            monkeypatch.setattr("sys.stdin", io.StringIO(""))
            status, out, err = run(capsys, command, *base, f"{flag.option_strings[0]}={value}")
            told = f"{flag.option_strings[0]}={value!r}: {status}, {out}{err}"
            assert "No safetensors" not in err, told  # mlx-lm, which globs for them
            assert status in (0, 1, 2) and "Traceback" not in err and "this is a bug" not in err, told
            lines = [line for line in err.splitlines() if not line.startswith("Note: ")]
            assert status == 0 or len(lines) == 1, told


REFUSED: list[tuple[list[str], str]] = [
    (["--extra-eos-token", "nosuch"], "--extra-eos-token nosuch: this model has no such token"),
    (["--extra-eos-token", "99999999"], "no such token"),
    (["--kv-bits", "7"], "--kv-bits 7: choose from 2, 3, 4, 5, 6, 8"),
    (["--kv-group-size", "7"], "--kv-group-size 7: choose from 32, 64, 128"),
    (["--quantized-kv-start", "-1"], "--quantized-kv-start -1: must be at least 0"),
    (["--max-kv-size", "0"], "--max-kv-size 0: must be at least 1"),
    (["--min-p", "7"], "--min-p 7.0: must be from 0 to 1"),
    (["--top-p", "nan"], "--top-p nan: a number"),
    (["--temp", "-1"], "--temp -1.0: must be at least 0"),
    (["--temp", "inf"], "--temp inf"),
    (["--top-k", "999999"], "--top-k 999999: fewer than the 128 tokens"),
    (["--min-tokens-to-keep", "0"], "--min-tokens-to-keep 0: must be at least 1"),
    (["--seed", "-1"], "--seed -1: must be at least 0"),
    (["--xtc-probability", "9"], "--xtc-probability 9.0: must be from 0 to 1"),
    (["--xtc-threshold", "0.9"], "--xtc-threshold 0.9: must be from 0 to 0.5"),
    (["--chat-template-config", "[1]"], "give a JSON object"),
    (["--chat-template-config", '{"tokenize": true}'], "template refuses"),
    (["--prompt", "a\udcff"], "--prompt: not UTF-8 text from character 1"),
    (["--system-prompt", "\udcff"], "--system-prompt: not UTF-8"),
    (["--prompt", ""], "--prompt: empty"),
    (["--max-tokens", "1" + "0" * 30], "--max-tokens 10000000000"),
    (["--memory", "40000000"], "no unit; write 40000000B for bytes"),
    (["--memory", "4"], "write 4GB or 4GiB"),
    (["--memory", "0"], "--memory 0: a size must be at least one byte"),
    (["--memory", "-5MB"], "--memory -5MB: a size cannot be negative"),
    (["--memory"], "--memory: expected one argument; see outcore generate --help"),
    (["--memory=-5MB"], "--memory -5MB: a size cannot be negative"),
    (["--nosuch"], "no flag --nosuch; see outcore generate --help"),
    (["--top-k", "x"], "--top-k: invalid int value: 'x'"),
    (["--memory", "0%"], "at most 100%"),
    (["--memory", "101%"], "at most 100%"),
    (["--draft", "ngrm"], "--draft ngrm: no such folder; did you mean ngram?"),
    (["--draft", "self:1"], "--draft self:1: give the number of bits, one of 2, 3"),
    (["--draft", " "], "auto, none, ngram"),
    (["--slots", "1"], "--slots 1: must be at least 2"),
    (["--cpu-streams", "0"], "--cpu-streams 0: must be at least 1"),
]


@pytest.mark.parametrize(("args", "says"), REFUSED, ids=lambda a: ascii(" ".join(a)) if isinstance(a, list) else "")
def test_what_cannot_be_meant_is_wrong_usage_before_anything_is_loaded(
    args: list[str], says: str, model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.decode.loader.Session", lambda *_, **__: pytest.fail("it was loaded"))
    plain = ["-p", "hi"] if args[0] != "--prompt" else []
    plain += [] if "template" in args[0] or args[0] == "--system-prompt" else ["--ignore-chat-template"]
    status, out, err = run(capsys, "generate", "--model", str(model), *plain, *args)
    assert (status, out) == (2, "") and says in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role here') }}", "{% if %}", "{{ messages[7].content }}", "{{ 1 / 0 }}"]
)
def test_a_chat_template_that_raises_is_one_line(
    template: str, model: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    for command, expected in (("generate", 2), ("chat", 1)):
        status, _, err = run(capsys, command, "--model", str(folder))
        assert status == expected and "chat template" in err and err.count("\n") == 1, err


def test_standard_input_that_is_no_text(model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    status, _, err = run(capsys, "generate", "--model", str(model), "-p", "-")
    assert status == 2 and "standard input is not UTF-8 at byte 2" in err and err.count("\n") == 1


# What nobody foresaw


def test_whatever_else_is_raised_is_one_line_and_a_traceback_if_wanted(
    model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("with\nlines")

    monkeypatch.setattr("outcore_tools.info.prepare", fails)
    status, out, err = run(capsys, "info", str(model))
    assert (status, out) == (1, "") and err.count("\n") == 1 and "OUTCORE_DEBUG=1" in err
    assert err.startswith("outcore info: ZeroDivisionError: with lines; this is a bug")
    status, out, err = run(capsys, "info", str(model), "--json")
    assert json.loads(out)["type"] == "ZeroDivisionError" and json.loads(out)["exit_status"] == status == 1
    monkeypatch.setenv("OUTCORE_DEBUG", "1")
    status, _, err = run(capsys, "info", str(model))
    assert status == 1 and err.startswith("Traceback") and err.splitlines()[-1].startswith("outcore info: ZeroDiv")


def test_streams_that_are_full_closed_or_of_another_encoding(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcore_ = f'"{sys.executable}" -m outcore'
    little = f"{outcore_} cache ls"
    for line, status, says in (
        (f"{little} >/dev/full", 1, "outcore cache: cannot write the output: No space left"),
        (f"{little} --json 2>&1 >/dev/full", 1, ""),
        (f"{outcore_} --version >/dev/full", 1, "No space left"),
        (f"{outcore_} generate --help >/dev/full", 1, "No space left"),
        (f"{outcore_} nosuch 2>/dev/full", 2, ""),
        (f"{little} >&- 2>&- <&-", 0, ""),
        (f"{little} | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}", None, ""),
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert status in (None, done.returncode), (line, done)
        assert says in done.stderr and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, line
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
    assert main(["plan", str(model), "--no-calibrate", "--memory", "1GB"]) == 0 and b"\\u" in written.getvalue()


def test_without_mlx_one_line_names_the_extras(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()  # in the place of the one that is there; without core, as where no extra was asked for
    (tmp_path / "mlx" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(outcore.__file__).parents[1]}"}
    for command in (["-m", "outcore", "info", "x"], ["-c", "import outcore; outcore.load"]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        assert done.returncode == 1 and "outcore[cpu]" in done.stderr.splitlines()[-1] and "[cuda12]" in done.stderr
    assert "Traceback" in done.stderr  # Python's own, of the last; the command's is one line
    for command in (["--version"], ["--help"]):
        assert subprocess.run([sys.executable, "-m", "outcore", *command], env=environment).returncode == 0


def test_names_with_brackets_and_colons_are_shown_as_they_are(model: Path, capsys: Output) -> None:
    status, out, _ = run(capsys, "info", str(model), "--memory", "1GB")
    assert status == 0 and "tiny [red]" in " ".join(out.split())
    odd = model.with_name(":smile: [b] tiny")
    odd.symlink_to(model)
    for command in (["info", str(odd)], ["plan", str(odd), "--no-calibrate"]):
        status, out, err = run(capsys, *command, "--memory", "1GB")
        # A long path is wrapped between its words.
        assert status == 0 and ":smile: [b] tiny" in " ".join(out.split()), err


def test_info_of_a_budget_that_is_too_small_says_what_the_model_weighs_and_fails(model: Path, capsys: Output) -> None:
    status, out, err = run(capsys, "info", str(model), "--memory", "1KB", "--json")
    record = json.loads(out.splitlines()[-1])
    assert status == 1 == record["exit_status"] and record["type"] == "BudgetError" and "smallest budget" in err
    assert err.endswith(f"outcore info: {record['error']}\n") and "too small for this model" in err


# Python


def test_load_names_an_argument_that_it_does_not_know(model: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        outcore.load(str(model), nonsense=1)


def test_the_error_for_a_misspelt_argument_suggests_one(model: Path) -> None:
    with pytest.raises(TypeError, match=r"'memry' \(did you mean memory\?\)"):
        outcore.load(str(model), memry="4GB")
    for function in (outcore.load_model, outcore.plan_model):
        with pytest.raises(TypeError, match=r"'contxt' \(did you mean context\?\)"):
            function(model, contxt=10)
    with pytest.raises(TypeError, match=r"'promt_cache' \(did you mean prompt_cache\?\)"):
        outcore.stream_generate(None, TokensOnly(), [1], promt_cache=[])
    for function in (outcore.stream_generate, outcore.generate):
        for name in ("temp", "temperature"):
            with pytest.raises(TypeError, match=rf"'{name}': the sampler's; give sampler=make_sampler\(temp="):
                function(None, TokensOnly(), [1], **{name: 1.0})


@pytest.mark.parametrize(("memory", "meant"), [(4, '"4GB"'), (4096, '"4096MB"')])
def test_a_few_bytes_are_reported_to_be_bytes(model: Path, memory: int, meant: str) -> None:
    for function in (outcore.load, outcore.plan_model):
        with pytest.raises(outcore.BudgetError, match=f"memory={memory} is {memory} bytes: write memory={meant}"):
            function(str(model), memory=memory)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": True}, {"memory": float("nan")}, {"memory": float("inf")}, {"memory": -5}, {"memory": 0},
        {"memory": 0.5}, {"memory": []}, {"memory": "50 %%"}, {"resident": True}, {"resident": -1}, {"slots": 2.5},
        {"slots": "3"}, {"context": 0}, {"context": 10**30}, {"context": True}, {"prompt": 0}, {"prompt": float("nan")},
        {"prefill_step_size": 0}, {"prefill_step_size": "8"}, {"cpu_streams": 1.5}, {"cpu_streams": False},
        {"sequences": 0}, {"sequences": 1.5}, {"sequences": True}, {"draft": 3}, {"draft": None}, {"dtype": mx.float32},
        {"priority": []}, {"io": ["auto"]},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be_meant(options: dict[str, Any], model: Path) -> None:
    with pytest.raises(UsageError) as e:
        prepare(model, **options)
    assert "\n" not in str(e.value)


def test_whole_numbers_of_other_kinds_are_taken(model: Path) -> None:
    for memory in (5.5e8, np.int64(550_000_000), "550MB", "550000000B"):
        assert prepare(model, memory=memory, context=np.int32(16)).plan.budget_bytes == 550_000_000
    for memory in ("50%", " 12.5 % ", "auto", "AUTO", None):
        assert prepare(model, memory=memory, context=16).plan.budget_bytes > 0
    assert given_budget("50%", of=1000) == 500 and given_budget("auto", of=1000) == 1000


@pytest.mark.parametrize(
    "options",
    [
        {"temp": True}, {"temp": 1e-40}, {"temp": "1"}, {"top_p": -0.1}, {"top_k": 2.5}, {"top_k": 128},
        {"min_tokens_to_keep": 129},
    ],
    ids=str,
)  # fmt: skip
def test_samplers_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        check_sampling(**options, vocabulary=128)


def test_experts_that_no_cpu_gathers_are_refused_before_loading(tmp_path: Path, capsys: Output) -> None:
    folder = zoo.save_checkpoint("qwen3_5_moe", tmp_path / "moe", dtype=mx.bfloat16)
    status, _, err = run(capsys, "info", str(folder), "--memory", "1GB")
    if mx.default_device().type != mx.DeviceType.cpu:
        assert status == 0
        return
    assert status == 2 and "experts in bfloat16" in err and "--dtype float32" in err and err.count("\n") == 1
    # What it says is so: mlx-lm fails, and in float32 it runs.
    theirs, _ = mlx_lm.utils.load_model(folder)
    with pytest.raises(RuntimeError, match="GatherMM"):
        mx.eval(theirs(mx.array([[1, 2]])))
    ours, _ = outcore.load_model(folder, memory="1GB", resident=1, context=16, dtype="float32")
    with ours.outcore:
        mx.eval(ours(mx.array([[1, 2]])))
    quantized = zoo.save_checkpoint(
        "qwen3_5_moe", tmp_path / "quantized", dtype=mx.bfloat16, quantize={"bits": 4, "group_size": 64}
    )
    assert run(capsys, "info", str(quantized), "--memory", "1GB")[0] == 0


def test_a_prompt_that_is_no_text_is_refused(model: Path) -> None:
    ours, tokenizer = outcore.load(str(model), memory="1GB", resident=1, context=32)
    with ours.outcore, pytest.raises(PromptError, match="half of a surrogate pair"):
        list(outcore.stream_generate(ours, tokenizer, "a\ud800"))


def others(model_type: str) -> Sequence[Any]:
    """Caches that models of a type leave behind after three tokens."""
    built = zoo.build(model_type)
    cache = make_prompt_cache(built)
    mx.eval(built(mx.array([[3, 4, 5]]), cache=cache))
    return cache


def wrong_caches(cache: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """What is no cache of a llama with 4 layers, 2 heads and 32 features; ``cache`` is one."""

    def keyed(heads: int, features: int, offset: int = 3) -> list[KVCache]:
        made = []
        for _ in cache:
            c = KVCache()
            c.keys = c.values = mx.zeros((1, heads, 256, features))
            c.offset = offset
            made.append(c)
        return made

    return {
        "fewer": cache[:3], "more": [*cache, KVCache()], "recurrent": others("qwen3_5"), "no caches": [1, 2, 3, 4],
        "heads": keyed(4, 32), "one head, which would be broadcast": keyed(1, 32), "features": keyed(2, 16),
        "beyond": keyed(2, 32, 257), "before": keyed(2, 32, -1), "none": [], "no list": 5,  # type: ignore[dict-item]
    }  # fmt: skip


def test_a_prompt_cache_of_another_model_is_refused_before_any_pass(
    model: Path, tmp_path: Path, capsys: Output
) -> None:
    ours, tokenizer = outcore.load(str(model), memory="1GB", resident=1, context=32)
    with ours.outcore as session:
        right = others("llama")
        for name, cache in wrong_caches(right).items():
            with pytest.raises(UsageError, match="prompt_cache"):
                list(outcore.stream_generate(ours, tokenizer, [5, 6], max_tokens=2, prompt_cache=cache))
                pytest.fail(name)
            if cache and not isinstance(cache, int):
                with pytest.raises(UsageError, match=r"prompt_caches\[1\]"):
                    outcore.batch_generate(ours, tokenizer, [[5], [6]], [None, cache], max_tokens=2)  # type: ignore[list-item]
        assert session.metrics.sweeps == 0
        for cache in (right, [c.to_quantized(32, 8) if type(c) is KVCache else c for c in others("llama")]):
            assert (
                len(list(outcore.stream_generate(ours, tokenizer, [5, 6], max_tokens=2, prompt_cache=list(cache)))) == 2
            )
    file = str(tmp_path / "cache.safetensors")
    for cache, says in (
        (others("qwen3_5"), "was made with another model"),
        (right[:2], "2 caches, and this model has 4"),
    ):
        save_prompt_cache(file, list(cache), {"model": str(model), "tokenizer_config": "{}"})
        args = ["--model", str(model), "-p", "x", "-m", "2", "--prompt-cache-file", file, "--ignore-chat-template"]
        status, out, err = run(capsys, "generate", *args, "--memory", "1GB")
        assert (status, out) == (2, "") and says in err and err.count("\n") == 1, err
    (tmp_path / "cache.safetensors").write_bytes(b"nothing")
    status, _, err = run(capsys, "generate", *args)
    assert status == 2 and "cache.safetensors: 7 bytes" in err and err.count("\n") == 1


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3_text", "llama4", "rwkv7"])
def test_a_models_own_cache_goes_on_in_any_state(model_type: str, tmp_path: Path, demo_model: Path) -> None:
    tokenizer = load_tokenizer(demo_model)
    tokenizer.eos_token_ids = set()
    ours, _ = outcore.load_model(
        zoo.save_checkpoint(model_type, tmp_path / "m"), memory="1GB", resident=1, context=64, draft="none"
    )
    with ours.outcore as session:
        assert session.forms
        cache = make_prompt_cache(ours)
        for prompt in ([5], [6, 7], [8 + i for i in range(9)]):
            assert len(list(outcore.stream_generate(ours, tokenizer, prompt, max_tokens=2, prompt_cache=cache))) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"slots": 1}, "slots=1: must be at least 2"),
        ({"memory": "4"}, "memory 4: no unit"),
        ({"draft": "self:9"}, "draft self:9: give the number of bits"),
        ({"resident": 99}, "resident 99: this model has"),
        ({"prefill_step_size": 0}, "prefill_step_size=0: must be at least 1"),
        ({"io": "fast"}, "io='fast': choose one of"),
    ],
)
def test_errors_in_python_name_the_argument_and_not_the_flag(model: Path, options: dict[str, Any], told: str) -> None:
    for asked in (outcore.load_model, outcore.plan_model):
        with pytest.raises(UsageError) as e:
            asked(model, **options)
        assert str(e.value).startswith(told) and "--" not in str(e.value)


def test_a_session_fits_on_a_screen(model: Path) -> None:
    for resident in (0, None):
        loaded, _ = outcore.load_model(model, memory="100MB", resident=resident, context=32)
        with loaded.outcore as session:
            assert len(repr(session)) < 200 and "layers in memory" in repr(session) and "closed" not in repr(session)
            if resident == 0:  # what is not in memory has no shapes to tell
                assert repr(loaded).startswith("<Model of mlx_lm.models.llama, streamed: <Session: ")
            assert ("slots" in repr(session)) == (resident == 0)
        assert "closed" in repr(session)


def test_what_is_no_prompt_is_reported_as_one(model: Path) -> None:
    loaded, _ = outcore.load_model(model, memory="100MB", context=32)
    with loaded.outcore:
        for wrong in (None, object(), ["a"], [2**70]):
            with pytest.raises(PromptError, match="give a text, or a list of token ids"):
                outcore.generate(loaded, TokensOnly(), wrong)  # type: ignore[arg-type]


def test_options_are_given_in_one_way_and_are_true_or_false(model: Path) -> None:
    with pytest.raises(UsageError, match="give one or the other"):
        outcore.load_model(model, outcore.LoadOptions(memory="1GB"), memory="1B")
    with pytest.raises(UsageError, match="give LoadOptions"):
        outcore.load_model(model, {"memory": "1GB"})  # type: ignore[arg-type]
    for name in ("govern", "trust_remote_code", "lazy", "resumable", "head_resident"):
        with pytest.raises(UsageError, match=f"^{name}='no': give True or False"):
            outcore.LoadOptions(**{name: "no"})  # type: ignore[arg-type]
