"""``outcore perplexity``: mlx-lm's figures, one sweep a batch, within the budget; bad input in one line."""

from __future__ import annotations

import gc
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.perplexity
import numpy as np
import pytest
from mlx_lm.perplexity import eval_ppl

import outcore
from outcore import BudgetError, UsageError
from outcore.cli.commands import parser_of
from outcore.cli.main import main
from outcore.decode import budget
from outcore.machine import memory
from outcore_bench import perplexity
from outcore_bench.perplexity import cut, default_text, load_for_batches, read_data

MLX_LM_FLAGS = {
    "--model": None,
    "--trust-remote-code": False,
    "--batch-size": 8,
    "--sequence-length": 512,
    "--num-samples": 256,
    "--seed": 123,
}
SMALL = ["--sequence-length", "12", "--num-samples", "6", "--batch-size", "4"]


@pytest.fixture(scope="module")
def quick(quick_models: Callable[[int], Path]) -> Path:
    return quick_models(2)


@pytest.fixture(scope="module")
def resident(quick: Path) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(quick))
    return model, tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(Path(outcore.__file__).read_text(), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], quick: Path, *args: str) -> tuple[int, str, str]:
    status = main(["perplexity", "--model", str(quick), *args])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_flags_and_defaults_are_mlx_lms() -> None:
    args = parser_of("perplexity").parse_args(["--model", "m"])
    for flag, default in MLX_LM_FLAGS.items():
        if default is not None:
            assert getattr(args, flag[2:].replace("-", "_")) == default


def test_a_local_text_gives_mlx_lms_figure_with_one_pass_a_batch(
    capsys: pytest.CaptureFixture[str], quick: Path, text: Path, resident: Any
) -> None:
    model, tokenizer = resident
    data = cut(tokenizer, text.read_text(), 6, 12, "text")
    expected = eval_ppl(model, data, batch_size=4)
    capsys.readouterr()
    engine = ["--resident", "1", "--memory", "300MB", "--json"]
    status, out, err = run(capsys, quick, "--data-path", str(text), *SMALL, *engine)
    assert status == 0
    record = json.loads(out.splitlines()[-1])
    assert (record["perplexity"], record["perplexity_error"]) == expected, "equal to the last digit"
    assert record["batches"] == record["sweeps"] == 2
    assert (record["samples"], record["tokens"], record["evaluated_tokens"]) == (6, 6 * 12, 6 * 11)
    assert record["streamed_units"] == 1 and record["budget_bytes"] == 300_000_000
    assert f"Perplexity: {expected[0]:.3f} ± {expected[1]:.3f}" in err
    assert "Tokens per second" in err and "Peak memory" in err and "Processed" not in out
    assert "Streaming" in err and "budget" in err


@pytest.mark.parametrize("resident_layers", ["0", "2"])
def test_a_report_shows_what_it_found(
    capsys: pytest.CaptureFixture[str], quick: Path, text: Path, tmp_path: Path, resident_layers: str
) -> None:
    engine = ["--resident", resident_layers, "--memory", "300MB", "--json"]
    _, out, _ = run(capsys, quick, "--data-path", str(text), *SMALL, *engine)
    (tmp_path / "p.json").write_text(out)
    record = json.loads(out)
    assert str(quick) not in json.dumps([record["rows"], record["machine"]]), "a page names no path"
    assert main(["report", str(tmp_path / "p.json"), "-o", str(tmp_path)]) == 0
    figure = f"{record['perplexity']:.3f} ± {record['perplexity_error']:.3f} |"
    shown = (tmp_path / "report.md").read_text()
    assert f"| {quick.name} | " in shown.replace("\\", "") and figure in shown
    assert ("| Streamed |" in shown) == (resident_layers == "0")


def test_without_a_path_the_text_is_pythons_own(
    capsys: pytest.CaptureFixture[str], quick: Path, resident: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = default_text()
    assert len(text) > 100_000
    monkeypatch.setattr(perplexity, "default_text", lambda: text[:2000])  # which is made into tokens sooner
    args = ["--sequence-length", "16", "--num-samples", "2", "--batch-size", "2", "--memory", "200MB", "--json"]
    status, out, _ = run(capsys, quick, *args)
    assert status == 0 and json.loads(out.splitlines()[-1])["data"] == "pydoc_data.topics"
    ids = resident[1].encode(text[:2000])[:32]
    assert read_data(resident[1], None, 2, 16).reshape(-1).tolist() == ids


def test_a_text_is_cut_in_its_order_and_the_rest_dropped(resident: Any) -> None:
    tokenizer = resident[1]
    words = "one two three four five six seven eight nine ten\n" * 3
    ids = tokenizer.encode(words)
    data = cut(tokenizer, words, -1, 7, "words")
    assert data.shape == (len(ids) // 7, 7)
    assert data.reshape(-1).tolist() == ids[: data.size]
    assert cut(tokenizer, words, 2, 7, "words").shape == (2, 7)


@pytest.mark.parametrize(("batch", "length"), [(5, 20), (4, 2)])
def test_peak_memory_stays_within_the_smallest_budget_for_a_batch(
    quick: Path, resident: Any, batch: int, length: int
) -> None:
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    data = cut(resident[1], default_text()[:5000], 2 * batch, length, "text")
    with pytest.raises(BudgetError, match=f"batches of {batch} sequences of {length} tokens") as e:
        load_for_batches(quick, batch, length, memory="1MB")
    smallest = e.value.smallest
    assert smallest is not None
    mx.clear_cache()
    mx.reset_peak_memory()
    model, _ = load_for_batches(quick, batch, length, memory=smallest)
    with model.outcore as session:
        assert session.plan.peak_bytes <= session.plan.budget_bytes == smallest
        eval_ppl(model, data, batch_size=batch)
        assert session.metrics.sweeps == 2 and session.plan.streamed
        assert mx.get_peak_memory() + mx.get_cache_memory() - others <= smallest


def test_a_larger_batch_needs_a_larger_budget(quick: Path) -> None:
    smallest = []
    for batch in (1, 8):
        with pytest.raises(BudgetError) as e:
            load_for_batches(quick, batch, 64, memory="1MB")
        smallest.append(e.value.smallest)
    # Two float32 copies of the logits at the very least: the vocabulary has 8192 words.
    assert smallest[1] - smallest[0] > 7 * 64 * 8192 * 4 * 2


def test_what_a_batch_takes_is_counted_by_every_later_plan(served: Path) -> None:
    model, _ = load_for_batches(served, 4, 64, memory="300MB", resident=4)
    with model.outcore as session:
        plan, residency = session.plan, session.residency
        logits = 4 * 64 * 8192 * 4 * 2
        assert plan.activation_bytes > logits and plan.budget_bytes == 300_000_000
        assert residency.layers.shed(3) == 3
        assert session.plan.activation_bytes == plan.activation_bytes
        assert plan.peak_bytes - session.plan.peak_bytes == pytest.approx(residency.layers.nbytes(range(3)), rel=0.2)
        # A longer text takes more, and does not push out what is set aside for batches.
        residency.reserve(600, 100)
        assert session.plan.activation_bytes > logits
        assert session.plan.smallest_budget_bytes > logits


def test_without_memory_what_is_free_decides_and_the_machine_bounds_it(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = memory.MemoryLimit(1_000_000_000, 1_000_000_000, "machine", common=True)
    for module in (memory, budget):
        monkeypatch.setattr(module, "memory_limits", lambda *_, **__: (limit,))
    monkeypatch.setattr(memory, "rss", lambda: memory.PROCESS_BYTES)
    model, _ = load_for_batches(quick, 2, 32, govern=False)
    with model.outcore as session:
        assert session.plan.budget_bytes == memory.default_budget()
    with pytest.raises(BudgetError, match=r"larger than what there is: 1\.00 GB"):
        load_for_batches(quick, 2, 32, memory=1_001_000_000)


def test_a_data_set_goes_through_mlx_lms_load_data_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, demo_model: Path
) -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(demo_model)  # it ends texts
    documents = [f"document {i}: " + "some words and more words, " * 4 for i in range(9)]

    def load_dataset(args: Any, tokenizer: Any) -> Any:
        assert args.hf_dataset["path"] == "someone/some-set"
        return mlx_lm.tuner.datasets.TextDataset([{"text": d} for d in documents], tokenizer), None

    monkeypatch.setattr(mlx_lm.perplexity, "load_dataset", load_dataset)
    shapes = []
    for read in (read_data, mlx_lm.perplexity.load_data):
        np.random.seed(7)
        shapes.append(read(tokenizer, "someone/some-set", num_samples=3, sequence_length=20).tolist())
    assert shapes[0] == shapes[1]
    with pytest.raises(UsageError, match="too few tokens"):
        read_data(tokenizer, "someone/some-set", 1000, 20)
    with pytest.raises(UsageError, match="all its sequences"):
        read_data(tokenizer, "someone/some-set", -1, 20)


def test_without_the_datasets_package_a_hub_name_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: Path
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    status, _, err = run(capsys, quick, "--data-path", "someone/some-set")
    assert status == 2 and "pip install datasets" in err


def test_a_data_set_that_fails_to_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=fail))
    status, _, err = run(capsys, quick, "--data-path", "someone/some-set")
    assert status == 2 and err.splitlines()[-1].endswith("cannot load the data set: no route to host")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data-path", "nowhere/at/all.txt"], "No such file"),
        (["--data-path", "missing.txt"], "No such file"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--sequence-length", "1"], "--sequence-length 1: give at least 2"),
        (["--num-samples", "0"], "--num-samples 0: give at least 1"),
        (["--num-samples", "-2"], "--num-samples -2"),
        (["--seed", "-1"], "--seed -1"),
        (["--dtype", "int8", "--num-samples", "1"], "--dtype int8"),
        (["--memory", "0GB", "--num-samples", "1"], "--memory 0GB"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], quick: Path, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "default_text", lambda: "x = 1\n" * 400)
    status, out, err = run(capsys, quick, *args)
    assert status == 2 and out == ""
    assert message in err and err.count("\n") == 1


def test_a_text_that_is_not_utf8_or_too_short_is_refused(
    capsys: pytest.CaptureFixture[str], quick: Path, tmp_path: Path
) -> None:
    (tmp_path / "latin").write_bytes("abc é".encode("latin-1"))
    (tmp_path / "short").write_text("a few words")
    (tmp_path / "empty").write_text("")
    for name, message in (("latin", "not UTF-8 at byte 4"), ("short", "fewer than one"), ("empty", "0 tokens")):
        status, _, err = run(capsys, quick, "--data-path", str(tmp_path / name))
        assert status == 2 and message in err and err.count("\n") == 1
    status, _, err = run(capsys, quick, "--data-path", str(tmp_path / "short"), "--memory", "1MB")
    assert status == 2


def test_a_budget_that_is_too_small_names_one_that_works(
    capsys: pytest.CaptureFixture[str], quick: Path, text: Path
) -> None:
    status, _, err = run(capsys, quick, "--data-path", str(text), *SMALL, "--memory", "2MB")
    assert status == 1 and err.count("\n") == 1
    smallest = err.split("works is ")[1].split(" for ")[0]
    status, _, _ = run(capsys, quick, "--data-path", str(text), *SMALL, "--memory", smallest)
    assert status == 0
