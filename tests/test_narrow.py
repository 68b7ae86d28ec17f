"""What is printed in columns, in a terminal that is narrow: nothing is cut off."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.cli.commands import commands
from outcore.cli.console import PlainConsole
from outcore.cli.main import usage
from outcore.cli.plan import _curve_table, about
from outcore.decode.preparation import prepare
from outcore_bench.bench import rich_table
from outcore_bench.document import BenchRow, Stat
from outcore_bench.report.tables import main_table


def printed(table: Any, width: int) -> str:
    console = PlainConsole(file=io.StringIO(), width=width, soft_wrap=True)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = usage().splitlines()
        assert max(map(len, lines)) <= min(columns, 110)
        assert all(any(line.startswith(f"  {name} ") for line in lines) for name in commands())


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_of_budgets_is_whole(width: int, demo_model: Path) -> None:
    prepared = prepare(demo_model, memory="20MB", context=64)
    plan = prepared.plan
    # Longest words, and both marks in one row.
    shown = printed(_curve_table([replace(plan, ttft_s=1234.5), plan], plan, plan, predicted=True), width)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    assert shown.count("← this plan ← recommended") == 2 and about(1 / plan.token_s) in shown
    assert "read/" in shown and "tokens/s" in shown


def test_the_table_of_measurements_is_whole() -> None:
    row = {"mode": "outcore", "label": "outcore, 1.66GB", "command": "", "memory": "1.66GB", "resident_units": 12}
    row |= {"streamed_units": 116, "decode_tps": Stat(12.34, 10.0, 16.0, 3), "ttft_s": Stat(1.5, 1.5, 1.5, 1)}
    row |= {"read_gbps": 12.34, "disk_share": 0.98, "stall_share": 0.25, "efficiency": 0.87, "ceiling_s": 0.07}
    document: Any = SimpleNamespace(rows=[BenchRow.of(row | {"peak_memory_bytes": 1_650_000_000})])
    table = main_table([document])
    assert table is not None
    for width in (80, 120):
        shown = printed(rich_table(table, width), width)
        assert "…" not in shown and max(map(len, shown.splitlines())) <= min(width, 100)
        assert all(word in shown for word in ("25 %", "87 %", "1.65 GB", "(98 %)", "(10.0–16.0)", "12.3"))
