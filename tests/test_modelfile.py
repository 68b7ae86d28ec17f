"""Modelfiles as they are read: what each instruction means, and that each line is honoured or refused by its number."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.errors import UsageError
from outcore_compat.modelfile.options import (
    PARAMETERS,
    Modelfile,
    parse_modelfile,
    read_modelfile,
)
from outcore_compat.modelfile.syntax import INSTRUCTIONS, UNSUPPORTED, LineError, decoded, parse


def said(*lines: str) -> Modelfile:
    return parse_modelfile("\n".join(["FROM owner/name", *lines]))


def instructions(text: str) -> list[tuple[str, str, str, int]]:
    return [(i.name, i.argument, i.value, i.line) for i in parse(text)]


def refused(*lines: str) -> str:
    with pytest.raises(LineError) as e:
        said(*lines)
    return str(e.value)


def test_lines_are_instructions_in_any_case_and_comments_are_none() -> None:
    text = "# one\n\n  from\t  a name   \nParameter TEMPERATURE 0.5\n\t# two\nSystem be # brief\nmessage user hi: there"
    assert instructions(text) == [
        ("from", "", "a name", 3),
        ("parameter", "temperature", "0.5", 4),
        ("system", "", "be # brief", 6),
        ("message", "user", "hi: there", 7),
    ]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"""\none\n# no comment\nFROM two\n"""   ', "\none\n# no comment\nFROM two\n"),
        ('"""one\n\n"two" """', 'one\n\n"two" '),
        ('"  one  "', "  one  "),
        ('"one\ntwo"', "one\ntwo"),
        ('""', ""),
        ('""""""', ""),
        ('"\'"', "'"),
        ('"""\'\'"\'""\'""\'"\'\'\'\'\'""\'""\'"""', "''\"'\"\"'\"\"'\"'''''\"\"'\"\"'"),
        ('one "two"', 'one "two"'),
        ("'one'", "'one'"),
    ],
)
def test_a_value_in_quotation_marks_may_have_several_lines(written: str, value: str) -> None:
    assert instructions(f"SYSTEM {written}\nFROM a") == [
        ("system", "", value, 1),
        ("from", "", "a", written.count("\n") + 2),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_encodings_and_line_ends_that_editors_write(encoding: str, end: str) -> None:
    data = end.join(["FROM a", 'SYSTEM """é', '😀"""', ""]).encode(encoding)
    assert instructions(decoded(data)) == [("from", "", "a", 1), ("system", "", "é\n😀", 2)]


HONOURED: list[tuple[str, str, Any]] = [
    ("num_ctx 4096", "num_ctx", 4096),
    ("num_predict 42", "num_predict", 42),
    ("num_predict -1", "num_predict", -1),
    ("num_predict -2", "num_predict", -1),
    ("temperature 0", "temperature", 0.0),
    ('temperature "0.7"', "temperature", 0.7),
    ("top_k 40", "top_k", 40),
    ("top_k -1", "top_k", 0),
    ("top_p 0.9", "top_p", 0.9),
    ("min_p .05", "min_p", 0.05),
    ("seed 42", "seed", 42),
    ("seed -1", "seed", -1),
    ("repeat_penalty 1.1", "repeat_penalty", 1.1),
    ("repeat_last_n -1", "repeat_last_n", -1),
    ("presence_penalty 0.5", "presence_penalty", 0.5),
    ("frequency_penalty -0.5", "frequency_penalty", -0.5),
    ("draft_num_predict 4", "draft_num_predict", 4),
    ("stop ### User: ", "stop", ("### User:",)),
    ('stop "### User: "', "stop", ("### User: ",)),
    ('stop """a\nb"""', "stop", ("a\nb",)),
]


@pytest.mark.parametrize(
    ("parameter", "attribute", "value"),
    HONOURED,
)
def test_parameters(parameter: str, attribute: str, value: Any) -> None:
    found = said(f"PARAMETER {parameter}")
    assert found.get(attribute) == value
    assert found.lines == {"model": 1, attribute: 2}


def test_every_parameter_is_honoured_or_refused_saying_what_there_is_instead() -> None:
    assert {p.split()[0] for p, *_ in HONOURED} == {"stop", *PARAMETERS}
    for name in ("num_gpu", "mirostat", "f16_kv"):
        assert refused(f"PARAMETER {name} 1").startswith(f"line 2: PARAMETER {name}: not supported; leave it out")


@pytest.mark.parametrize(
    ("lines", "penalties"),
    [
        ([], {}),
        (["repeat_penalty 1"], {}),
        (["repeat_penalty 0"], {}),
        (["repeat_last_n 5"], {}),
        (["repeat_penalty 1.1"], {"repetition_penalty": 1.1, "repetition_context_size": 64}),
        (["repeat_penalty 1.1", "repeat_last_n 0"], {}),
        (["repeat_penalty 1.1", "repeat_last_n 7"], {"repetition_penalty": 1.1, "repetition_context_size": 7}),
        (["presence_penalty 1", "repeat_last_n -1"], {"presence_penalty": 1.0, "presence_context_size": 2**31 - 1}),
        (["frequency_penalty 1"], {"frequency_penalty": 1.0, "frequency_context_size": 64}),
    ],
)
def test_penalties_look_as_far_back_as_ollamas(lines: list[str], penalties: dict[str, float]) -> None:
    assert said(*[f"PARAMETER {line}" for line in lines]).penalties() == penalties


def test_what_is_said_before_and_around_a_conversation() -> None:
    found = said(
        "SYSTEM be brief",
        "MESSAGE user is it?",
        'MESSAGE assistant "yes\nit is"',
        "LICENSE MIT",
        'LICENSE """and\nthis"""',
        "PARAMETER stop a",
        "PARAMETER stop b",
    )
    assert found.system == "be brief"
    assert found.messages == ({"role": "user", "content": "is it?"}, {"role": "assistant", "content": "yes\nit is"})
    assert found.stop == ("a", "b")
    assert found.lines == {"model": 1, "system": 2, "messages": 3, "license": 6, "stop": 9}


def test_folders_lie_beside_the_modelfile_and_names_stay_names(tmp_path: Path) -> None:
    for folder in ("model", "adapter"):
        (tmp_path / folder).mkdir()
    (tmp_path / "adapter.gguf").touch()
    path = tmp_path / "Modelfile"

    def read(text: str) -> Modelfile:
        path.write_text(text)
        return read_modelfile(path)

    found = read("FROM model\nADAPTER ./adapter\nDRAFT mlx-community/small")
    assert (found.model, found.adapter) == (str(tmp_path / "model"), str(tmp_path / "adapter"))
    assert found.draft == "mlx-community/small"
    assert read("FROM owner/model").model == "owner/model"
    assert read("FROM ./gone").model == str(tmp_path / "gone")
    assert read(f"FROM {tmp_path}/model").model == f"{tmp_path}/model"
    assert read("FROM ~/gone").model == str(Path.home() / "gone")
    for adapter, why in (("gone", "no such folder"), ("adapter.gguf", "adapters.safetensors")):
        with pytest.raises(UsageError, match=f"Modelfile: line 2: ADAPTER: {adapter}.*{why}"):
            read(f"FROM model\nADAPTER {adapter}")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("BADCOMMAND a b", "line 2: unknown instruction BADCOMMAND; there are FROM"),
        ("TEMPLAT a", r"line 2: unknown instruction TEMPLAT \(did you mean template\?\)"),
        ("TEMPLATE {{ .Prompt }}", "line 2: TEMPLATE: the model's own chat template is used; leave it out"),
        ("SYSTEM", "line 2: SYSTEM: it has no value"),
        ("PARAMETER", "line 2: PARAMETER takes two words"),
        ("PARAMETER temperature", "line 2: PARAMETER takes two words"),
        ("MESSAGE user", "line 2: MESSAGE takes two words"),
        ("MESSAGE badguy hi", "line 2: MESSAGE badguy: the role is system, user or assistant"),
        (
            "PARAMETER temprature 1",
            r"line 2: PARAMETER temprature: not supported; .*\(did you mean temp",
        ),
        ("PARAMETER temperature warm", "line 2: PARAMETER temperature: warm: a number is needed"),
        ("PARAMETER temperature nan", "line 2: PARAMETER temperature: nan: a number is needed"),
        ("PARAMETER temperature -1", "line 2: PARAMETER temperature: -1.0: must be at least 0"),
        ("PARAMETER temperature 1e9999", "line 2: PARAMETER temperature: inf: a finite number is needed"),
        ("PARAMETER top_k 1.5", "line 2: PARAMETER top_k: 1.5: a whole number is needed"),
        ("PARAMETER top_k 99999999999999999999", "line 2: PARAMETER top_k: 9+: must be at most 2147483647"),
        ("PARAMETER top_p 1.1", "line 2: PARAMETER top_p: 1.1: must be from 0 to 1"),
        ("PARAMETER num_ctx 0", "line 2: PARAMETER num_ctx: 0: must be at least 1"),
        ("PARAMETER num_predict 0", "line 2: PARAMETER num_predict: 0: ask for at least one token"),
        ("PARAMETER num_predict -3", "line 2: PARAMETER num_predict: -3: must be at least -2"),
        ("PARAMETER draft_num_predict -1", "line 2: PARAMETER draft_num_predict: -1: must be at least 0"),
        ('PARAMETER stop ""', "line 2: PARAMETER stop: give the text that ends an answer"),
        ("FROM other", "line 2: FROM: line 1 has this instruction already"),
        ("SYSTEM a\nSYSTEM b", "line 3: SYSTEM: line 2 has this instruction already"),
        ("PARAMETER seed 1\nPARAMETER seed 2", "line 3: PARAMETER seed: line 2 has this instruction already"),
        ('SYSTEM """\nnever closed\n""\n', 'line 2: the text that begins with """ is never closed'),
        ('SYSTEM "\nFROM a', 'line 2: the text that begins with " is never closed'),
        ("FLASH_RAM_GB 4", "line 2: unknown instruction FLASH_RAM_GB; there are FROM"),
        ("FROM\u00a0other", "line 2: unknown instruction FROM.*other"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_line(line: str, told: str) -> None:
    with pytest.raises(LineError, match=told):
        said(*line.split("\n"))


def test_instructions_that_only_ollama_has_are_refused() -> None:
    for name, why in UNSUPPORTED.items():
        assert refused("", f"{name} x") == f"line 3: {name.upper()}: {why}"


def test_a_modelfile_without_from_is_refused() -> None:
    for text in ("", "# nothing\n", "SYSTEM a\nPARAMETER seed 1"):
        with pytest.raises(LineError, match="there is no FROM"):
            parse_modelfile(text)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"FROM a\n\x00\x01", "line 2: not text: it holds the control character 0"),
        (b"FROM a\n\n\xff\xfeq", "line 3: not UTF-8 text at byte 8"),
        (bytes(range(256)) * 4, "line 2: not UTF-8 text at byte 128"),
        (b"FROM a\n" + b"# more\n" * 200_000, "more than the 1.05 MB that such a file may have"),
    ],
)
def test_a_file_that_is_no_modelfile(data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "Modelfile"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=told):
        read_modelfile(path)


def test_a_file_that_cannot_be_read_or_has_no_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, told in (
        ("/dev/zero", "not a regular file"),
        (str(tmp_path / "pipe"), "not a regular file"),
        (str(tmp_path), "directory"),
        (str(tmp_path / "gone"), "No such file"),
        ("~nobody-of-this-name/Modelfile", "home"),
        ("a\0b", "null"),
    ):
        with pytest.raises(UsageError, match=told):
            read_modelfile(path)


def test_the_longest_file_is_read_in_no_time() -> None:
    for text in ('SYSTEM "\n' + "\n" * 1_000_000, "PARAMETER stop " + "a" * 1_000_000):
        began = time.process_time()
        with pytest.raises(LineError):
            said(text)
        assert time.process_time() - began < 5


PIECES = st.sampled_from(
    [*INSTRUCTIONS, *PARAMETERS, "stop", "user", "{{ .System }}", "{{ if", "{{- end -}}", "}}", '"', '"""', "\n", " ",
     "#", "1", "-1", "0.5", "true", "é", "\t", "\r", "\x00", "(", "and"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.text(max_size=5), max_size=30).map(" ".join) | st.text(max_size=60))
def test_whatever_is_written_is_read_or_refused_with_a_line(text: str) -> None:
    text = "FROM a\n" + text
    try:
        found = parse_modelfile(decoded(text.encode("utf-8", "replace")))
    except LineError as e:
        assert 1 <= e.line <= text.count("\n") + text.count("\r") + 1
        assert str(e).startswith(f"line {e.line}: ") and len(str(e)) < 500
    else:
        assert found.lines["model"] == 1
