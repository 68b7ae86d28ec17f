"""Drafters of blocks: which configs they are of, and text that they draft for a streamed model."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from drafter_parity import CASES
from outcore.decode import one_text, text_drafts
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.errors import BudgetError, UnsupportedModelError
from outcore_drafters import dflash
from outcore_drafters.config import KINDS
from outcore_drafters.drafter import DraftedModel
from stand_ins import TokensOnly

PROMPT = [3 + i % 40 for i in range(37)]
HIDDEN, VOCABULARY, LAYERS = 64, 128, 4


def config_of(case: str, **changes: Any) -> dict[str, Any]:
    """A case's config for the tiny models."""
    config = {**CASES[case].config, "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_target_layers": LAYERS}
    inside = {**config["dflash_config"], "target_layer_ids": [0, 2, 3]}
    return {**config, "dflash_config": inside, **changes}


def save(folder: Path, config: dict[str, Any], text: list[int] | None = None) -> Path:
    """Writes a random drafter; one of DSpark knows which token follows which in ``text``."""
    folder.mkdir()
    kind = next(k for k in KINDS if k.claims(config))
    mx.random.seed(3)
    weights = dict(tree_flatten(kind.made(config, {}, DraftedModel(HIDDEN, VOCABULARY, LAYERS)).parameters()))
    if text is not None:
        weights["markov_head.markov_w1.weight"] = mx.eye(VOCABULARY)
        table = mx.zeros((VOCABULARY, VOCABULARY))
        table[mx.array(text[1:]), mx.array(text[:-1])] = 50
        weights["markov_head.markov_w2.weight"] = table
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    mlx_lm.utils.save_config(config, folder / "config.json")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[int]]]:
    """A tiny model, and mlx-lm's greedy text of it when it is resident."""

    @functools.cache
    def make(model_type: str) -> tuple[Path, list[int]]:
        folder = zoo.save_checkpoint(model_type, tmp_path_factory.mktemp(model_type) / "model")
        model, _ = mlx_lm.utils.load_model(folder)
        return folder, [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=14)]

    return make


def opened(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda asked, _: DraftLengthPolicy(min(asked, 4), fixed=True))
    return outcore.load_model(folder, draft=str(draft), context=64, govern=False, **options)[0]


@pytest.mark.parametrize(
    ("case", "model_type", "options"),
    [
        ("dflash2-windows", "llama", {"resident": 0, "draft_bits": 4}),
        ("dspark", "qwen3_5", {"resident": 1}),
    ],
)
def test_a_block_drafter_gives_the_text_of_mlx_lm(
    made: Any, case: str, model_type: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an interrupt while it drafts."""
    monkeypatch.setattr(one_text, "on_cpu", lambda: case != "dspark")
    folder, text = made(model_type)
    table = {"markov_rank": VOCABULARY} if "dspark" in case else {}
    config = config_of(case)
    config["dflash_config"] |= table
    drafter = save(tmp_path / "drafter", config, [PROMPT[-1], *text] if table else None)
    with (model := opened(folder, drafter, monkeypatch, **options)).outcore as session:
        drawn, calls = session.drafting.shared.logits, [0]

        def logits(states: mx.array) -> mx.array:
            calls[0] += 1
            if calls[0] == 2:
                raise KeyboardInterrupt
            return drawn(states)

        monkeypatch.setattr(session.drafting.shared, "logits", logits)
        given, cache = list[int](), make_prompt_cache(model)
        stream = functools.partial(outcore.stream_generate, model, TokensOnly())
        with pytest.raises(KeyboardInterrupt):
            given.extend(r.token for r in stream(PROMPT, max_tokens=14, prompt_cache=cache))
        assert calls == [2]
        held = session.in_cache - len(PROMPT)
        assert [r.token for r in stream(PROMPT, max_tokens=14)] == text
        assert session.metrics.drafted > 8 and session.drafting.name == "drafter" and calls[0] > 4
        assert not table or session.metrics.accepted > 4
        said = [*PROMPT, *text[:held]]
        rest = stream(text[held : held + 1], max_tokens=13 - held, prompt_cache=cache, history=said)
        assert [r.token for r in rest] == text[held + 1 :]


def test_configs_say_which_kind_they_are_of() -> None:
    found = {name: next(k.kind for k in KINDS if k.claims(case.config)) for name, case in CASES.items()}
    words = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "eagle3": "EAGLE-3"}
    assert found == {name: words[name.partition("-")[0]] for name in CASES}
    alone = {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "block_size": 7}
    assert [k.kind for k in KINDS if k.claims(alone)] == ["DSpark"]
    assert not any(k.claims({**alone, "architectures": ["Qwen3ForCausalLM"]}) for k in KINDS)
    for others in ("Gemma4DSparkModel", "LagunaDFlashModel"):
        assert not any(k.claims({**config_of("dspark"), "architectures": [others]}) for k in KINDS)


@pytest.mark.parametrize(
    ("case", "changes", "why"),
    [
        ("dflash", {"intermediate_size": None}, "config.json has no intermediate_size"),
        ("dflash", {"layer_types": ["sliding_attention"] * 2}, "need a sliding_window of at least 3"),
        ("dflash", {"block_size": 1}, "block_size or target_layer_ids have no meaning"),
        ("dflash2", {"is_causal": True}, "see only those before them are unknown"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type is not vanilla"),
    ],
)
def test_configs_that_cannot_be_understood(
    made: Any, case: str, changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = save(tmp_path / "drafter", config_of(case))
    mlx_lm.utils.save_config(config_of(case, **changes), drafter / "config.json")
    with pytest.raises(UnsupportedModelError, match=why):
        opened(made("llama")[0], drafter, monkeypatch)


def test_caches_grow_as_they_say() -> None:
    for case in ("dflash", "dflash-windows", "dflash-latest"):
        drafter = dflash.DFlash(config_of(case), DraftedModel(HIDDEN, VOCABULARY, LAYERS))
        text = drafter.text(None)  # type: ignore[arg-type]
        for _ in range(12):
            text.begin(mx.zeros((1, 16, 3 * HIDDEN)), mx.zeros((16,), mx.int32))
            mx.eval(text.arrays)
        held = sum(a.nbytes for a in text.arrays)
        said = sum(2 * each * (192 if most is None else min(most, 192)) for each, most in drafter.growing[:-1])
        # A cache that grows has room for up to 256 tokens.
        assert held <= said * 256 / 192 + 64 and held >= said / 2


def test_the_budget_holds_with_a_block_s_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 12_000
    monkeypatch.setitem(zoo.CONFIGS, "llama", {**zoo.CONFIGS["llama"], "vocab_size": tokens})
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    config = config_of("dflash", vocab_size=tokens, block_size=48)
    monkeypatch.setitem(globals(), "VOCABULARY", tokens)
    drafter = save(tmp_path / "drafter", config)
    with pytest.raises(BudgetError) as refused:
        opened(folder, drafter, monkeypatch, memory=100_000, prompt=40)
    budget = refused.value.smallest
    assert budget is not None
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    with (model := opened(folder, drafter, monkeypatch, memory=budget, prompt=40)).outcore as session:
        mx.reset_peak_memory()
        given = [r.token for r in outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=6)]
        assert len(given) == 6 and session.metrics.drafted > 2
        peak = mx.get_peak_memory() - others
        assert budget - 2 * 47 * tokens * 4 < peak <= budget
