"""What all commands have in common: how a model is named, help, what goes to which stream, and what is settled."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.cli.commands import commands, parser_of
from outcore.cli.main import main
from outcore.cli.output import Result, log_from, spinner
from outcore.errors import UsageError
from outcore.machine.cache_folder import cache_dir
from outcore.machine.settings import setting

NAMES_NO_MODEL = ("cache", "completion", "demo", "launch", "list", "monitor", "ps", "report", "serve", "stop")
TAKES_MODEL = [c for c in commands() if c not in NAMES_NO_MODEL]
HEAVY = ("mlx", "mlx_lm", "transformers", "pydantic", "rich", "numpy", "shtab")


@pytest.fixture(scope="module")
def quick(quick_models: Callable[[int], Path]) -> Path:
    return quick_models(3)


def refused(capsys: pytest.CaptureFixture[str], *args: str, status: int = 2) -> str:
    """The one line that refuses a command line."""
    assert main(args) == status
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


def outcore(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outcore", *args], capture_output=True, text=True, env=os.environ | env
    )


# Help


def test_no_command_imports_mlx_to_show_its_help() -> None:
    code = f"""if True:
        import sys, time
        from outcore.cli.commands import commands, parser_of
        from outcore.cli.main import main
        for command in commands():
            assert parser_of(command).format_help()
            assert main([command, "--help"]) == main(["help", command]) == 0
            heavy = [m for m in {HEAVY} if m in sys.modules]
            assert not heavy, (command, heavy)
        assert main(["--help"]) == main(["help"]) == 0
        assert time.process_time() < 1, time.process_time()  # 0.1 s, and it is made 42 times
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: outcore info") == 2


def test_info_imports_no_transformers(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of its time: 1.3 s of processor time with it, 0.7 without. What it says is the same."""
    code = """if True:
        import json, sys
        from outcore.cli.main import entry
        try:
            entry()
        except SystemExit as end:
            assert not end.code
        assert "transformers.utils" not in sys.modules
        # What was left out is not taken for a tokenizer.
        from mlx_lm.tokenizer_utils import AutoTokenizer
        try:
            AutoTokenizer.from_pretrained("x")
        except Exception as e:
            assert "without tokenizers" in str(e)
        else:
            raise AssertionError("it made one")
        # A model's own code that asks for something of it gets the real one.
        from transformers import PretrainedConfig
        from transformers.utils import logging
        assert "no_tokenizers" not in str(sys.modules["transformers"].AutoTokenizer)
    """
    words = ["info", str(demo_model), "--memory", "60MB", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert main(words) == 0
    assert json.loads(done.stdout) == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", commands())
def test_help_names_every_default_and_an_example_that_can_be_run(command: str) -> None:
    parser = parser_of(command, everything=True)
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and not action.required:
            assert "Default" in (action.help or ""), action.option_strings
    assert f"outcore {command}" in parser.format_help()
    assert parser_of(command).format_help().endswith(f"example:\n  {parser.example}\n")
    program, name, *words = shlex.split(parser.example.partition(" > ")[0])
    assert (program, name) == ("outcore", command) and parser.parse_args(words)


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_help_shows_what_people_use_and_help_all_the_rest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flag in ("--help", "--help-all"):
        assert main([command, flag]) == 0
        shown.append(set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)))
    few, all_of_them = shown
    assert len(few - {"--help", "--help-all"}) == 15 and few < all_of_them and "--io" in all_of_them - few


def test_a_word_that_is_close_to_a_known_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no command 'generat' (did you mean generate?)" in refused(capsys, "generat")
    assert "no command 'inof' (did you mean info?)" in refused(capsys, "help", "inof")
    assert "no flag '--versoin' (did you mean --version?)" in refused(capsys, "--versoin")
    assert "did you mean" not in refused(capsys, "qqqqqq")
    assert "no flag --memroy (did you mean --memory?); see outcore info --help" in refused(
        capsys, "info", "m", "--memroy=1"
    )
    assert "'x' is not expected here" in refused(capsys, "info", "m", "x")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate m --temperature 1", "no flag --temperature (did you mean --temp?)"),
        ("generate m --max_token 1", "(did you mean --max-tokens?)"),
        ("generate m --n-predict 5", "no flag --n-predict (did you mean --max-tokens?)"),
        ("chat m --num-ctx=5", "no flag --num-ctx (did you mean --context?)"),
        ("generate m --num-ctx 5", "no flag --num-ctx (did you mean --max-kv-size?)"),  # it has no such flag
        ("generate m --stream", "no flag --stream; answers are shown as they come"),
        ("server m", "no command 'server' (did you mean serve?)"),
        ("show m", "no command 'show'; outcore info MODEL"),
        ("rm m", "no command 'rm'; hf cache rm"),
    ],
)
def test_the_error_for_another_programs_name_gives_ours(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *words.split())


def test_a_negative_size_is_reported_as_one(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    assert "--memory -5MB: a size cannot be negative" in refused(capsys, "info", str(demo_model), "--memory", "-5MB")
    # A flag is no value, and what comes after -- is none either.
    assert parser_of("generate").parse_args(["m", "-m", "-1"]).max_tokens == -1
    assert "--memory: expected one argument" in refused(capsys, "info", "m", "--memory", "--json=1")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_a_shell_completes_commands_flags_and_their_words(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in (*commands(), "max-kv-size", "direct", "float32", "ngram", "WARNING"))
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
        asked = f"{script}\nCOMP_WORDS=(outcore generate --io ''); COMP_CWORD=3; _shtab_outcore; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
        assert done.stdout.split() == ["auto", "direct", "cached"]
    assert "choose one of bash" in refused(capsys, "completion", "bsh")


# The model


@pytest.mark.parametrize("command", TAKES_MODEL)
def test_every_command_takes_the_model_with_and_without_its_flag(command: str) -> None:
    parser = parser_of(command)
    needed = {
        "batch": ["-i", "a", "-o", "b"],
        "cache-prompt": ["-p", "a", "--prompt-cache-file", "b"],
        "draft": ["-o", "b", "-i", "a"],
        "embed": ["-i", "a"],
    }.get(command, [])
    first = ["train"] if command == "draft" else []
    for given in (["m"], ["--model", "m"], *([] if first else [["--model=m", "m"]])):
        assert parser.parse_args([*first, *given, *needed]).model == "m"
        if not first:
            assert parser.parse_args([*needed, *given]).model == "m"
    with pytest.raises(UsageError, match="m and --model n: give only one model"):
        parser.parse_args([*first, "m", *needed, "--model", "n"])


# Streams


def test_json_is_all_that_standard_output_holds(quick: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def ran(*words: str) -> tuple[int, str, str]:
        return main(words), *capfd.readouterr()

    model = str(quick)
    run = ["--memory", "300MB", "--resident", "1", "-m", "2", "-p", "def f(x):", "--json"]
    _, told, words = ran("generate", model, *run)
    assert json.loads(told)["text"] in words and "tokens per second" in words
    _, quiet, words = ran("generate", model, *run, "--quiet")
    assert json.loads(quiet)["tokens"] == json.loads(told)["tokens"] and words == ""
    _, answer, words = ran("generate", "--model", model, *run[:-1], "--quiet")
    assert answer == json.loads(told)["text"] + "\n" and words == ""
    status, out, words = ran("info", model, "--memory", "1KB", "--json", "--quiet")
    record = json.loads(out)
    assert status == record["exit_status"] == 1 and record["layers"] == 3
    assert words == f"outcore info: {record['error']}\n"


def test_every_command_with_json_keeps_standard_output_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in commands():
        flags = {o for action in parser_of(command)._actions for o in action.option_strings}
        assert command in ("cache", "completion") or {"--json", "--quiet", "--log-level"} <= flags, command

    class Chatty:
        @staticmethod
        def run(args: object) -> None:
            print("for people")
            print("progress", file=sys.stderr)
            raise UsageError("why")

    monkeypatch.setattr("outcore.cli.main._work", lambda *_: Chatty.run)
    assert main(["demo", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": "why", "type": "UsageError", "exit_status": 2}
    assert err == "for people\nprogress\noutcore demo: why\n"
    assert main(["demo", "--json", "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == "why" and err == "outcore demo: why\n"
    assert main(["demo", "--quiet"]) == 2
    assert capsys.readouterr() == ("for people\n", "outcore demo: why\n")


def test_a_result_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    result = Result(sys.stdout, True)
    result.record["a"] = 1
    result.write()
    result.write()
    assert capsys.readouterr().out == '{"a": 1}\n'


def test_the_log_level_is_a_name_of_logging(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--log-level LOUD: choose one of DEBUG, INFO" in refused(capsys, "info", "m", "--log-level", "LOUD")
    told = outcore("info", str(quick), "--json", "--log-level", "info", OUTCORE_MEMORY="1GB", FORCE_COLOR="1",
                   NO_COLOR="1")  # fmt: skip
    assert "INFO outcore: memory 1GB, from OUTCORE_MEMORY" in told.stderr
    assert json.loads(told.stdout)["budget_bytes"] == 10**9
    # Bold is no colour.
    assert not any(f"\x1b[{n}m" in told.stderr for n in range(30, 38))


@pytest.mark.parametrize(("level", "verbosity"), [("INFO", "warning"), ("DEBUG", "debug")])
def test_only_debug_prints_configurations(level: str, verbosity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers prints a model's whole configuration on INFO."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "")
    before, capturing = logging.getLogger().level, logging.captureWarnings
    try:
        log_from(level)
        assert os.environ["TRANSFORMERS_VERBOSITY"] == verbosity
    finally:
        logging.getLogger().setLevel(before)
        capturing(False)


def test_a_terminal_shows_that_something_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with spinner("starting"):
            time.sleep(0.5)
    shown = ""
    with suppress(OSError):  # which is how a terminal that was closed ends
        while more := os.read(master, 4096):
            shown += more.decode()
    os.close(master)
    # Shown, taken away, and the cursor is back.
    assert "starting" in shown and "starting" not in shown.rpartition("\x1b[2K")[2] and "\x1b[?25h" in shown


# What is settled


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config.toml"
    monkeypatch.setenv("OUTCORE_CONFIG", str(file))
    return file


def test_a_flag_goes_before_a_variable_and_that_before_the_file(
    config: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def budget(*args: str) -> int:
        assert main(["info", "--json", *args]) == 0
        return int(json.loads(capsys.readouterr().out)["budget_bytes"])

    config.write_text(f'memory = "1GB"\nmodel = "{quick}"\n')
    assert budget() == 10**9
    monkeypatch.setenv("OUTCORE_MEMORY", "2GB")
    assert budget() == 2 * 10**9
    assert budget("--memory", "3GB") == 3 * 10**9
    monkeypatch.setenv("OUTCORE_MODEL", "no/such/folder/there")
    assert main(["info"]) == 1 and "no/such/folder/there" in capsys.readouterr().err


def test_a_budget_that_is_refused_is_reported_with_where_it_comes_from(
    config: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*args: str) -> str:
        assert main(args) == 1
        return capsys.readouterr().err

    config.write_text('memory = "2MB"')
    assert f"the budget of 2MB is from {config}: memory; override it with --memory" in told("info", str(quick))
    monkeypatch.setenv("OUTCORE_MEMORY", "900TB")
    assert "the budget of 900TB is from OUTCORE_MEMORY" in told("list")
    assert "is from" not in told("info", str(quick), "--memory", "2MB")


def test_without_a_model_a_line_says_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "or set OUTCORE_MODEL, or model in the" in refused(capsys, "info")


def test_the_caches_folder_is_settled_for_python_too(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(f'cache = "{config.parent}/mine"\n')
    monkeypatch.delenv("OUTCORE_CACHE")
    assert cache_dir() == config.parent / "mine"
    monkeypatch.setenv("OUTCORE_CACHE", str(config.parent / "other"))
    assert cache_dir() == config.parent / "other"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memroy = '4GB'", "unknown key memroy; the keys are memory, model, cache"),
        ("memory = '4'", "memory: 4: "),
        ("memory = 4", 'memory: give text in quotation marks, such as memory = "4GB"'),
        ("model = ''", "model: give text"),
        ("cache = 'here'", "cache: here: give the whole path"),
        ("memory", "not TOML"),
        ("x = '\udcff'", "not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line_that_names_it(
    config: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_bytes(text.encode(errors="surrogateescape"))
    err = refused(capsys, "demo")
    assert f"{config}: " in err and says in err


def test_a_file_that_was_named_must_be_there(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"OUTCORE_CONFIG: .*no such file"):
        setting("memory")
    monkeypatch.setenv("OUTCORE_MEMORY", "lots")
    with pytest.raises(UsageError, match="OUTCORE_MEMORY: lots: "):
        setting("memory")
    monkeypatch.delenv("OUTCORE_CONFIG")
    monkeypatch.delenv("OUTCORE_MEMORY")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config.parent / "none"))
    assert setting("memory") is None


# What is said of sizes


def test_budgets_are_reported_with_the_flags_that_they_are_for(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for memory in ("100MB", "1GB"):
        assert main(["info", str(quick), "--memory", memory, "--json"]) == 0
        out, err = capsys.readouterr()
        assert "for a context of 2048 tokens (--context)" in err and "drafting" not in err
        sizes.append(json.loads(out)["resident_budget_bytes"])
    # Where all is resident nothing drafts, so that no draft counts.
    assert sizes[0] == sizes[1]
    assert main(["info", str(quick), "--memory", "1KB"]) == 1
    assert "; fewer need less (--context)" in capsys.readouterr().err
    assert "--context" in refused(capsys, "plan", str(quick), "--memory", "1KB", "--no-calibrate", status=1)
    text = ["--num-samples", "1", "--memory", "1KB"]
    assert "--sequence-length" in refused(capsys, "perplexity", str(quick), *text, status=1)


def test_one_of_something_is_no_plural(quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text("no JSON\n")
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert main(["batch", str(quick), *files, "--quiet"]) == 1
    assert capsys.readouterr() == (f"{tmp_path / 'out'}: 0 answers, 1 error\n", "")


def test_texts_longer_than_a_tokenizers_maximum_are_no_warning(demo_model: Path) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")  # which hands nothing on to others
    logger.addHandler(handler)
    try:
        load_tokenizer(demo_model, {"model_max_length": 8}).encode("x = 1\n" * 100)
    finally:
        logger.removeHandler(handler)
    assert told == []


def test_the_error_for_a_prompt_without_its_flag_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a prompt goes after --prompt" in refused(capsys, "generate", "m", "Why is the sky blue?")


@pytest.mark.parametrize("command", ["info", "bench"])
def test_what_is_wrong_is_strict_json_where_its_flag_is_shortened(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    assert main([command, "--js", "--nonsense"]) == 2
    out, err = capsys.readouterr()
    record = json.loads(out, parse_constant=none)
    assert out.count("\n") == 1 and record["exit_status"] == 2 and record["error"] in err
