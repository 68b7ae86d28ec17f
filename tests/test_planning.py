"""One smallest budget, whoever says it: it works, it is kept to, and a byte less is refused."""

from __future__ import annotations

import gc
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import outcore
import zoo
from outcore.checks import parse_size
from outcore.cli.main import main
from outcore.decode.preparation import prepare
from outcore.errors import BudgetError, PromptError, UsageError
from outcore.plan.joint_plan import AUTO, NGRAM, Draft, Planning
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize
from outcore.plan.planner import make_plan, smallest_budget
from outcore.plan.workload import planned_context
from outcore.sizes import format_size
from stand_ins import TokensOnly

PROMPT = [3 + (7 * i) % 90 for i in range(40)]
TOKENS = 8
CONTEXT = len(PROMPT) + TOKENS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("planning")
    made = {name: zoo.save_checkpoint(name, root / name) for name in ("llama", "gemma3_text", "qwen3_5")}
    return made | {"other": zoo.save_checkpoint("llama", root / "other", seed=1)}


def said_by(command: str, folder: Path, draft: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    argv = [str(folder), "--json", "--context", str(CONTEXT), "--prompt-tokens", str(len(PROMPT)), "--draft", draft]
    main([command, *argv, *(["--no-calibrate"] if command == "plan" else [])])
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def load(folder: Path, memory: int | str, draft: str) -> Any:
    return outcore.load_model(
        folder, memory=memory, context=CONTEXT, prompt=len(PROMPT), draft=draft, cpu_streams=1, govern=False
    )[0]


@pytest.mark.parametrize(("model", "draft"), [("qwen3_5", "auto"), ("gemma3_text", "self:4")])
def test_the_smallest_budget_that_any_command_says_works_and_a_byte_less_does_not(
    folders: dict[str, Path], model: str, draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, draft = folders[model], str(folders[draft]) if draft in folders else draft
    with pytest.raises(BudgetError) as refused:
        load(folder, 100_000, draft)
    least = refused.value.smallest
    assert least is not None
    said = [said_by(command, folder, draft, capsys) for command in ("info", "plan")]
    assert [r["smallest_budget_bytes"] for r in said] == [least, least]
    with pytest.raises(BudgetError, match=re.escape(format_size(least, round_up=True))):
        load(folder, least - 1, draft)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    # As a person would type it back.
    typed = format_size(least, round_up=True)
    for memory in (least, typed.replace(" ", "")):
        mx.clear_cache()
        mx.reset_peak_memory()
        loaded = load(folder, memory, draft)
        with loaded.outcore as session:
            assert session.plan.smallest_budget_bytes == least
            found = [r.token for r in outcore.stream_generate(loaded, TokensOnly(), PROMPT, max_tokens=TOKENS)]
            peak = mx.get_peak_memory() + mx.get_cache_memory() - before
        assert len(found) == TOKENS
        assert (
            peak
            <= session.plan.peak_bytes
            <= session.plan.budget_bytes
            == (least if memory == least else parse_size(memory))
        )
        del loaded
        gc.collect()


def test_it_says_for_which_context_prompt_and_draft(folders: dict[str, Path]) -> None:
    with pytest.raises(BudgetError) as plain:
        prepare(folders["llama"], memory=1000)
    assert str(plain.value).endswith(" for a context of 512 tokens; fewer need less (context)")
    with pytest.raises(BudgetError) as short:
        prepare(folders["llama"], memory=1000, context=300, prompt=20)
    assert "a context of 300 tokens; fewer" in str(short.value)
    with pytest.raises(BudgetError) as drafting:
        prepare(folders["llama"], memory=1000, context=300, draft="self:4")
    assert re.search(
        r"this model and draft self:4 \(its weights take [0-9.]+ [kKM]B\): the smallest",
        str(drafting.value),
    )
    assert len({plain.value.smallest, short.value.smallest, drafting.value.smallest}) == 3


def test_a_recommended_size_typed_back_is_never_too_small() -> None:
    for n in [*range(1, 3000), *(10**k + d for k in range(3, 15) for d in (-1, 0, 1, 123)), 5_250_001, 6_169_999]:
        assert parse_size(format_size(n, round_up=True).replace(" ", "")) >= n


# Numbers alone

MB = 10**6


def sized(head: int = 8 * MB, logits: int = 600_000) -> ModelSize:
    layers = (LayerSize(resident=10 * MB, slot=10 * MB, read=10 * MB),) * 8
    top = LayerSize(resident=head, slot=head // 4, read=head)
    return ModelSize(
        layers, non_layer=head + MB, cache=MB, token=10_000, hidden=4_000, score=64, window=0, state=0, logits=logits,
        context=200, prompt=100, head=top,
    )  # fmt: skip


@pytest.mark.parametrize("logits", [600_000, 60_000_000])
@pytest.mark.parametrize("kind", [AUTO, NGRAM, "self", "model"])
def test_every_budget_from_the_smallest_on_works_whatever_it_is_worth_drafting(kind: str, logits: int) -> None:
    """A larger budget is worth more drafted tokens, which take more; they are no reason to refuse it."""
    weights = 0 if kind in (AUTO, NGRAM) else 12 * MB
    planning = Planning(sized(logits=logits), kind, Draft(kind, kind, weights=weights, head=weights // 4, cache=MB))
    least = planning.smallest
    for budget in [least + i * MB // 2 for i in range(30)] + [10 * least, 2**50]:
        planned = planning.at(budget)
        assert planned.plan.peak_bytes <= budget
        assert planned.plan.smallest_budget_bytes == least
    with pytest.raises(BudgetError) as refused:
        planning.at(least - 1)
    assert refused.value.smallest == least


def test_a_copys_own_head_is_counted_where_the_models_is_streamed() -> None:
    size, draft = sized(head=40 * MB), Draft("self", "self:4", weights=10 * MB, head=12 * MB)
    planning = Planning(size, "self", draft)
    planned = planning.at(planning.smallest)
    assert planned.plan.head_streamed
    assert planned.size.non_layer == size.non_layer + 22 * MB
    # With a head smaller than its copy it had better stay.
    small = Planning(sized(head=4 * MB), "self", Draft("self", "self:4", weights=10 * MB, head=12 * MB))
    assert not small.at(small.smallest).plan.head_streamed


@pytest.mark.parametrize("head_resident", [None, True, False])
def test_the_smallest_budget_is_the_one_that_planning_itself_takes(head_resident: bool | None) -> None:
    least = smallest_budget(sized(), head_resident=head_resident)
    assert make_plan(sized(), least, head_resident=head_resident).peak_bytes == least
    with pytest.raises(BudgetError):
        make_plan(sized(), least - 1, head_resident=head_resident)


# Contexts that cannot be meant


@pytest.mark.parametrize("command", ["info", "plan"])
@pytest.mark.parametrize("context", [str(10**30), str(2**31), "0", "-5"])
def test_a_context_that_no_model_has_is_refused_in_one_line(
    folders: dict[str, Path], command: str, context: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(folders["llama"]), "--context", context]) == 2
    refused = capsys.readouterr().err
    assert "--context" in refused and refused.count("\n") == 1 and len(refused) < 140


def test_a_model_that_does_not_say_is_asked_for_no_more_than_can_be_counted(folders: dict[str, Path]) -> None:
    silent = {"max_position_embeddings": None}
    assert prepare(folders["llama"], context=10**9, memory=1, least=True, model_config=silent).refused
    with pytest.raises(UsageError, match=r"2147483648.*(2147483647|at most)"):
        prepare(folders["llama"], context=2**31, model_config=silent)
    with pytest.raises(UsageError, match=r"at most|about 10\^30 tokens"):
        outcore.load_model(folders["llama"], context=10**30, model_config=silent)


def test_a_prompt_longer_than_what_a_model_was_made_for_is_planned_for(folders: dict[str, Path]) -> None:
    """It is answered, as by mlx-lm; only a table of positions ends somewhere."""
    assert prepare(folders["llama"], prompt=512).profile.size.context == 513
    assert prepare(folders["llama"], prompt=500).profile.size.context == 512
    with pytest.raises(PromptError, match="has 65 tokens; this model has 64 positions"):
        planned_context(64, 64, None, 65)


def test_what_a_model_weighs_is_reported_however_much_that_is(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.decode.preparation.last_resort", lambda: 1000)
    monkeypatch.setattr("outcore.decode.preparation.asked_budget", lambda memory: 1000)
    main(["info", str(folders["llama"]), "--json", "--context", "100"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "too small" in record["error"] and record["smallest_budget_bytes"] > 1000


def test_a_larger_budget_is_not_planned_to_be_slower(quick_model: Path) -> None:
    """Where the head leaves room for parts of layers alone, whole layers have its memory, and it is streamed."""
    seconds = [
        outcore.plan_model(str(quick_model), memory=memory, context=256, prompt=3, draft="none").token_s
        for memory in range(8_600_000, 13_000_000, 800_000)
    ]
    assert all(after <= before * 1.05 for before, after in pairwise(seconds)), seconds
