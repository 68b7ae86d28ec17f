"""``outcore plan`` with a published drafter: by configs alone, by what others published, and by what was counted."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import drafter_files
import drafter_parity
import outcore
import zoo
from outcore.cli.main import main
from outcore.decode import text_drafts
from outcore.decode.preparation import prepare
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.plan.joint_plan import speed_curve
from outcore_drafters import published
from stand_ins import TokensOnly


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any], str]:
    status = main(["plan", *args, "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


def config_alone(folder: Path, to: Path, **changes: Any) -> Path:
    """A folder of the same name with the config only."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return to


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.cli.plan.speed_curve", partial(speed_curve, points=3))


@pytest.mark.parametrize("quantized", [False, True])
def test_configs_are_enough_for_the_same_plan(
    quantized: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model and a drafter with a head of its own; in bf16, and quantized with one matrix left as it is."""
    how = {"bits": 4, "group_size": 32} if quantized else None
    folder = zoo.save_checkpoint("llama", tmp_path / "model", dtype=mx.bfloat16, quantize=how)
    drafter = drafter_files.save_eagle3("llama", tmp_path / "drafter", [4, 5, 6])
    (tmp_path / "configs").mkdir()
    alone = config_alone(folder, tmp_path / "configs" / "model", dtype="bfloat16")
    drafter_alone = config_alone(drafter, tmp_path / "configs" / "drafter", dtype="float32")
    found = []
    for model, draft in ((folder, drafter), (alone, drafter_alone)):
        asked = ("--device", "0.002,50", "--resident", "1", "--draft", str(draft), "--context", "64", "--memory", "3MB")
        status, record, said = plan(capsys, str(model), *asked)
        assert status == 0 and record["drafts"][1]["draft_bytes"] > 10_000
        assert "model on a disk of 0.002 GB/s and memory of 50 GB/s" in said
        found.append(record)
    assert {k: (found[0][k], found[1][k]) for k in found[0] if found[0][k] != found[1][k]} == {}
    none, draft = found[0]["drafts"]
    assert draft["predicted_tps"] > 2 * none["predicted_tps"] and draft["drafted"] == 5
    least, most = draft["assumed_tps"]
    assert least < draft["predicted_tps"] < most and most / least == pytest.approx(4 / 3)
    assert f"assumed, not measured: 3 to 4 tokens a pass of 5 guesses ({draft['assumed'].split(' (')[1]}" in said


def test_what_was_published_is_assumed_and_where_it_is_from_is_said(tmp_path: Path) -> None:
    for row in published.PUBLISHED.values():
        given = sum(row.chance**n for n in range(row.guesses + 1))
        assert given == pytest.approx((row.least + row.most) / 2) and f"({row.source})" in row.about
    sizes = {"hidden_size": drafter_parity.HIDDEN, "vocab_size": drafter_parity.VOCABULARY}
    with pytest.MonkeyPatch.context() as patch:
        config = zoo.CONFIGS["qwen3"] | sizes | {"num_hidden_layers": drafter_parity.LAYERS}
        patch.setitem(zoo.CONFIGS, "qwen3", config)
        folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    drafter_parity.write_checkpoint("dflash", tmp_path / "dflash")
    for drafter in (tmp_path / "dflash", config_alone(tmp_path / "dflash", tmp_path / "alone", dtype="float32")):
        prepared = prepare(folder, draft=str(drafter), resident=1, context=64)
        draft = prepared.draft
        # Blocks of six: five guesses, which take as long as one, and no room for more.
        assert draft is not None and draft.block == 5 == prepared.profile.size.drafted
        assert draft.chance == published.PUBLISHED[True, False].chance and "pull request 2279" in draft.assumed


def test_what_was_counted_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda asked, _: DraftLengthPolicy(3, _, fixed=True))
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    drafter = drafter_files.save_eagle3("llama", tmp_path / "drafter")
    options: dict[str, Any] = {"draft": str(drafter), "context": 64, "resident": 1}

    def counted() -> tuple[float, str]:
        draft = prepare(folder, **options).draft
        assert draft is not None
        return draft.chance, draft.assumed

    before = counted()
    assert before == (published.PUBLISHED[False, False].chance, published.PUBLISHED[False, False].about)
    for enough in (10_000, 5):  # too few guesses say nothing
        assert counted() == before
        monkeypatch.setattr(published, "ENOUGH", enough)
        model, _ = outcore.load_model(folder, govern=False, **options)
        with model.outcore as session:
            for _ in outcore.stream_generate(model, TokensOnly(), [3, 4, 5], max_tokens=12):
                pass
            share = session.acceptance.sources["drafter"].value
    chance, said = counted()
    assert chance == share < 0.5 and said == f"measured: {share:.0%} of its guesses were right here"
    options["draft_bits"] = 8  # another drafter
    assert counted() == before


def test_what_training_counted_is_expected_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    options: dict[str, Any] = {"context": 64, "resident": 1}
    counted = published.trained_values(2.5, 8)
    drafter = drafter_files.save_eagle3("llama", tmp_path / "drafter", **counted)
    draft = prepare(folder, draft=str(drafter), **options).draft
    assert draft is not None and sum(draft.chance**n for n in range(9)) == pytest.approx(2.5)
    asked = ("--device", "0.002,50", "--resident", "1", "--draft", str(drafter), "--context", "64", "--memory", "3MB")
    _, record, said = plan(capsys, str(folder), *asked)
    assert record["drafts"][1]["assumed_tps"] == [] and record["drafts"][1]["tokens_per_sweep"] < 2.5
    assert "drafter: measured when it was trained, on held-out text: 2.50 tokens a pass of up to 8 guesses" in said
    model, _ = outcore.load_model(folder, draft=str(drafter), govern=False, **options)
    with model.outcore as session:
        for _ in outcore.stream_generate(model, TokensOnly(), [3, 4, 5], max_tokens=2):
            pass
        began = session.acceptance.sources["drafter"]
        assert began.right <= draft.chance * 2 + began.all - 2  # not a prior of its own
    for wrong in (9.5, 0.5, float("nan"), "2", None, True):
        assert published.trained({published.TRAINED: {"tokens_a_pass": wrong, "guesses": 8}}) is None
    for guesses in (0, 33, 8.0, True, 1e400):
        assert published.trained({published.TRAINED: {"tokens_a_pass": 2.5, "guesses": guesses}}) is None
    assert published.trained({published.TRAINED: [2.5]}) is None


def test_a_config_that_makes_no_model_and_a_rate_that_is_none_are_refused(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = config_alone(demo_model, tmp_path / "alone")
    (empty := tmp_path / "empty").mkdir()
    (empty / "config.json").write_text('{"model_type": "llama"}')
    awq = config_alone(demo_model, tmp_path / "awq", quantization=None, quantization_config={"quant_method": "awq"})
    for folder, device, says in (
        (empty, "2.4", "mlx-lm makes no model of its config.json"),
        (awq, "2.4", "give its MLX version's config.json"),
        (alone, "0", "give GB/s of a disk"),
        (alone, "fast", "choose one of mac-studio"),
    ):
        assert main(["plan", str(folder), "--device", device]) != 0
        assert says in capsys.readouterr().err
    shutil.rmtree(empty)
    assert main(["plan", "--device", "2.4"]) == 2 and "give a model" in capsys.readouterr().err
