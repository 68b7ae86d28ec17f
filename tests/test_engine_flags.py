"""Every engine flag of every command reaches the plan: none is accepted and then ignored."""

from __future__ import annotations

import argparse
import json
import pkgutil
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import outcore.decode.preparation
from outcore.checks import parse_size
from outcore.cli.commands import commands, parser_of
from outcore.cli.main import main
from outcore.errors import OutcoreError
from outcore.machine.memory import default_budget
from outcore.options import LoadOptions
from outcore_bench import measure as modes
from outcore_bench.bench import Grid, each_run, jobs_of, settings
from outcore_bench.jobs import BenchJob, make_jobs

VALUES = {
    "memory": "123MB",
    "resident": 3,
    "experts": 5,
    "io": "cached",
    "slots": 2,
    "kv_disk": "off",
    "mirror": ("copies",),
    "dtype": "float32",
    "cpu_streams": 1,
}
"""One for each flag, none of them its default."""

GIVEN = {"mirror": "copies"}
"""Where what is given is not what becomes of it."""

NEEDED = {
    "generate": ["--model", "{model}", "--prompt", "x"],
    "cache-prompt": ["--model", "{model}", "--prompt", "x", "--prompt-cache-file", "{cache}"],
    "chat": ["--model", "{model}"],
    "batch": ["--model", "{model}", "--input", "{requests}", "--output", "{answers}"],
    "embed": ["--model", "{vectors}", "--input", "{text}"],
    "perplexity": ["--model", "{model}", "--num-samples", "1", "--sequence-length", "16", "--data-path", "{text}"],
    "draft": ["train", "--model", "{model}", "--input", "{text}", "--output", "{answers}"],
    "info": ["{model}"],
    "plan": ["{model}", "--no-calibrate"],
    "serve": ["{model}", "--port", "0"],
}
"""What else a command with these flags is given."""


def given(flag: str) -> str:
    return GIVEN.get(flag, str(VALUES[flag]))


def _flags(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]


class Asked(OutcoreError):
    """Ends a command as soon as a plan is asked for."""


def engine_flags(command: str) -> list[argparse.Action]:
    parser = parser_of(command)
    groups = [group for group in parser._action_groups if group.title == "engine"]
    return [action for group in groups for action in group._group_actions]


COMMANDS = [command for command in commands() if engine_flags(command)]


def test_every_command_with_engine_flags_is_looked_at() -> None:
    assert set(COMMANDS) == NEEDED.keys()
    for command in COMMANDS:
        flags = engine_flags(command)
        assert {flag.dest for flag in flags} == VALUES.keys()
        assert all(VALUES[flag.dest] != flag.default for flag in flags)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ``prepare`` was called with, by whomever."""
    calls: list[dict[str, Any]] = []

    def prepare(_: Any, options: LoadOptions | None = None, **arguments: Any) -> Any:
        calls.append(vars(options or LoadOptions(**{k: v for k, v in arguments.items() if k != "least"})))
        raise Asked("asked")

    real = outcore.decode.preparation.prepare
    for command in NEEDED:
        pkgutil.resolve_name(parser_of(command).run)
    for name, module in sys.modules.items():
        if name.startswith("outcore") and getattr(module, "prepare", None) is real:
            monkeypatch.setattr(module, "prepare", prepare)
    return calls


@pytest.mark.parametrize("command", COMMANDS)
def test_engine_flags_reach_the_plan(
    command: str, asked: list[dict[str, Any]], demo_model: Path, tmp_path: Path
) -> None:
    text, requests = tmp_path / "text.txt", tmp_path / "requests.jsonl"
    text.write_text("one two three four five six seven eight nine ten " * 20)
    body = {"prompt": "x", "max_tokens": 2}
    requests.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}))
    vectors = tmp_path / "vectors"
    shutil.copytree(demo_model, vectors)
    (vectors / "config.json").write_text(json.dumps({"model_type": "bert"}))
    places = {"cache": tmp_path / "cache", "model": demo_model, "requests": requests, "text": text, "vectors": vectors}
    needed = [word.format(**places, answers=tmp_path / "answers.jsonl") for word in NEEDED[command]]
    for left_out in ("resident", "experts"):  # which exclude each other
        wanted = {name: value for name, value in VALUES.items() if name != left_out}
        assert main([command, *needed, *_flags(**{name: given(name) for name in wanted})]) == 1
        (options,) = asked
        if command == "draft":  # which keeps some of it beside the model
            assert 0 < options["memory"] < parse_size(wanted["memory"])
            wanted["memory"] = options["memory"]
        assert {name: options[name] for name in VALUES} == wanted | {left_out: None}
        asked.clear()
    assert main([command, *needed]) == 1
    # Without --memory none is given: a budget that a command made up would be taken for the user's. Training keeps some
    # of the default beside the model.
    assert (0 < asked[0]["memory"] < default_budget()) if command == "draft" else asked[0]["memory"] is None


@pytest.mark.parametrize("flag", ["io", "cpu_streams", "mirror"])
def test_a_flag_about_this_machine_is_refused_where_another_is_planned_for(
    flag: str, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "--" + flag.replace("_", "-")
    status = main(["plan", str(demo_model), "--device", "ipad-air-m3", name, given(flag)])
    err = capsys.readouterr().err
    assert status == 2 and err.count("\n") == 1 and f"{name} is about this machine, --device" in err


RUN_FLAGS = {"dtype": "float32", "cpu_streams": 1, "slots": 2, "io": "cached"}


def test_the_flags_of_a_measured_run_reach_its_model(monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> None:
    calls: list[dict[str, Any]] = []

    def load_model(_: str, options: LoadOptions) -> Any:
        calls.append(vars(options))
        raise Asked("asked")

    monkeypatch.setattr(modes, "load_model", load_model)
    asked_for = [({"resident": "5"}, "resident", 5), ({"memory": "123MB"}, "memory", "123MB")]
    for more, name, value in asked_for:
        args = parser_of("bench").parse_args(["m", "--modes", "outcore", *_flags(**RUN_FLAGS, **more)])
        (job,) = [
            j
            for j in make_jobs(settings(args), "m", 16, fits=False)
            if getattr(j.run if hasattr(j.run, name) else j, name) == value
        ]
        with pytest.raises(Asked):
            modes._open_outcore(job)
        assert {n: calls[-1][n] for n in (*RUN_FLAGS, name)} == RUN_FLAGS | {name: value}
    each = {name: RUN_FLAGS[name] for name in ("dtype", "cpu_streams")}
    run = each_run(parser_of("matrix").parse_args(["m", *_flags(**each)]))
    grid = Grid((7_000_000,), ("cached",), slots=(2,))
    (job,) = jobs_of(grid, 8_000_000, BenchJob("outcore", "m", "", run, 64, 128))
    with pytest.raises(Asked):
        modes._open_outcore(job)
    assert {n: calls[-1][n] for n in RUN_FLAGS} == RUN_FLAGS
