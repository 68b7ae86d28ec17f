"""``outcore batch`` as its user meets it: the files' format, bad lines, runs that are killed and go on, bad input."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

import outcore
from interrupts import heard
from outcore import OutputError, RequestError, UsageError
from outcore.checks import parse_size
from outcore.cli.commands import parser_of
from outcore.cli.main import main
from outcore.decode.preparation import prepare
from outcore.serve.prompting import Prompter
from outcore_batch import command as batch_command
from outcore_batch.command import line_request
from outcore_batch.files import CHAT, COMPLETION, NO_MEMORY, BatchRequest, Output, read_lines
from quick_transformers import python_path


@pytest.fixture(scope="module")
def model(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers that know the demo model's form of a chat."""
    folder = Path(shutil.copytree(quick_models(3), tmp_path_factory.mktemp("models") / "chats"))
    shutil.copy(demo_model / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    """mlx-lm's model, and its tokenizer."""
    return mlx_lm.load(str(model))


def smallest(model: Path, prompt: int, answer: int) -> int:
    """The smallest budget for a request that is alone."""
    return prepare(model, memory="1GB", context=prompt + answer, prompt=prompt).planning.smallest


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return mlx_lm.utils.load_tokenizer(model)


def line(name: Any, body: dict[str, Any], url: str = COMPLETION, **more: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body} | more)


def completions(count: int, tokens: int) -> list[str]:
    return [line(f"r{i}", {"prompt": f"def f{i}(x):\n", "max_tokens": tokens}) for i in range(count)]


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def command(model: Path, source: Path, output: Path, *more: str) -> list[str]:
    return ["batch", "--model", str(model), "-i", str(source), "-o", str(output), "--memory", "60MB", *more]


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    status = main(command(*args))
    out = capsys.readouterr()
    return status, out.out, out.err


def test_answers_are_in_openais_format(
    capsys: pytest.CaptureFixture[str], model: Path, plain: Any, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "def f(x):"}]}], "max_tokens": 4}
    source = write(
        tmp_path / "in.jsonl",
        [
            line("chat", chat | {"model": "gpt-4o", "temperature": 0, "n": 1, "stream": False, "tools": []}, CHAT),
            "",
            line("text", {"prompt": "def read_lines(path):\n", "max_completion_tokens": 6}),
            line("ids", {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "seed": 4}),
        ],
    )
    status, out, err = run(capsys, model, source, tmp_path / "out.jsonl", "--resident", "2", "--json")
    assert status == 0 and "tokens per second" in err and "3 answers, 0 errors" in err
    found = {r["custom_id"]: r for r in records(tmp_path / "out.jsonl")}
    assert found.keys() == {"chat", "text", "ids"}
    for r in found.values():
        assert r["id"].startswith("batch_req_") and r["error"] is None
        assert r["response"]["status_code"] == 200 and r["response"]["request_id"].startswith("req_")
        body = r["response"]["body"]
        assert body["model"] == str(model) and body["created"] > 1_600_000_000
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    said, text = (found[name]["response"]["body"] for name in ("chat", "text"))
    assert (said["object"], text["object"]) == ("chat.completion", "text_completion")
    assert text["usage"]["completion_tokens"] == 6 and text["choices"][0]["finish_reason"] == "length"
    theirs, tokenizer = plain
    assert text["choices"][0]["text"] == mlx_lm.generate(theirs, tokenizer, "def read_lines(path):\n", max_tokens=6)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "def f(x):"}], add_generation_prompt=True)
    expected = mlx_lm.generate(theirs, tokenizer, asked, max_tokens=4)
    assert said["choices"][0]["message"] == {"role": "assistant", "content": expected}
    record = json.loads(out.splitlines()[-1])
    assert (record["requests"], record["completed"], record["failed"]) == (3, 3, 0)
    assert record["generation_tokens"] == 13 and record["prompt_tokens"] > 10 and record["generation_tps"] > 0
    assert record["tokens_per_sweep"] == pytest.approx(13 / record["sweeps"], abs=1e-4) and record["sequences"] > 1
    assert record["bytes_read"] > 0 and 0 < record["peak_memory_bytes"] <= record["budget_bytes"] == 60_000_000


def test_stop_strings_end_an_answer_and_are_not_part_of_it(
    capsys: pytest.CaptureFixture[str], model: Path, plain: Any, tmp_path: Path
) -> None:
    whole = mlx_lm.generate(*plain, "def read_lines(path):\n", max_tokens=12)
    stop = whole[5:9]
    body = {"prompt": "def read_lines(path):\n", "max_tokens": 12}
    lines = [line("s", body | {"stop": ["never there", stop]}), line("none", body)]
    assert run(capsys, model, write(tmp_path / "in", lines), tmp_path / "out")[0] == 0
    found = {r["custom_id"]: r["response"]["body"]["choices"][0] for r in records(tmp_path / "out")}
    assert (found["s"]["text"], found["s"]["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert found["none"]["text"] == whole


BAD_LINES: list[tuple[str, str, str]] = [
    ("{", "invalid_json", "not JSON"),
    ("[1]", "invalid_json", "not a JSON object"),
    (line("", {"prompt": "x"}), "invalid_request", "custom_id"),
    (line(7, {"prompt": "x"}), "invalid_request", "custom_id"),
    (line("r0", {"prompt": "another"}), "duplicate_custom_id", "line 1 has the same"),
    (line("a", {"prompt": "x"}, method="GET"), "invalid_request", "method"),
    (line("b", {"prompt": "x"}, url="/v1/embeddings"), "unsupported_url", "/v1/chat/completions"),
    (line("c", {"prompt": ""}), "invalid_request", "empty"),
    # With room it would end at once: token 90 is an x.
    (
        line("e", {"prompt": [5] * 4, "stop": "x", "max_tokens": 4000, "logit_bias": {"90": 100}}),
        NO_MEMORY,
        "4 prompt tokens and up to 4000 new ones do not fit into ",
    ),
    (line("f", {"prompt": "x", "n": 2}), "unsupported_parameter", "n: not supported"),
    (json.dumps({"custom_id": "g", "url": COMPLETION}), "invalid_request", "body"),
    (line("h", {"prompt": "a\ud800b"}), "invalid_request", "prompt: character 1 is half of a surrogate pair"),
    (line("i", {"messages": [{"role": "user", "content": "\udc00"}]}, CHAT), "invalid_request", "surrogate"),
    (line("j", {"prompt": "x", "temperature": 10**400}), "invalid_request", "temperature: "),
    (line("k", {"prompt": "x", "repetition_penalty": 2, "repetition_context_size": 10**30}), "invalid_request", "size"),
    (line("l", {"prompt": "x", "logit_bias": {"5": 10**400}}), "invalid_request", "logit_bias"),
    (line("m", {"prompt": [5] * 3, "max_tokens": 10**30}), "invalid_request", "max_tokens"),
    (line("\ud800", {"prompt": [10**9]}), "invalid_request", "no token 1000000000"),
]


def test_what_has_room_is_answered_and_what_needs_least_is_named(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    # Given long answers and a long prompt, which needs less than those.
    lines = [line(f"r{n}", {"prompt": [5] * 4, "max_tokens": 3000}) for n in range(2)]
    lines.append(line("least", {"prompt": [5] * 60, "max_tokens": 1}))
    source, output = write(tmp_path / "in", lines), tmp_path / "out"
    # When there is room for none, then nothing is written, and the budget is named that the least takes.
    too_small = smallest(model, 60, 1) - 200_000
    status, out, err = run(capsys, model, source, output, "--memory", f"{too_small}B")
    assert status == 1 and out == "" and not output.exists()
    assert "none of the 3 requests fits into " in err and "60 prompt tokens and up to 1 new ones" in err
    # When it is given, then that one is answered.
    least = err.rpartition("the smallest that works is ")[2].strip()
    assert 0 <= parse_size(least) - smallest(model, 60, 1) < 100_000
    assert run(capsys, model, source, output, "--memory", least)[0] == 1
    assert [r["custom_id"] for r in records(output) if r["error"] is None] == ["least"]
    assert [r["error"]["code"] for r in records(output) if r["error"]] == [NO_MEMORY, NO_MEMORY]


def test_bad_lines_are_reported_and_harm_no_other(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in", [*completions(2, 3), *(text for text, _, _ in BAD_LINES)])
    with source.open("ab") as file:
        file.write(b'{"custom_id": "\xff"}\n')
    short = (smallest(model, 4, 4000) + smallest(model, 8, 8)) // 2
    status, out, _ = run(capsys, model, source, tmp_path / "out", "--memory", f"{short}B", "--json")
    assert status == 1, "some lines failed"
    record = json.loads(out.splitlines()[-1])
    assert (record["completed"], record["failed"]) == (2, len(BAD_LINES) + 1)
    errors = {r["error"]["message"].split(":")[0]: r for r in records(tmp_path / "out") if r["error"]}
    for number, (_, code, message) in enumerate(BAD_LINES, 3):
        found = errors[f"line {number}"]
        assert found["response"] is None and found["error"]["code"] == code and message in found["error"]["message"]
    assert "not JSON" in errors[f"line {len(BAD_LINES) + 3}"]["error"]["message"]
    # What there was no memory for is tried again, in its place; all else stays.
    first = records(tmp_path / "out")
    before = {r["custom_id"]: r for r in first if (r["error"] or {}).get("code") != NO_MEMORY}
    refused = next(r["error"]["message"] for r in first if (r["error"] or {}).get("code") == NO_MEMORY)
    least = refused.partition(": give ")[2].partition(" and --resume")[0]
    assert 0 <= parse_size(least) - smallest(model, 4, 4000) < 200_000, "what is named is no more than it takes"
    status, out, _ = run(capsys, model, source, tmp_path / "out", "--resume", "--json", "--memory", least)
    record = json.loads(out.splitlines()[-1])
    assert status == 1 and (record["completed"], record["failed"]) == (3, len(BAD_LINES)) and record["sequences"] == 1
    after = records(tmp_path / "out")
    assert len(after) == len(BAD_LINES) + 3 and {r["custom_id"]: r for r in after if r["custom_id"] in before} == before
    assert next(r for r in after if r["custom_id"] == "e")["error"] is None
    # Nothing is left to do, so no model is loaded.
    status, out, _ = run(capsys, model, source, tmp_path / "out", "--resume", "--json")
    assert status == 1 and json.loads(out.splitlines()[-1])["sequences"] == 0
    assert records(tmp_path / "out") == after


def test_an_output_without_room_for_what_is_tried_again_stays_as_it_was(tmp_path: Path) -> None:
    source, path = write(tmp_path / "in", completions(2, 1)), tmp_path / "link"
    (tmp_path / "there").write_text("")
    path.symlink_to(tmp_path / "there")
    with Output(path, source, "m") as output:
        output.begin()
        for i, code in enumerate(("invalid_request", NO_MEMORY, "internal_error", "invalid_json")):
            output.write({"id": str(i), "response": None, "error": {"code": code}})
    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with Output(path, source, "m", resume=True) as output, pytest.raises(OutputError, match="No space left"):
            output.begin()
    assert path.read_bytes() == before and {f.name for f in tmp_path.iterdir()} == {"in", "link", "there"}
    with Output(path, source, "m", resume=True) as output:
        assert output.done == {"0": False, "3": False}
        output.begin()
        with pytest.raises(UsageError, match="another outcore batch"):
            Output(path, source, "m", resume=True)
        output.write({"id": "1", "response": {"body": {"model": "m"}}, "error": None})
    assert path.is_symlink() and [r["id"] for r in records(path)] == ["0", "3", "1"]


@pytest.mark.parametrize("what", ["folder", "/dev/null", "/dev/full", "fifo"])
def test_an_output_that_is_no_file_is_refused(what: str, tmp_path: Path) -> None:
    path = Path(what) if what.startswith("/") else tmp_path / what
    if what == "folder":
        path.mkdir()
    if what == "fifo":
        os.mkfifo(path)
    with pytest.raises(UsageError, match="no file"):
        Output(path, write(tmp_path / "in", completions(1, 1)), "m", overwrite=True)


def test_whatever_a_line_brings_up_is_that_lines_error(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that no known input makes fail any more: what if one did."""

    def failing(original: Any, when: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            if when(self, *args):
                raise RuntimeError("of this line\nonly")
            return original(self, *args)

        return call

    failing_of = failing(batch_command.request_of, lambda uid, prompt, ask: ask.sampling.top_k in (1, 2))
    monkeypatch.setattr(batch_command, "request_of", failing_of)
    hot = {"prompt": "x", "max_tokens": 3, "temperature": 1, "seed": 1}
    bad = [line(f"bad{k}", hot | {"top_k": k}) for k in (1, 2)]
    source = write(tmp_path / "in", [bad[0], *completions(2, 3), bad[1]])
    status, out, _ = run(capsys, model, source, tmp_path / "out", "--resident", "2")
    assert status == 1 and "2 answers, 2 errors" in out
    for r in records(tmp_path / "out"):
        assert (r["error"] is None) != r["custom_id"].startswith("bad")
        if r["error"]:
            assert r["error"]["code"] == "internal_error" and "RuntimeError: of this line only" in r["error"]["message"]
    monkeypatch.undo()
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "cache"))
    assert "4 answers, 0 errors" in run(capsys, model, source, tmp_path / "out", "--resident", "2", "--resume")[1]


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ([], "invalid_request", "not a JSON object"),
        ({"prompt": "x", "temperature": "hot"}, "invalid_request", "temperature: "),
        ({"prompt": "x", "max_tokens": 0}, "invalid_request", "max_tokens: "),
        ({"prompt": "x", "max_tokens": -1}, "invalid_request", "max_tokens: "),
        ({"prompt": "x", "stop": [""]}, "invalid_request", "stop: "),
        ({"prompt": "x", "logit_bias": {"99999999": 1}}, "invalid_request", "no token 99999999"),
        ({"prompt": ["a", "b"]}, "unsupported_parameter", "prompt: "),
        ({"prompt": "x", "n": 2}, "unsupported_parameter", "n: not supported"),
        ({"prompt": "x", "stream": True}, "unsupported_parameter", "stream: not supported"),
        ({"prompt": "x", "logprobs": 0}, "unsupported_parameter", "logprobs: not supported"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format: "),
        ({"prompt": "x", "temprature": 1}, "unknown_parameter", "temprature: no such parameter"),
        ({"messages": []}, "invalid_request", "prompt: is required"),
    ],
)
def test_a_body_that_cannot_be_meant_is_refused(body: Any, code: str, message: str, tokenizer: Any) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        line_request(0, BatchRequest("", 1, None, COMPLETION, body), Prompter(tokenizer), 9)
    assert refused.value.code == code


def test_parameters_reach_samplers_and_processors(tokenizer: Any) -> None:
    def read(body: Any, url: str = COMPLETION) -> Any:
        return line_request(0, BatchRequest("", 1, None, url, body), Prompter(tokenizer), 9)

    plain = read({"prompt": "x", "user": "me", "stop": None, "repetition_penalty": 1})
    assert plain.sampler is None and plain.processors == () and plain.max_tokens == 9 and plain.stop == ()
    body = {"logit_bias": {"5": -2}, "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    full = read({"prompt": "x", "temperature": 1, "stop": "a"} | body)
    assert full.sampler is not None and len(full.processors) == 4 and full.stop == ("a",)
    chat = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"more": 1}}
    expected = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True)
    assert list(read(chat, CHAT).tokens) == expected


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run gets that nobody ends, by custom_id."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(model, write(folder / "in", completions(*MANY)), folder / "out", *SHARED)) == 0
    return texts(folder / "out")


def texts(output: Path) -> dict[str, str]:
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records(output)}


MANY, SHARED = (6, 4), ("--concurrency", "3", "--resident", "2")


def killed(model: Path, source: Path, output: Path) -> None:
    """A run that SIGKILL ends in the middle."""
    environment = os.environ | {"PYTHONPATH": python_path(Path(outcore.__file__).parents[1])}
    # Each further line takes a while: of so small a model all are there before a signal comes.
    slowly = (
        "import time; from outcore_batch.files import Output; from outcore.cli.main import entry\n"
        "write = Output.write\n"
        "Output.write = lambda self, record: (write(self, record), time.sleep(0.2))\n"
        "entry()"
    )
    with heard():
        process = subprocess.Popen(
            [sys.executable, "-c", slowly, *command(model, source, output, *SHARED)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    with process:
        try:
            until = time.monotonic() + 60
            while not (output.exists() and output.read_bytes().count(b"\n") >= 2):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.01)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def interrupted(model: Path, source: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that Ctrl-C ends in the middle."""
    own, lines = Output.write, [2]

    def pressed(self: Output, record: Any) -> None:
        own(self, record)
        lines[0] -= 1
        if not lines[0]:
            signal.raise_signal(signal.SIGINT)

    with heard(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "write", pressed)
        status, _, err = run(capsys, model, source, output, *SHARED)
    assert status == 130 and "--resume continues" in err and "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_goes_on_without_loss_and_without_doubles(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, number: signal.Signals, undisturbed: dict[str, str]
) -> None:
    source, output = write(tmp_path / "in", completions(*MANY)), tmp_path / "out"
    if number == signal.SIGKILL:
        killed(model, source, output)
    else:
        interrupted(model, source, output, capsys)
    kept = output.read_bytes()
    assert 2 <= kept.count(b"\n") < MANY[0]
    # The disk had part of one more line when it ended.
    output.write_bytes(kept + kept[: len(kept.splitlines()[0]) // 2])
    status, out, _ = run(capsys, model, source, output, *SHARED, "--resume", "--json")
    assert status == 0
    record = json.loads(out.splitlines()[-1])
    assert record["resumed"] == kept.count(b"\n") and record["completed"] == MANY[0]
    assert output.read_bytes().startswith(kept)
    assert len(records(output)) == MANY[0] and texts(output) == undisturbed


def test_an_output_that_is_there_is_kept_unless_asked_otherwise(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in", completions(1, 1)), tmp_path / "out"
    assert run(capsys, model, source, output)[0] == 0
    before = output.read_bytes()
    status, _, err = run(capsys, model, source, output)
    assert status == 2 and "--resume" in err and "--overwrite" in err
    # A model that cannot be loaded replaces nothing, and leaves no empty file behind.
    assert run(capsys, model, source, output, "--overwrite", "--memory", "1MB")[0] == 1
    assert output.read_bytes() == before
    assert run(capsys, model, source, tmp_path / "new", "--memory", "1MB")[0] == 1
    assert not (tmp_path / "new").exists()
    status, _, err = run(capsys, tmp_path, source, output, "--resume")
    assert status == 2 and "was made with" in err
    write(source, completions(2, 1)[1:])
    status, _, err = run(capsys, model, source, output, "--resume")
    assert status == 2 and "no longer in the input" in err and output.read_bytes() == before
    assert run(capsys, model, source, output, "--overwrite")[0] == 0
    assert [r["custom_id"] for r in records(output)] == ["r1"]
    assert main(command(model, source, output, "--overwrite", "--resume")) == 2


def test_files_that_cannot_be_used_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in", completions(1, 1)), tmp_path / "out"
    (tmp_path / "text").write_text("no JSON\n")
    for args, message in (
        ((tmp_path / "none", output), "No such file"),
        ((tmp_path, output), "Is a directory"),
        ((source, source), "is the input"),
        ((source, tmp_path / "no" / "out"), "No such file"),
        ((source, tmp_path), "exists and is no file"),
        ((source, tmp_path, "--resume"), "exists and is no file"),
        ((source, tmp_path / "text", "--resume"), "outcore batch did not write line 1"),
        ((source, output, "--max-tokens", "0"), "--max-tokens 0: must be at least 1"),
        ((source, output, "--concurrency", "0"), "--decode-concurrency 0: must be at least 1"),
    ):
        status, out, err = run(capsys, model, *args)
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1
        assert not output.exists()


def test_only_one_process_writes_to_an_output(tmp_path: Path) -> None:
    source = write(tmp_path / "in", completions(1, 1))
    with Output(tmp_path / "out", source, "m"), pytest.raises(outcore.UsageError, match="another outcore batch"):
        Output(tmp_path / "out", source, "m", resume=True)


def test_a_full_disk_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = write(tmp_path / "in", completions(1, 1)), tmp_path / "out"
    with Output(path, source, "m") as output:
        output.begin()
        output.write({"id": "a", "response": None, "error": {}})
        before = path.read_bytes()
        with monkeypatch.context() as m, pytest.raises(OutputError, match=r"No space left .* 1 lines are kept"):
            m.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            output.write({"id": "b", "response": None, "error": {}})
    assert path.read_bytes() == before
    with Output(path, source, "m", resume=True) as output:
        assert output.done == {"a": False}


def test_lines_are_known_by_what_they_say(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(
        b"\xef\xbb\xbf" + "\n".join(completions(2, 1)).encode() + b"\r\n\n" + completions(1, 1)[0].encode()
    )
    first, second, again = read_lines(source)
    assert (first.custom_id, second.custom_id, again.custom_id) == ("r0", "r1", "r0")
    assert again.id == f"{first.id}-2" and again.number == 4 and again.error is not None and first.error is None


def test_flags_are_the_engines() -> None:
    args = parser_of("batch").parse_args(["--model", "m", "-i", "a", "-o", "b"])
    assert (args.max_tokens, args.decode_concurrency, args.memory, args.io) == (512, 32, None, "auto")
