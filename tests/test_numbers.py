"""dev/numbers.py: numbers in README and docs are those of the results, and none stands there without one."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "dev" / "numbers.py"


# Not imported by its own name, which is that of a module of the standard library.
sys.path.append(str(SCRIPT.parent))
numbers: Any = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
sys.path.remove(str(SCRIPT.parent))

DATA = {
    "a": {"b-c": 1.534, "n": 123, "bytes": 4_154_757_739, "name": "it"},
    "rows": [
        {"mode": "outcore", "units": 0, "ok": True, "s": {"median": 2.0}, "bits": None},
        {"mode": "outcore", "units": 8, "ok": True, "s": {"median": 1.0}, "bits": 4},
        {"mode": "mlx-lm", "units": 0, "ok": False, "s": {"median": 0.5}, "bits": None},
    ],
    "list": [3, 1, 2],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    results = tmp_path / numbers.RESULTS
    results.mkdir(parents=True)
    (results / "r.json").write_text(json.dumps(DATA))
    (results / "out.txt").write_text("first line \n\n  second 1.5\n")
    (tmp_path / numbers.TABLES).write_text(DEFINED)
    return tmp_path


DEFINED = """
[files]
r = "r.json"
gone = "gone.json"

[values]
b = "{r: a.b-c .2f}"
n = "{r: a.n d} GB"
lost = "{gone: a.n d}"
empty = "{r: a.nothing d}"
unknown = "{no: a.n d}"

[tables.wrong]
columns = ["model"]
rows = [["a", "b"]]

[tables.two]
columns = ["model", "tok/s"]
align = "lr"
rows = [["{r: a.name s}, {r: a.n d}", "{r: rows[0].s.median .2f}"], ["plain", ""]]

[tables.printed]
text = "out.txt"
"""

TWO = "<!-- table: two -->\n| model | tok/s |\n| --- | ---: |\n| it, 123 | 2.00 |\n| plain |  |\n"


def lines(root: Path, text: str) -> list[str]:
    return [f"{f.line}: {f.message}" for f in numbers.check(text, numbers.Definitions(root))]


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        ("a.b-c .2f", "1.53"),
        ("a.n d", "123"),
        ("a.name s", "it"),
        ("a.bytes / 1e9 .2f", "4.15"),
        ("a.bytes/1e9 .1f", "4.2"),
        ("a.b-c * 100 .0f", "153"),
        ("a.b-c*100 ,.0f", "153"),
        ("a.bytes ,d", "4,154,757,739"),
        ("rows[0].s.median / rows[1].s.median .1f", "2.0"),
        ("rows[-1].mode s", "mlx-lm"),
        ("rows[mode=outcore,units=0].s.median .2f", "2.00"),
        ("rows[mode=outcore, bits=null].s.median .2f", "2.00"),
        ("rows[mode=mlx-lm].s.median .2f", "0.50"),
        ("rows[s.median=1.0].units d", "8"),
        ("max(rows[*].s.median) .1f", "2.0"),
        ("min(rows[mode=outcore].s.median, a.n, 7) .1f", "1.0"),
        ("sum(list) / 2 .1f", "3.0"),
        ("count(rows[ok=true]) d", "2"),
        ("count(rows[mode=none]) d", "0"),
        ("count(rows) d", "3"),
    ],
)
def test_titles_say_what_is_shown(title: str, shown: str) -> None:
    assert numbers.evaluate(title, DATA) == shown


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("a.b-c", "a format"),
        ("a.none .2f", "no 'none'"),
        ("rows[mode=none].s.median .2f", "0 entries"),
        ("rows[mode=outcore].s.median .2f", "2 entries"),
        ("rows[9].s .2f", "3 entries"),
        ("a[0] .2f", "not a list"),
        ("rows[mode] .2f", "key=value"),
        ("a.name .2f", "not a number"),
        ("rows[0].ok .0f", "not a number"),
        ("a.n / 0 .1f", "division"),
        ("eval(1) .1f", "no function"),
        ("max(rows[mode=none].units) .1f", "of nothing"),
        ("__import__ .1f", "no '__import__'"),
        ("max(1 .1f", "cannot read"),
        ("1 2 .1f", "cannot read"),
        ("a.n @ 2 .1f", "cannot read"),
        ("* .1f", "cannot read"),
    ],
)
def test_titles_that_nothing_answers_are_refused(title: str, message: str) -> None:
    with pytest.raises(numbers.NumberError, match=message):
        numbers.evaluate(title, DATA)


def test_a_stale_number_is_found_with_its_line_and_what_it_should_be(root: Path) -> None:
    text = "Title\n\nIt took <!-- n: b -->1.60<!-- /n --> s, then <!-- n: b -->1.53<!-- /n --> s.\n"
    assert lines(root, text) == ["3: 1.60 should be 1.53: b"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none", "no value 'none'"),
        ("lost", "gone.json cannot be read"),
        ("empty", "no 'nothing'"),
        ("unknown", "no file 'no'"),
    ],
)
def test_a_number_that_no_result_stands_behind_is_found(root: Path, name: str, says: str) -> None:
    (found,) = lines(root, f"It took <!-- n: {name} -->1.5<!-- /n -->\n")
    assert says in found


def test_a_number_must_not_begin_its_line(root: Path) -> None:
    (found,) = lines(root, "It took\n<!-- n: b -->1.53<!-- /n --> s.\n")
    assert "2: b begins its line" in found


def test_a_table_must_be_what_the_results_make_it(root: Path) -> None:
    assert lines(root, TWO + "\nMore.\n") == []
    for stale in (TWO.replace("2.00", "2.01"), TWO.replace("it, 123", "it"), TWO + "| a row | 1.5 |\n"):
        assert lines(root, "Title\n\n" + stale) == ["3: the block is not two of docs/tables.toml"]


@pytest.mark.parametrize(
    ("name", "says"), [("none", "no table 'none'"), ("wrong", "2 cells under 1 columns"), ("no file#b", "no table")]
)
def test_a_table_that_cannot_be_made_is_found(root: Path, name: str, says: str) -> None:
    (found,) = lines(root, f"<!-- table: {name} -->\n")
    assert says in found


@pytest.mark.parametrize(
    "text",
    ["1.5 faster", "9 s", "about 3 ms", "2,000 tok/s", "9 × faster", "40 %", "3 tokens per second", "| 4.29 |", "~7x"],
)
def test_a_measured_looking_number_needs_a_result(root: Path, text: str) -> None:
    assert len(lines(root, text)) == 1
    for excuse in (f"{text} <!-- not measured -->", f"<!-- not measured -->\n{text}\n{text}", f"`{text}`"):
        assert lines(root, excuse) == []
    assert lines(root, f"```\n{text}\n```") == [] == lines(root, f"see\n\n    {text}\n")
    # An excuse ends with its paragraph.
    assert len(lines(root, f"<!-- not measured -->\n{text}\n\n{text}")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Python 3.11 or newer, MLX 0.32.4 and Qwen3.5-9B",
        "Version 1.0, v0.32.2, Python ≥ 3",
        "16 layers of 8 steps, 3 slots, chunks of 256 tokens",
        "see [section 1.2](docs/x.md) and <https://a.b/1.5> or https://a.b/2.5/c",
        "2026-11-21, 0, 50",
    ],
)
def test_versions_counts_and_links_are_no_measurements(root: Path, text: str) -> None:
    assert lines(root, text) == []


def test_numbers_beside_a_table_are_looked_at(root: Path) -> None:
    assert len(lines(root, f"1.5 faster\n\n{TWO}\n9 s\n")) == 2


def test_a_block_must_be_the_text_of_its_file(root: Path) -> None:
    block = "<!-- table: printed -->\n```text\nfirst line\n\n  second 1.5\n```\n"
    assert lines(root, block) == []
    assert lines(root, block.replace("second", "other")) == ["1: the block is not printed of docs/tables.toml"]
    assert len(lines(root, "<!-- table: printed -->\nno block\n")) == 1


def test_write_brings_a_page_up_to_date(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = root / "README.md"
    definitions = root / numbers.TABLES
    definitions.write_text(DEFINED.split("lost =")[0] + DEFINED[DEFINED.index("[tables.two]") :])
    definitions.write_text(definitions.read_text().replace('gone = "gone.json"\n', ""))
    page.write_text(
        "A **<!-- n: n -->9<!-- /n -->**, <!-- n: b -->1<!-- /n -->.\n\n<!-- table: printed -->\n```text\nold\n```\n\n"
        "<!-- table: two -->\n\nEnd.\n"
    )
    assert numbers.main([], root) == 1 and "README.md:1: 9 should be 123 GB" in capsys.readouterr().out
    assert "old" in page.read_text()
    assert numbers.main(["--write"], root) == 0
    assert numbers.main([], root) == 0
    assert page.read_text() == (
        "A **<!-- n: n -->123 GB<!-- /n -->**, <!-- n: b -->1.53<!-- /n -->.\n\n<!-- table: printed -->\n```text\n"
        f"first line\n\n  second 1.5\n```\n\n{TWO}\nEnd.\n"
    )
    definitions.write_text(definitions.read_text().replace("[values]", '[values]\nmore = "{r: a.n d}"'))
    assert numbers.main([], root) == 1 and "more is shown nowhere" in capsys.readouterr().out
    page.write_text("It took 1.5 s\n")
    assert numbers.main(["--write"], root) == 1, "what has no result cannot be written"


def test_the_repositorys_own_numbers_are_those_of_its_results() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
