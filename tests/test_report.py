"""The report: what it says is what the documents say, and what they lack it leaves out."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from outcore.cli.main import main
from outcore_bench.document import (
    BUSY,
    SCHEMA,
    BenchRow,
    Document,
    Inputs,
    Machine,
    Model,
    Perplexities,
    PerplexityRow,
    Stat,
    read_inputs,
    write_record,
)
from outcore_bench.report.page import markdown, page, sections, summary
from outcore_bench.report.tables import number, size

LINUX = Machine(
    cpu="Intel Xeon 8481C",
    cores=2,
    gpu=None,
    device="Device(cpu, 0)",
    memory_bytes=8_200_000_000,
    filesystem="ext4 on /dev/vda",
    kernel="Linux 6.1.0",
    python="3.11.2",
    versions={"mlx": "0.32.4", "mlx-lm": "0.32.2"},
    git_commit="fcf302e1deadbeef",
    git_changed_files=0,
)
SERVER = dataclasses.replace(
    LINUX, cpu="AMD EPYC", cores=16, gpu="NVIDIA H200", device="Device(gpu, 0)", memory_bytes=134_000_000_000
)
MODEL = Model(
    "qwen3.5-9b-8bit", "qwen3_5", 8_970_000_000, 32, 7_000_000_000, 1_970_000_000, {"bits": 8, "group_size": 64}, "bf16"
)


def streamed(resident: int, tps: float, **more: object) -> BenchRow:
    values: dict[str, object] = {
        "mode": "outcore",
        "label": f"outcore, {100 * resident // 32} % resident",
        "command": "outcore bench",
        "memory": f"{2 + resident * 0.21875:.1f}GB",
        "resident_units": resident,
        "streamed_units": 32 - resident,
        "s_per_token": Stat(1 / tps, 0.97 / tps, 1.04 / tps, 3),
        "decode_tps": Stat(tps, 0.96 * tps, 1.03 * tps, 3),
        "ceiling_s": 0.96 / tps,
        "efficiency": 0.96,
        "stall_share": 0.31 - resident * 0.006,
        "io_share": 0.97 - resident * 0.012,
        "disk_gbps": 2.31,
        "peak_memory_bytes": int(1.9e9 + resident * 0.21875e9),
        "same_tokens": True,
    }
    return BenchRow.of(values | more)


def full(tps: float = 1.47) -> BenchRow:
    row = {"mode": "mlx-lm", "label": "mlx-lm, all in memory", "command": "outcore bench", "same_tokens": True}
    return BenchRow.of(row | {"decode_tps": Stat(tps, tps, tps, 1), "peak_memory_bytes": 9_120_000_000})


def plain(resident: int, tps: float, **more: object) -> BenchRow:
    values: dict[str, object] = {"mode": "plain", "label": f"the plain way, {100 * resident // 32} % resident"}
    return streamed(resident, tps, **(values | {"ceiling_s": None, "efficiency": None} | more))


def document(
    machine: Machine = LINUX, model: Model = MODEL, faster: float = 1.0, rows: list[BenchRow] | None = None
) -> Document:
    made = [
        full(1.47 * faster),
        streamed(24, 1.21 * faster),
        streamed(16, 0.812 * faster),
        streamed(8, 0.597 * faster),
        streamed(0, 0.489 * faster),
        plain(16, 0.371 * faster),
        plain(0, 0.262 * faster),
        BenchRow("mlx-lm", "mlx-lm, limit of 4 GB", "outcore bench", error="killed for memory"),
    ]
    return Document(
        "2026-04-02T10:00:00Z",
        "outcore bench --model x",
        machine,
        model,
        {"tokens": 32},
        {},
        made if rows is None else rows,
    )


def names(*documents: Document) -> list[str]:
    return [s.name for s in sections(Inputs(list(documents)))]


def text_of(*documents: Document) -> str:
    inputs = Inputs(list(documents))
    return markdown(summary(inputs), sections(inputs))


def page_of(*documents: Document) -> str:
    inputs = Inputs(list(documents))
    return page(summary(inputs), sections(inputs))


def test_every_number_of_the_main_table_is_the_documents() -> None:
    d = document()
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in text_of(d).splitlines() if line[:1] == "|"]
    head = next(line for line in lines if "Efficiency" in line)
    table = lines[lines.index(head) + 2 :][: len(d.rows)]
    for row, cells in zip(d.rows, table, strict=True):
        said = dict(zip(head, cells, strict=True))
        assert said[""] == row.label
        if row.error is not None:
            assert said["Memory"] == row.error and not any(cells[2:])
            continue
        assert row.speed.decode_tps is not None and row.use.peak_memory_bytes is not None
        numbers = [float(n) for n in re.findall(r"[\d.]+", said["Tokens/s"])]
        wanted = [row.speed.decode_tps.median, row.speed.decode_tps.least, row.speed.decode_tps.most][: len(numbers)]
        assert numbers == pytest.approx(wanted, rel=0.005)
        assert (len(numbers) == 3) == (row.speed.decode_tps.n > 1)
        assert said["Peak"] == size(row.use.peak_memory_bytes)
        assert said["Memory"] == (row.setting.memory or "")
        for column, share in (("Efficiency", row.ceiling.efficiency), ("Stall", row.reading.stall_share)):
            assert said[column] == ("" if share is None else f"{100 * share:.0f} %")
        assert said["Ceiling"] == ("" if row.ceiling.ceiling_s is None else number(1 / row.ceiling.ceiling_s))


def test_the_summary_tells_the_smallest_memory_of_each_machines_fullest_document() -> None:
    small = dataclasses.replace(MODEL, name="tiny", nbytes=1000)
    told = summary(Inputs([document(model=small, faster=9.0), document()]))
    assert told.startswith("On Intel Xeon 8481C, 2 cores, qwen3.5-9b-8bit (8.97 GB of weights) makes 0.489 tokens per")
    assert "in 1.90 GB." in told and "tiny" not in told
    assert "2 of 16 rows failed" in told
    assert "tokens per second" not in summary(Inputs([document(rows=[full()])]))


def test_other_tokens_than_mlx_lms_are_said_first_hand() -> None:
    d = document(rows=[full(), streamed(0, 0.5, same_tokens=False)])
    assert "1 of 2 rows gave OTHER TOKENS than mlx-lm" in text_of(d) and "DIFFERENT" in text_of(d)


def test_all_sections_of_a_full_document() -> None:
    assert names(document()) == ["machines", "results", "memory"]


@pytest.mark.parametrize(
    ("lacking", "gone"),
    [
        ({"peak_memory_bytes": None}, {"memory"}),
        ({"decode_tps": None}, {"memory"}),
    ],
)
def test_what_is_missing_leaves_its_section_out(lacking: dict[str, object], gone: set[str]) -> None:
    d = document()
    d.rows = [BenchRow.of(r.record() | lacking) for r in d.rows]
    assert set(names(d)) == set(names(document())) - gone
    shown, text = page_of(d), text_of(d)
    for section in gone:
        assert f'id="{section}"' not in shown
        assert f"## {section.replace('-', ' ').capitalize()}\n" not in text


def test_a_column_that_nothing_fills_is_left_out() -> None:
    d = document(rows=[full(), streamed(0, 0.5, efficiency=None, stall_share=None)])
    assert "| Ceiling |" in text_of(d) and "Efficiency" not in text_of(d) and "| Stall |" not in text_of(d)


def test_a_document_of_failures_alone_says_why() -> None:
    d = document(rows=[BenchRow("outcore", "outcore, 4GB", "x", error="killed for memory")])
    assert names(d) == ["machines", "results"]
    assert "killed for memory" in page_of(d) and "1 of 1 rows failed" in text_of(d)
    assert names(document(rows=[])) == ["machines"]


def test_predictions_appear_with_the_field_that_tells_them() -> None:
    d = document()
    d.rows[1].speed.predicted_tps = 1.331
    assert "| 1.21 (1.16–1.25) | 1.33 |" in text_of(d) and "Predicted" not in text_of(document())


def matrix(*, busy: bool = False, model: Model = MODEL) -> Document:
    """Of two budgets that stream and one that does not; of the streaming ones a point does not fit."""

    def point(tps: float, memory: int, io: str = "none", slots: int = 0) -> BenchRow:
        label = f"{size(memory)}, {f'{io}, {slots} slots' if slots else 'all resident'}"
        own = {"io": io, "slots": slots, "peak_memory_bytes": memory, "memory": f"{memory}B"}
        found = streamed(8 if slots else 32, tps, label=label, **own)
        return noisy(found) if busy else found

    rows = [
        point(1.5, 9 * 10**9),
        point(0.9, 4 * 10**9, "direct", 3),
        point(0.7, 4 * 10**9, "cached", 3),
        point(0.5, 2 * 10**9, "direct", 3),
        dataclasses.replace(point(1.0, 2 * 10**9, "cached", 3), error="too small"),
    ]
    rows[-1].speed.s_per_token = None
    return dataclasses.replace(document(model=model, rows=rows), settings={"grid": {}})


def read(folder: Path, d: Document) -> Inputs:
    write_record(folder / "a.json", d.record())
    return read_inputs([folder / "a.json"])


def test_a_matrix_is_a_table_of_all_points_and_its_best_row_of_each_budget_is_drawn(tmp_path: Path) -> None:
    inputs = read(tmp_path, matrix())
    found = sections(inputs)
    text = markdown(summary(inputs), found)
    assert "- Best: 9.00 GB, all resident: 1.5 tokens/s" in text and "- No numbers: 1 of 5 rows" in text
    rows = re.findall(r"^\| ([\d.]+ GB, [^|]*) \|", text, re.M)
    assert rows == [
        "2.00 GB, cached, 3 slots", "2.00 GB, direct, 3 slots",
        "4.00 GB, cached, 3 slots", "4.00 GB, direct, 3 slots", "9.00 GB, all resident",
        *rows[5:],
    ]  # fmt: skip
    assert "memory" in {s.name for s in found}
    assert "makes 0.500 tokens per second" in summary(inputs)
    busy = read(tmp_path, matrix(busy=True))
    assert "tokens per second" not in markdown(summary(busy), sections(busy))


def test_names_are_escaped() -> None:
    name = '<script>alert("$x$ & \\frac")</script>|`'
    d = document(model=dataclasses.replace(MODEL, name=name))
    d.rows[1] = dataclasses.replace(d.rows[1], label=name)
    text = page_of(d)
    assert "<script" not in text and "&lt;script&gt;alert(" in text and "$x$" in text
    assert "<script" not in text_of(d).replace("\\<", "")
    d.rows[2] = dataclasses.replace(d.rows[2], error="<img src=x>", notes=["<b onclick=x>"])
    shown = page_of(dataclasses.replace(d, settings={"grid": {}}))
    assert not re.search("<script|<img|<b ", shown)
    table = [line for line in text_of(d).splitlines() if line.startswith("| \\<script")]
    assert table and all(len(re.findall(r"(?<!\\)\|", line)) == 10 for line in table)


def test_the_page_holds_everything_it_shows() -> None:
    text = page_of(document(), document(SERVER))
    assert text.count("<svg") == 2
    for outside in ("http:", "https:", "//", "src=", "<link", "<script", "@import", "url(http", "<metadata"):
        assert outside not in text, outside
    # Colours are the page's, or a dark page would show light ones; text is text.
    assert set(re.findall(r'(?:fill|stroke)="([^"v]*)', text)) <= {"none", ""}
    assert "<text" in text and "prefers-color-scheme: dark" in text


def test_axes_have_round_numbers() -> None:
    found = [
        [t.text for t in ElementTree.fromstring(svg).iter("text")]
        for svg in re.findall("<svg.*?</svg>", page_of(document()))
    ]
    labels = [text for text in found[0] if re.fullmatch(r"[\d.]+", text or "")]
    assert labels == ["0", "0.5", "1", "0", "2", "4", "6", "8"]  # up to 1.47 tokens per second, and 9.12 GB


def test_speeds_that_are_far_apart_are_apart_in_the_chart_too() -> None:
    def heights(fastest: float) -> list[float]:
        rows = [streamed(24, 2.0), streamed(0, 0.5), full(fastest)]
        return [float(y) for y in re.findall(r'<circle cx="[^"]*" cy="([^"]*)"', page_of(document(rows=rows)))]

    slow, faster, _ = heights(4.0)
    assert slow - faster == pytest.approx((264 - 24) * 1.5 / 4, abs=1)
    slow, faster, _ = heights(400.0)  # from 0.1 to 1000: three quarters of a power of ten would be one pixel of 400
    assert slow - faster == pytest.approx((264 - 24) * 0.6 / 4, abs=1)
    assert "tokens per second, logarithmic" in page_of(document(rows=[streamed(0, 0.5), full(400.0)]))


def test_batches_are_curves_of_their_own() -> None:
    rows = [streamed(at, tps * batch, batch=batch) for batch in (1, 8) for at, tps in ((0, 0.5), (16, 0.9))]
    shown = page_of(document(rows=rows))
    assert shown.count("<polyline") == 4  # two of them ceilings
    assert re.findall(r">((?:Outcore|ceiling)[^<]*)</text>", shown) == [
        "Outcore, batch 1", "Outcore, batch 8", "ceiling, batch 1", "ceiling, batch 8",
    ]  # fmt: skip


def noisy(row: BenchRow) -> BenchRow:
    return dataclasses.replace(row, notes=[f"{BUSY} 40 % of the cores right before"])


def test_rows_of_a_busy_machine_are_nowhere_but_in_the_list_of_what_was_left_out() -> None:
    d = document()
    d.rows[4] = noisy(d.rows[4])
    told = summary(Inputs([d]))
    assert "makes 0.597 tokens per second" in told  # the next larger memory
    assert "1 of 8 rows ran on a busy machine and are left out." in told
    text, shown = text_of(d), page_of(d)
    assert "0.489" not in text + shown and "| outcore, 0 % resident" not in text
    assert shown.count("<circle") == page_of(document()).count("<circle") - 1
    again = f"outcore, 0 % resident: {BUSY} 40 % of the cores right before. Stop them, then measure again: {d.command}"
    assert f"## Left out\n\n- {again}" in text and f"<li>{again}</li>" in shown
    assert "Left out" not in text_of(document())


def test_a_report_of_a_busy_machine_alone_has_no_speed_at_all() -> None:
    d = document()
    d.rows[:-1] = map(noisy, d.rows[:-1])
    assert names(d) == ["machines", "results", "left-out"] and "<svg" not in page_of(d)
    assert "tokens per second" not in page_of(d) and "GB/s" not in page_of(d).partition("<h2>Results")[0]
    d.rows = d.rows[:-1]
    assert names(d) == ["machines", "left-out"]


def test_no_stored_result_has_an_efficiency_above_1() -> None:
    files = [
        f for f in (Path(__file__).parents[1] / "benchmarks/results").glob("*.json") if f'"{SCHEMA}"' in f.read_text()
    ]
    rows = [row for d in read_inputs(files).documents for row in d.rows]
    assert any((row.ceiling.efficiency or 0) > 0.99 for row in rows)
    assert all((row.ceiling.efficiency or 0) <= 1 and (row.reading.disk_share or 0) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1234"), (68.3, "68.3"), (1.7, "1.70"), (0.03117, "0.0312"), (0, "0"), (None, "")]
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    status = main(["report", *map(str, args)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_the_command_writes_page_and_markdown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", document().record())
    status, out, err = run(capsys, tmp_path / "a.json", "--output", tmp_path / "new", "--json")
    record = json.loads(out.splitlines()[-1])
    assert status == 0 and err.count("\n") == 1
    assert (tmp_path / "new/report.html").read_text() == page_of(document()), "the same results make the same page"
    assert (tmp_path / "new/report.md").read_text() == text_of(document())
    assert record["rows"] == 8 and record["documents"] == 1 and "memory" in record["sections"]
    write_record(tmp_path / "short.json", document().record())
    status, _, _ = run(capsys, tmp_path / "short.json", "-o", tmp_path / "b.html")
    assert status == 0 and (tmp_path / "b.html").is_file()


def _spoiled(**changes: object) -> str:
    raw = json.loads(json.dumps(document().record()))
    raw["rows"][1] |= changes
    return json.dumps(raw)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[" * 100_000,
        "[]",
        "{}",
        '{"schema": 5}',
        '{"schema": "outcore-later/7", "rows": 3}',
        '{"schema": "outcore-bench/1"}',
        '{"schema": "outcore-bench/1", "rows": ["x"], "machine": {}, "model": {}}',
        '{"schema": "outcore-perplexity/1"}',
        '{"schema": "outcore-perplexity/1", "created": "x", "rows": [{"model": "m", "ppl": "low"}]}',
        _spoiled(decode_tps={"median": "fast", "least": 1, "most": 1, "n": 1}),
        _spoiled(decode_tps={"median": float("nan"), "least": 1, "most": 1, "n": 1}),
        _spoiled(decode_tps=[1]),
        _spoiled(label=None),
        _spoiled(io_share="97 %"),
    ],
)
def test_a_broken_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_text(content)
    status, out, err = run(capsys, file, "-o", tmp_path / "out")
    assert status == 1 and out == ""
    assert err.count("\n") == 1 and "broken.json: " in err
    assert not (tmp_path / "out").exists()


def test_perplexities_are_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        PerplexityRow("Qwen3.5-9B-8bit", 8, "bfloat16", 4.4551, 0.012, 8_970_000_000, 4.4551),
        PerplexityRow("Qwen3.5-9B-bf16", None, "bfloat16", 4.44),
    ]
    found = Perplexities("2026-04-02", {"cpu": "Intel Xeon"}, tuple(rows))
    file = tmp_path / "p.json"
    file.write_text(json.dumps(dataclasses.asdict(found) | {"schema": "outcore-perplexity/1", "later": 1}))
    assert read_inputs([file]).perplexities == [found]
    status, _, err = run(capsys, file, "-o", tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert (status, err) == (0, "")
    assert "| Qwen3.5-9B-8bit | 8 bit | 4.455 ± 0.012 | 4.455 | 8.97 GB |" in text
    assert "## Results" not in text


def test_notes_are_reported_once_with_the_rows_that_they_are_about() -> None:
    d = document(rows=[full(), streamed(0, 0.5, notes=["busy"]), streamed(8, 0.6, notes=["busy"])])
    line = "outcore, 0 % resident; outcore, 25 % resident: busy"
    assert f"- Note: {line}" in text_of(d) and f"<li>{line}</li>" in page_of(d)
    assert "Note:" not in text_of(document())


def test_memory_is_what_was_asked_for() -> None:
    rows = [
        streamed(0, 0.5, memory="auto", budget_bytes=19_200_000_000),
        streamed(8, 0.6, memory=None, budget_bytes=19_200_000_000),
        streamed(16, 0.6, memory=None, limit_bytes=4_000_000_000),
    ]
    text = text_of(document(rows=rows))
    assert "| auto (19.2 GB) |" in text and text.count("19.2 GB") == 1 and "| limit 4.00 GB |" in text


def test_names_are_shown_without_characters_that_move_a_cursor_or_turn_the_line() -> None:
    hostile = "m\x1b]0;x\x07\u202ename\x00\x9b"
    d = document(rows=[full(), streamed(0, 0.5, label=hostile, notes=[hostile]), plain(0, 0.3)])
    d.model = dataclasses.replace(d.model, name=hostile)
    for text in (page_of(d), text_of(d)):
        assert all(c.isprintable() or c.isspace() for c in text) and not set("\x1c\x85") & set(text)
        assert "m\\x1b" in text.replace("\\\\", "\\")
