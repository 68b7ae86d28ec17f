"""Multi-token-prediction heads: found in original checkpoints, made as modules, and drafting the same text."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import mtp_heads
import mtp_originals
import outcore
import zoo
from outcore.checkpoint.checkpoint import TensorInfo, open_checkpoint
from outcore.checkpoint.lazy_model import open_lazily
from outcore.decode import one_text, preparation, text_drafts
from outcore.decode.sampling import make_sampler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.proposers import Guess
from outcore.errors import BudgetError, CheckpointError, UnsupportedModelError, UsageError
from outcore.plan.machine_profile import Calibration
from outcore_drafts.mtp.head import SharedParts, open_mtp
from outcore_drafts.mtp.hidden_states import HiddenStates
from outcore_drafts.mtp.kind import MtpProposer
from outcore_drafts.mtp.layouts import find_mtp
from stand_ins import TokensOnly

PROMPT = [3 + i % 40 for i in range(9)]


def tokens(model: Any, n: int = 6, prompt: Sequence[int] = PROMPT, **kwargs: Any) -> list[int]:
    return [r.token for r in outcore.stream_generate(model, TokensOnly(), list(prompt), max_tokens=n, **kwargs)]


def always_draft(monkeypatch: pytest.MonkeyPatch, most: int = 4) -> None:
    monkeypatch.setattr(
        text_drafts, "DraftLengthPolicy", lambda asked, _: DraftLengthPolicy(min(asked, most), fixed=True)
    )


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Two layers each, the second of which is like the head's."""
    with pytest.MonkeyPatch.context() as patch:
        for model_type in {*mtp_heads.TYPES, *mtp_originals.TYPES}:
            config = copy.deepcopy(zoo.CONFIGS[model_type])
            config.get("text_config", config)["num_hidden_layers"] = 2
            patch.setitem(zoo.CONFIGS, model_type, config)
        yield


@pytest.fixture(scope="module")
def made(small: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    return functools.cache(lambda model_type: folders(model_type, tmp_path_factory.mktemp(model_type)))


def folders(model_type: str, tmp_path: Path, **how: Any) -> tuple[Path, str]:
    """A tiny model with a random head, and what drafts: with Qwen3.5's the head lies in the model's own folder."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", **how)
    if model_type in mtp_heads.IN_PLACE:
        mtp_heads.save_head(model_type, folder)
        return folder, "mtp"
    return folder, f"mtp:{mtp_heads.save_head(model_type, tmp_path / 'original')}"


FORMS = [(t, centred) for t in mtp_heads.TYPES for centred in (False, True) if centred <= mtp_heads.is_qwen(t)]
FORMS.remove(("qwen3_next", False))  # mlx-lm shifts all norms beside experts that lie one by one


@pytest.mark.parametrize(("model_type", "zero_centred"), FORMS)
def test_a_head_is_made_of_the_original_s_tensors(model_type: str, zero_centred: bool, tmp_path: Path) -> None:
    head = mtp_heads.random_head(model_type)
    found = mtp_heads.originals(model_type, head, zero_centred)
    if zero_centred:  # an original's convolution, which says so
        found["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((4, 1, 4))
    else:
        found["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((4, 4, 1))
    (tmp_path / "original").mkdir()
    mx.save_safetensors(str(tmp_path / "original" / "part.safetensors"), found)
    lazy = open_lazily(open_checkpoint(zoo.save_checkpoint(model_type, tmp_path / "model")))
    made = open_mtp(lazy, tmp_path / "original")
    assert made is not None
    want, got = (dict(tree_flatten(h.parameters())) for h in (head, made))
    assert want.keys() == got.keys()
    for path, array in want.items():
        assert mx.allclose(array, got[path], atol=1e-6).item(), path


def test_models_without_a_head_have_none(tmp_path: Path) -> None:
    for model_type in ("qwen3_5", "llama", "gpt2"):
        lazy = open_lazily(open_checkpoint(zoo.save_checkpoint(model_type, tmp_path / model_type)))
        assert open_mtp(lazy) is None
    place = TensorInfo("", tmp_path, "F32", (4, 4, 1), 0, 64)
    assert find_mtp({"model.layers.1.mlp.up_proj.weight": place}, 2) is None
    assert find_mtp({"model.layers.22.mlp.up_proj.weight": place, "x.layers.2.enorm.weight": place}, 2) is not None


WAYS = [(t, n % 2 == 1) for n, t in enumerate(mtp_heads.TYPES)]
WAYS += [(t, n % 2 == 0) for n, t in enumerate(mtp_originals.TYPES)]
ALIKE = {"glm4_moe_lite", "glm_moe_dsa", "qwen3_next"}
"""Whose layers and caches others have, too; test_mtp_types.py compares what their heads put out."""


@pytest.mark.parametrize(("model_type", "in_blocks"), [way for way in WAYS if way[0] not in ALIKE])
def test_a_head_gives_the_text_of_plain_decoding(
    made: Any, model_type: str, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With passes of their own for drafted tokens, as on processors, and all in one; streamed and resident."""
    always_draft(monkeypatch)
    monkeypatch.setattr(one_text, "on_cpu", lambda: not in_blocks)
    folder, draft = made(model_type)
    texts = []
    for what, resident in (("none", None), (draft, 0), (draft, None)):
        model, _ = outcore.load_model(folder, resident=resident, context=32, prompt=9, draft=what, govern=False)
        with model.outcore as session:
            texts.append(tokens(model))
            assert (session.metrics.drafted > 5) == (what != "none")
            assert (session.streaming is None) == (resident is None)
    assert texts[0] == texts[1] == texts[2]


def reference(model: Any, drafting: Any, text: Sequence[int], drafted: Sequence[int], first: int) -> int:
    """What the head says after a text and drafted tokens, computed at once; of the text from the token ``first`` on."""
    head, shared, ids = drafting.model, drafting.shared, mx.array(list(text))
    with shared.tap.listening() as heard:
        model(ids[None], cache=make_prompt_cache(model))
    cache = head.make_cache()
    state = head(shared.embedded(ids[first + 1 :]), heard[0][:, first:-1], cache)[:, -1:]
    for token in drafted:
        state = head(shared.embedded(mx.array([token])), state, cache)
    return int(mx.argmax(shared.logits(state)[0, -1]).item())


@pytest.mark.parametrize(
    ("model_type", "prompt", "window", "resident"),
    [
        ("qwen3_5", 24, 8, 0),
        ("deepseek_v3", 9, 64, 1),
    ],
)
def test_guesses_are_the_head_s_own_after_each_text(
    made: Any, model_type: str, prompt: int, window: int, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hidden states are those of the text's tokens, whatever was rejected, and in whatever chunks they came."""
    always_draft(monkeypatch, 3)
    monkeypatch.setattr(HiddenStates.__init__, "__defaults__", (window,))
    guessed: list[tuple[list[int], list[int], int]] = []
    original = MtpProposer.guess

    def guess(self: MtpProposer, drafted: Sequence[int]) -> Guess | None:
        found = original(self, drafted)
        assert found is not None
        guessed.append((list(self._text), list(drafted), found.token))
        # Right every second time, so that tokens are kept and given up.
        wrong = len(guessed) % 2
        return Guess((found.token + wrong) % 90, found.key)

    monkeypatch.setattr(MtpProposer, "guess", guess)
    folder, draft = made(model_type)
    model, _ = outcore.load_model(
        folder, resident=resident, context=64, prompt=prompt, draft=draft, govern=False, prefill_step_size=4
    )
    with model.outcore as session:
        text = tokens(model, 9, (PROMPT * 3)[:prompt])
        assert len(text) == 9 and session.metrics.drafted > 8
        assert {len(drafted) for _, drafted, _ in guessed} == {0, 1, 2}
        for so_far, drafted, token in guessed[::2]:
            assert token == reference(model, session.drafting, so_far, drafted, max(0, prompt - window))


@pytest.mark.parametrize("model_type", ["qwen3_5", "deepseek_v32"])
def test_a_text_goes_on_after_a_head_that_failed(made: Any, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    folder, draft = made(model_type)
    plain, _ = outcore.load_model(folder, draft="none", govern=False)
    with plain.outcore:
        want = tokens(plain, 6)
    model, _ = outcore.load_model(folder, resident=0, context=32, prompt=9, draft=draft, govern=False)
    with model.outcore as session:
        shared: SharedParts = session.drafting.shared
        cache, given, calls = make_prompt_cache(model), list[int](), [0]
        original = shared.logits

        def failing(states: mx.array) -> mx.array:
            calls[0] += 1
            if calls[0] == 6:
                raise KeyboardInterrupt
            return original(states)

        monkeypatch.setattr(shared, "logits", failing)
        with pytest.raises(KeyboardInterrupt):
            for r in outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=6, prompt_cache=cache):
                given.append(r.token)
        assert 0 < len(given) < 6 and given == want[: len(given)]
        held = session.in_cache - len(PROMPT)
        rest = given[held:]
        more = tokens(model, 6 - len(given), rest, prompt_cache=cache, history=[*PROMPT, *given[:held]])
        assert given + more == want
        assert tokens(model, 6) == want


@pytest.mark.parametrize("model_type", ["qwen3_5", "deepseek_v32"])
def test_a_seed_gives_one_text_with_a_head_or_without(
    made: Any, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    folder, draft = made(model_type)
    texts = []
    for what in ("none", draft):
        model, _ = outcore.load_model(folder, resident=0, context=32, prompt=9, draft=what, govern=False)
        with model.outcore:
            mx.random.seed(5)
            texts.append(tokens(model, sampler=make_sampler(0.9, coupled=True)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("model_type", "inside"),
    [
        ("qwen3_5", "self_attn.q_proj"),
        ("deepseek_v32", "self_attn.indexer.wk"),
    ],
)
def test_a_quantized_model_s_head_is_quantized_and_counted(
    model_type: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    folder, draft = folders(model_type, tmp_path, quantize={"group_size": 32, "bits": 4})
    plans, texts, weights = {}, [], 0
    for what in ("none", draft):
        model, _ = outcore.load_model(folder, resident=0, context=32, prompt=9, draft=what, govern=False)
        with model.outcore as session:
            plans[what] = session.plan.smallest_budget_bytes
            texts.append(tokens(model))
            if what == draft:
                head: Any = session.drafting.model
                assert head.project.bits == 4 and dict(head.layer.named_modules())[inside].bits == 4
                weights = sum(a.nbytes for _, a in tree_flatten(head.parameters()))
    assert texts[0] == texts[1]
    assert plans[draft] - plans["none"] > weights


def test_the_budget_holds_with_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    monkeypatch.setitem(zoo.CONFIGS, "qwen3_5", copy.deepcopy(zoo.CONFIGS["qwen3_5"]))
    # A head is larger than all that is planned for what may come on top.
    zoo.CONFIGS["qwen3_5"]["text_config"]["intermediate_size"] = 8192
    folder, draft = folders("qwen3_5", tmp_path)
    with pytest.raises(BudgetError) as refused:
        outcore.load_model(folder, memory=100_000, context=64, prompt=32, draft=draft)
    budget = refused.value.smallest
    assert budget is not None
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    model, _ = outcore.load_model(folder, memory=budget, context=64, prompt=32, draft=draft, govern=False)
    with model.outcore as session:
        mx.reset_peak_memory()
        assert len(tokens(model, 6, PROMPT * 3)) == 6
        assert session.metrics.drafted > 5
        head: Any = session.drafting.model
        peak, weights = mx.get_peak_memory() - others, sum(a.nbytes for _, a in tree_flatten(head.parameters()))
        assert budget - weights < peak <= budget


def test_auto_looks_at_a_head_and_takes_it_where_it_is_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo.CONFIGS, "qwen3_5", copy.deepcopy(zoo.CONFIGS["qwen3_5"]))
    zoo.CONFIGS["qwen3_5"]["text_config"]["intermediate_size"] = 4096
    folder, _ = folders("qwen3_5", tmp_path, quantize={"group_size": 32, "bits": 4})
    slow = Calibration(read_gbps=0.001, sync_s=1e-6, weight_gbps=1000.0, measured=True)
    monkeypatch.setattr(preparation, "load_calibration", lambda *_: slow)
    options: dict[str, Any] = {"context": 32, "prompt": 9, "resident": 0}
    memory = preparation.prepare(folder, memory="1GB", draft="mtp", **options).planning.smallest + 50_000
    found = preparation.prepare(folder, memory=memory, draft="auto", **options)
    by_name = {c.name: c for c in found.choices}
    assert by_name["mtp"].planned is not None and by_name["mtp"].token_s < by_name["ngram"].token_s
    assert found.draft is not None and found.draft.kind == "mtp"
    model, _ = outcore.load_model(folder, memory=memory, draft="auto", govern=False, **options)
    with model.outcore as session:
        assert session.drafting.name == "mtp"
        text = tokens(model)
        assert session.metrics.drafted
        made = 0
        for made, r in enumerate(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=6), 1):
            assert r.token == text[made - 1]
            if made == 3:
                before = session.metrics.drafted
                session.residency.layers.give_up_draft()
        assert made == 6 and session.drafting.name == "ngram" and session.size.drafted == 0
        assert session.metrics.drafted - before < 4


def test_heads_that_are_not_there(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_5", tmp_path / "model")
    with pytest.raises(UsageError, match=r"conversions to MLX leave them out.*mtp:FOLDER"):
        outcore.load_model(folder, draft="mtp")
    with pytest.raises(UsageError, match="that folder has no multi-token-prediction head for this model"):
        outcore.load_model(folder, draft=f"mtp:{folder}")
    with pytest.raises(UsageError, match="original model"):
        outcore.load_model(folder, draft="mtp:")
    with pytest.raises(CheckpointError, match=r"draft: .*no such folder"):
        outcore.load_model(folder, draft=f"mtp:{tmp_path / 'nowhere'}")
    other = mtp_heads.save_head("glm4_moe", tmp_path / "other")
    with pytest.raises((UsageError, UnsupportedModelError)):
        outcore.load_model(folder, draft=f"mtp:{other}")
    mtp_heads.save_head("qwen3_5", folder)
    with pytest.raises(UsageError, match="needs the model's head in memory"):
        outcore.load_model(folder, draft="mtp", head_resident=False)
