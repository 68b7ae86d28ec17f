"""Which draft ``auto`` takes: what each is expected to give, what was seen of it before, and which have room."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import outcore
import zoo
from outcore.calibration.calibration_file import store_calibration
from outcore.cli.main import main
from outcore.decode import preparation, text_drafts
from outcore.decode import preparation as choices
from outcore.decode.preparation import prepare
from outcore.decode.speculative.acceptance import AcceptanceStats
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.text_drafts import TextDrafts, give_back, take
from outcore.disk.disk_calls import DiskCalls
from outcore.disk.metrics import Metrics
from outcore.errors import StoreSpaceError
from outcore.machine.hardware import cores
from outcore.plan.joint_plan import MOST, NGRAM, REPEATED, Choice, Draft, Planned, Planning, expected, fastest
from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize
from outcore.sizes import format_size
from outcore_drafts.self_draft import SELF
from stand_ins import TokensOnly

SLOW = Calibration(read_gbps=0.001, sync_s=1e-6, weight_gbps=1000.0, measured=True)
"""A disk of 1 MB/s, and computing that takes no time."""


def planned(draft: Draft | None, joined: int = 0, resident: int = 0, layers: int = 8) -> Planned:
    layer = LayerSize(resident=1_000_000, slot=1_000_000, read=1_000_000, kind="layer", joined=joined)
    size = ModelSize(
        layers=(layer,) * layers,
        non_layer=0,
        cache=0,
        token=0,
        hidden=0,
        score=0,
        window=0,
        state=0,
        logits=6,
        prompt=1,
        context=8,
    )
    size = replace(size, drafted=MOST if draft is not None else 0)
    made = Planning(size, "none", None, {"resident": resident}).at(1 << 40, SLOW)
    return Planned(made.plan, size, draft)


def test_tokens_of_a_pass_are_those_of_a_chain() -> None:
    at_once = replace(SLOW, sync_s=0.0)
    found = expected(planned(Draft("self", "self:2", chance=0.5)), at_once, "self:2", True)
    # Where the disk is the limit every guess is worth it: 1 / (1 - p).
    assert found.drafted == MOST and found.tokens == pytest.approx(2, rel=1e-6)
    assert found.token_s == pytest.approx(4.0, rel=0.01)
    none = expected(planned(None), SLOW, "none", True)
    assert none.tokens == 1 and none.token_s == pytest.approx(8.0, rel=0.01)


def test_a_guess_that_takes_its_time_makes_drafts_shorter_or_none() -> None:
    quick, *slower = (planned(Draft("model", "m", weights=int(s * 1e12), chance=0.8)) for s in (0.0, 1.0, 10.0))
    lengths = [expected(draft, SLOW, "m", True).drafted for draft in (quick, *slower)]
    assert lengths[0] == MOST and 1 < lengths[1] < 12 and lengths[2] == 0
    # One pass a guess: computing grows with them, and reading does not.
    slow = replace(SLOW, weight_gbps=0.002)
    blocks, passes = (expected(quick, slow, "", b).drafted for b in (True, False))
    assert blocks > passes


def test_a_block_takes_as_long_as_one_guess_and_is_no_longer_than_what_is_known() -> None:
    alone, block, short = (
        planned(Draft("m", "m", weights=int(1e12), chance=0.8, block=n, published=(1.0, 1.0, m)))
        for n, m in ((0, MOST), (15, MOST), (15, 7))
    )
    found = [expected(each, SLOW, "m", True) for each in (alone, block, short)]
    assert found[0].drafted < 12 and [each.drafted for each in found[1:]] == [15, 7]
    assert found[1].token_s < found[2].token_s < found[0].token_s


def test_repetitions_give_a_little_more_than_a_token() -> None:
    assert expected(planned(Draft(NGRAM, NGRAM)), SLOW, NGRAM, True).tokens == REPEATED


def test_the_fastest_is_taken_unless_something_simpler_is_about_as_fast() -> None:
    at = planned(None)
    slow, near, best, none = (Choice(n, at, token_s=s) for n, s in (("a", 1.0), ("b", 0.98), ("c", 0.9), ("d", 9.0)))
    impossible = Choice("e", None, "why")
    assert fastest([slow, near]) is slow and fastest([slow, impossible, near, best]) is best
    assert fastest([impossible, none]) is none


def test_where_nothing_was_measured_the_fewest_bytes_for_a_token_count() -> None:
    def way(draft: Draft | None, read: int) -> Choice:
        plan = replace(planned(draft).plan, bytes_per_token=read)
        return Choice("", Planned(plan, planned(draft).size, draft), token_s=float(read), measured=False)

    none, ngram = way(None, 100), Draft(NGRAM, NGRAM)
    assert fastest([none, best := way(ngram, round(95 * REPEATED))]) is best
    assert fastest([none, way(ngram, round(100 * REPEATED))]) is none
    drafter = way(Draft("drafter", "small", chance=0.6), 120)
    assert fastest([none, best, drafter, way(Draft("drafter", "large", chance=0.6), 300)]) is drafter
    # A copy of the model is written to the disk first: not without knowing that it pays.
    assert fastest([none, way(Draft(SELF, "self:2", copies_model=True, chance=0.9), 50)]) is none
    assert fastest([none, replace(drafter, measured=True, token_s=99.0)]) is none, "by seconds where these are known"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    large = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | large)
        return zoo.save_checkpoint("qwen3", tmp_path_factory.mktemp("auto"), quantize={"bits": 4, "group_size": 64})


@pytest.fixture
def slow(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and a machine whose disk is slow."""
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "cache"))
    store_calibration(folder, cores(), SLOW)


def budget_for(folder: Path, draft: str, share: float, **options: Any) -> int:
    """Between the smallest with that draft and everything in memory without one."""
    least = prepare(folder, memory="1GB", draft=draft, **options).planning.smallest
    most = prepare(folder, memory="1GB", draft="none", **options).plan.peak_bytes
    return round(least + share * (most - least)) if least < most else least


def test_auto_takes_what_is_fastest_at_its_memory(folder: Path, slow: None) -> None:
    options: dict[str, Any] = {"context": 64, "prompt": 16}
    everything = prepare(folder, memory="1GB", draft="auto", **options)
    assert not everything.plan.streams and everything.choices == () and everything.choice is None
    memory = prepare(folder, memory="1GB", draft="self:2", **options).planning.smallest + 50_000
    prepared = prepare(folder, memory=memory, draft="auto", resident=0, **options)
    assert prepared.choice is not None and prepared.draft is not None
    assert prepared.choice is fastest(prepared.choices) and prepared.draft.name == prepared.choice.name == "self:2"
    names = [c.name for c in prepared.choices]
    assert names == ["none", "ngram", "self:2", "self:3"]
    by_name = {c.name: c for c in prepared.choices}
    assert by_name["self:2"].token_s < by_name["ngram"].token_s < by_name["none"].token_s
    assert by_name["self:2"].first > 0  # nothing of it has been written yet
    assert by_name["self:3"].reason == "takes more memory than all of the model" and by_name["self:3"].planned is None
    assert prepared.plan.peak_bytes <= memory
    # It needs more than without, so a smaller budget is not refused: something else drafts.
    least = prepared.planning.smallest
    smallest = prepare(folder, memory=least, draft="auto", resident=0, **options)
    assert smallest.choice is not None and not smallest.choice.name.startswith("self") and smallest.plan.streams


def test_a_machine_that_was_never_measured_begins_with_n_grams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By assumed rates of reading and computing no draft is the fastest; behind a slow disk it is not."""
    for module in (choices, preparation):
        monkeypatch.setattr(module, "ASSUMED", Calibration(read_gbps=1000.0, weight_gbps=0.01))
    options: dict[str, Any] = {"context": 64, "prompt": 16, "resident": 0}
    memory = prepare(folder, memory="1GB", draft="ngram", **options).planning.smallest + 1_000_000
    model, _ = outcore.load_model(folder, memory=memory, draft="auto", govern=False, **options)
    with model.outcore as session:
        assert session.plan.streams and not session.plan.calibrated and session.drafting is not None
        ones = outcore.stream_generate(
            model, TokensOnly(), [3, 4, 5, 6], max_tokens=10, sampler=lambda logprobs: mx.ones(1, mx.int32)
        )
        assert [r.token for r in ones] == [1] * 10
        assert session.metrics.accepted > 0, "a text that repeats itself is drafted"


def test_auto_needs_no_cache_that_can_be_written(
    folder: Path, slow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is read-only: what nothing is to be written for drafts."""
    options: dict[str, Any] = {"context": 64, "prompt": 16, "resident": 0}
    memory = prepare(folder, memory="1GB", draft="self:2", **options).planning.smallest + 50_000
    monkeypatch.setattr("os.access", lambda *_: False)  # who runs as root may write wherever modes forbid it
    prepared = prepare(folder, memory=memory, draft="auto", **options)
    by_name = {c.name: c for c in prepared.choices}
    assert "is not writable" in by_name["self:2"].reason and by_name["self:2"].planned is None
    assert prepared.draft is not None and prepared.draft.name == "ngram"


@pytest.mark.parametrize("draft", ["auto", "self:2"])
def test_a_full_disk_drops_an_automatic_draft(
    draft: str, folder: Path, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"context": 96, "prompt": 16, "resident": 0, "govern": False}
    memory = prepare(folder, memory="1GB", draft="self:2", context=96, prompt=16, resident=0).planning.smallest + 50_000

    def tokens(**more: Any) -> list[int]:
        model, _ = outcore.load_model(folder, memory=memory, **more, **options)
        with model.outcore as session:
            found.append((session.drafting, " ".join(session.notes)))
            return [r.token for r in outcore.stream_generate(model, TokensOnly(), [3, 4, 5, 6], max_tokens=4)]

    found: list[tuple[Any, str]] = []
    expected = tokens(draft="none")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DiskCalls, "write", full)
    if draft != "auto":
        with pytest.raises(StoreSpaceError, match="the disk is full"):
            tokens(draft=draft)
        return
    assert tokens(draft="auto") == expected
    assert found[-1][0] is None and "nothing drafts: " in found[-1][1] and "the disk is full" in found[-1][1]


def test_the_plan_shows_the_ways_and_says_why(folder: Path, slow: None, capsys: pytest.CaptureFixture[str]) -> None:
    least = prepare(folder, memory="1GB", draft="self:2", context=64, prompt=16).planning.smallest
    words = ["plan", str(folder), "--memory", f"{least + 50_000}B", "--context", "64", "--prompt-tokens", "16"]
    assert main([*words, "--no-calibrate", "--resident", "0"]) == 0
    shown = capsys.readouterr().out
    assert "self:2" in shown and "← this plan" in shown
    assert "Its first use writes" in shown
    assert main([*words, "--no-calibrate", "--resident", "0", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    chosen = [row for row in record["drafts"] if row["chosen"]]
    assert [row["draft"] for row in chosen] == ["self:2"] == [record["draft"]]
    assert chosen[0]["predicted_tps"] > record["predicted_tps"]


def test_a_draft_that_was_asked_for_is_shown_beside_none(
    folder: Path, slow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    least = prepare(folder, memory="1GB", draft="self:2", context=64, prompt=16).planning.smallest
    words = ["plan", str(folder), "--memory", f"{least + 50_000}B", "--context", "64", "--prompt-tokens", "16"]
    words += ["--no-calibrate", "--resident", "0", "--draft", "self:2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "← this plan" in shown and "if the prompt has 16 tokens" in shown, shown
    assert main([*words, "--json"]) == 0
    rows = {row["draft"]: row for row in json.loads(capsys.readouterr().out)["drafts"]}
    assert list(rows) == ["none", "self:2"] and rows["self:2"]["chosen"]
    # Its weights, and its caches, states to go back to and logits beside them.
    takes = rows["self:2"]["draft_bytes"], rows["self:2"]["beside_bytes"]
    assert min(takes) > 0 and f" {format_size(sum(takes))} " in shown and rows["none"]["beside_bytes"] == 0


def test_what_is_written_once_is_reported_before_the_first_answer(folder: Path, slow: None) -> None:
    said: list[tuple[str, int, int]] = []
    for first in (True, False):
        said.clear()
        options: dict[str, Any] = {"memory": "1GB", "draft": "self:2", "resident": 2, "context": 64, "govern": False}
        model, _ = outcore.load_model(folder, progress=lambda *step: said.append(step), **options)
        model.outcore.close()
        told = [(what, total) for what, _, total in said if ", once" in what]
        assert bool(told) == first
        if first:
            assert "about" in told[0][0] and told[0][1] > 0
            # Two copies: the low bits of layers, and the high ones that draft.
            assert told[0][1] == sum({total for what, _, total in said if what.startswith("packing")})


def test_memory_that_is_left_reads_ahead_while_a_model_drafts() -> None:
    size = planned(None, layers=12).size
    size = replace(size, logits=max(size.logits, 1))
    copy, told = Draft(SELF, "self:3", weights=1000), Draft(NGRAM, "self:3")

    def plan(draft: Draft | None, budget: int, **options: Any) -> Any:
        kind = SELF if draft is not None else "none"
        return Planning(size, kind, draft, {"resident": 0, **options}).at(budget).plan

    least = Planning(size, SELF, copy, {"resident": 0}).smallest
    much = least + 100 * max(layer.slot for layer in size.layers)
    for draft in (copy, told):  # another rank's, whose name is all that is known of it
        wide = plan(draft, much)
        assert wide.slots == 8 and wide.peak_bytes <= wide.budget_bytes
        assert plan(draft, much, slots=3).slots == 3
    assert plan(copy, least).slots <= 3 and plan(copy, least).peak_bytes <= least
    for draft in (None, Draft(NGRAM, NGRAM)):
        assert plan(draft, much).slots <= 3


@pytest.mark.parametrize("chosen", ["ngram", "self:2"])
def test_memory_of_a_draft_that_does_not_pay_goes_to_layers_in_mid_text(
    chosen: str, folder: Path, slow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"context": 96, "prompt": 16}
    if chosen == "ngram":
        monkeypatch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | {"num_hidden_layers": 6, "vocab_size": 1024})
        folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
        memory = budget_for(folder, "none", 0.5, **options)
    else:
        options["resident"] = 0
        memory = prepare(folder, memory="1GB", draft="self:2", **options).planning.smallest + 50_000

    def answer(draft: str) -> list[int]:
        model, _ = outcore.load_model(folder, memory=memory, draft=draft, govern=False, **options)
        with model.outcore as session:
            found.append((session.drafting and session.drafting.name, len(session.plan.resident), session))
            return [r.token for r in outcore.stream_generate(model, TokensOnly(), [3, 4, 5, 6], max_tokens=20)]

    found: list[tuple[str | None, int, Any]] = []
    expected = answer("none")
    held: list[int] = []

    def weigh(self: TextDrafts, *_: Any) -> None:
        """Gives the draft's memory to layers, and gives n-grams theirs back later."""
        self._session.acceptance.weighed = self._session.acceptance.sweeps
        held.append(len(self._session.plan.resident))
        if len(held) == 1:
            give_back(self._session.residency.layers)
        else:
            drafted.append(self._session.size.drafted)
            take(self._session.residency.layers, 8)

    drafted: list[int] = []
    monkeypatch.setattr(text_drafts, "SETTLED", 1)
    monkeypatch.setattr(TextDrafts, "_weigh", weigh)
    assert answer("auto") == expected
    name, before, session = found[-1]
    assert name == chosen and session.drafting.name == NGRAM and "layers have its memory" in " ".join(session.notes)
    assert held[0] == before <= held[1] and drafted[0] == 0, "layers came with the passes that read them anyway"
    assert session.size.drafted == 8 and session.plan.peak_bytes <= memory


def test_memory_goes_where_the_latest_passes_say_that_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 1 s, 0.9 s of which wait for the disk; drafts' memory is worth half of what it reads."""
    metrics = Metrics(sweeps=10, bytes_read=1000, read_s=10.0, stall_s=9.0)
    plan = SimpleNamespace(budget_bytes=1 << 30, pools=(), kv_slot=0, streams=True)
    layers, size = SimpleNamespace(draft=None), planned(Draft(NGRAM, NGRAM)).size
    monkeypatch.setattr(text_drafts, "bytes_moved", lambda _, drafted=0: -50 if drafted else 50)
    moves: list[str] = []
    monkeypatch.setattr(text_drafts, "give_back", lambda _: moves.append("given"))
    monkeypatch.setattr(text_drafts, "take", lambda _, drafted: moves.append("taken"))

    def moved(tokens: float, repeated: float, drafted: int = 8, draft: Any = None, stall_s: float = 9.0) -> list[str]:
        """What happens after passes of 1 s that gave so many tokens, n-grams having known that share of them."""
        drafts, learnt = object.__new__(TextDrafts), AcceptanceStats(lately=(tokens, 1.0, repeated * tokens))
        for _ in range(2):
            learnt.swept(None, 1, 1.0)
        layers.draft, metrics.stall_s = draft, stall_s
        drafts._session = SimpleNamespace(  # type: ignore[assignment]
            metrics=metrics, plan=plan, residency=SimpleNamespace(layers=layers), drafting=None,
            size=replace(size, drafted=drafted),
        )  # fmt: skip
        drafts.most = MOST
        moves.clear()
        drafts._weigh(DraftLengthPolicy(acceptance=learnt), learnt)
        return [*moves]

    assert moved(1.2, 0.2) == ["given"] and moved(3.0, 0.7) == []
    assert moved(1.2, 0.2, stall_s=0.0) == [], "computing is the limit: layers would save nothing"
    # N-grams come back where the text repeats more than the layers' reading costs.
    assert moved(1.0, 0.2, drafted=0) == [] and moved(1.0, 0.7, drafted=0) == ["taken"]
    # A drafter has to be better than n-grams would be; these have its place at once.
    assert moved(3.0, 0.2, draft=object()) == [] and moved(1.2, 0.6, draft=object()) == ["given", "taken"]
