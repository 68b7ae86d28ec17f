"""Published drafters: read by their config, fed with the states of the model's layers, and drafting the same text."""

from __future__ import annotations

import copy
import functools
import gc
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import outcore_demo_model
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import drafter_files
import drafter_parity
import outcore
import zoo
from outcore.cli.main import main
from outcore.decode import one_text, preparation, text_drafts
from outcore.decode.preparation import prepare
from outcore.decode.sampling import make_sampler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.proposers import Guess
from outcore.decode.speculative.sources import parse_draft
from outcore.disk import reader as reader_module
from outcore.errors import BudgetError, CheckpointError, ReadError, UnsupportedModelError, UsageError
from outcore.plan.joint_plan import MOST
from outcore_drafters.config import is_drafter
from outcore_drafters.proposer import STEP, BlockProposer
from outcore_drafters.source import SharedParts
from outcore_drafts.mtp.hidden_states import WINDOW, HiddenStates
from stand_ins import TokensOnly

PROMPT = [3 + i % 40 for i in range(9)]


def tokens(model: Any, n: int = 10, prompt: Sequence[int] = PROMPT, **kwargs: Any) -> list[int]:
    return [r.token for r in outcore.stream_generate(model, TokensOnly(), list(prompt), max_tokens=n, **kwargs)]


@pytest.fixture(autouse=True)
def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda asked, _: DraftLengthPolicy(min(asked, 3), fixed=True))


def opened(folder: Path, draft: str | Path, **options: Any) -> Any:
    return outcore.load_model(folder, **{"draft": str(draft), "context": 48, "govern": False, **options})[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, list[int]]]:
    """A tiny model, a drafter for it that has no head of its own, and mlx-lm's greedy text of the resident model."""

    @functools.cache
    def make(model_type: str) -> tuple[Path, Path, list[int]]:
        there = tmp_path_factory.mktemp(model_type)
        folder = zoo.save_checkpoint(model_type, there / "model")
        theirs, _ = mlx_lm.utils.load_model(folder)
        ids = mx.array(PROMPT)
        text = [int(token) for token, _ in generate_step(ids, theirs, max_tokens=12)]
        return folder, drafter_files.save_eagle3(model_type, there / "drafter"), text

    return make


@pytest.mark.parametrize(("model_type", "in_blocks"), [("llama", False), ("qwen3_5", True)])
def test_a_drafter_gives_the_text_of_mlx_lm(
    made: Any, model_type: str, in_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense and hybrid; with passes of their own for drafted tokens, as on processors, and all in one; streamed and
    resident."""
    monkeypatch.setattr(one_text, "on_cpu", lambda: not in_blocks)
    folder, borrowing, text = made(model_type)
    # It has a head of its own, of a few tokens that the text says: so some are right.
    own = drafter_files.save_eagle3(model_type, tmp_path / "own", sorted(text[4:7]))
    for drafter, options in ((borrowing, {}), (own, {"resident": 0, "draft_bits": 4})):
        with (model := opened(folder, drafter, **options)).outcore as session:
            assert tokens(model, 12) == text
            assert session.metrics.drafted > 12 and session.drafting.name == drafter.name
            assert (session.streaming is None) == (options == {})
            assert drafter == borrowing or session.metrics.accepted > 0


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the drafters of the comparison with mlx-vlm's."""
    sizes = {"hidden_size": drafter_parity.HIDDEN, "vocab_size": drafter_parity.VOCABULARY}
    with pytest.MonkeyPatch.context() as patch:
        config = zoo.CONFIGS["qwen3"] | sizes | {"num_hidden_layers": drafter_parity.LAYERS}
        patch.setitem(zoo.CONFIGS, "qwen3", config)
        return zoo.save_checkpoint("qwen3", tmp_path_factory.mktemp("narrow") / "model")


@pytest.fixture(scope="module")
def narrows_text(narrow: Path) -> list[int]:
    with (model := opened(narrow, "none")).outcore:
        return tokens(model)


@pytest.mark.parametrize("case", ["dflash-windows", "dflash2", "dspark-certain"])
def test_drafters_of_blocks_give_the_same_text(
    narrow: Path, narrows_text: list[int], case: str, tmp_path: Path
) -> None:
    drafter_parity.write_checkpoint(case, tmp_path / case)
    with (model := opened(narrow, tmp_path / case, resident=2)).outcore as session:
        assert tokens(model) == narrows_text and session.metrics.drafted > 10 and session.drafting.name == case


def reference(model: Any, drafting: Any, text: Sequence[int], drafted: Sequence[int], first: int) -> int:
    """What the drafter says after a text and drafted tokens, computed at once; of the text from token ``first`` on."""
    ids = mx.array(list(text))
    with drafting._taps.listening() as heard:
        model(ids[None], cache=make_prompt_cache(model))
    known = drafting.model.text(drafting.shared)
    known.begin(heard[0][:, first:-1], ids[first + 1 :])
    return int(mx.argmax(known.logits(drafted)).item())


@pytest.mark.parametrize(("model_type", "prompt", "window", "resident"), [("qwen3_5", 18, 8, 0), ("llama", 9, 64, 1)])
def test_guesses_are_the_drafter_s_own_after_each_text(
    made: Any, model_type: str, prompt: int, window: int, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are those of the text's tokens, whatever was rejected, and in whatever chunks they came."""
    monkeypatch.setattr(HiddenStates.__init__, "__defaults__", (window,))
    guessed: list[tuple[list[int], list[int], int]] = []
    original, whole = BlockProposer.guess, list[int]()

    def guess(self: BlockProposer, drafted: Sequence[int]) -> Guess | None:
        found = original(self, drafted)
        assert found is not None
        guessed.append((list(self._text), list(drafted), found.token))
        # The text's own tokens three times of four, so that tokens are kept and given up.
        at = len(self._text) + len(drafted)
        right = len(guessed) % 4 and at < len(whole)
        return Guess(whole[at] if right else (found.token + 1) % 90, found.key)

    folder, drafter, _ = made(model_type)
    asked = (PROMPT * 3)[:prompt]
    with (plain := opened(folder, "none")).outcore:
        whole += [*asked, *tokens(plain, 12, asked)]
    monkeypatch.setattr(BlockProposer, "guess", guess)
    with (model := opened(folder, drafter, resident=resident, prompt=prompt, prefill_step_size=4)).outcore as session:
        assert asked + tokens(model, 12, asked) == whole
        assert 2 < session.metrics.accepted < session.metrics.drafted
        assert {len(drafted) for _, drafted, _ in guessed} == {0, 1, 2}
        for so_far, drafted, token in guessed[::2]:
            assert token == reference(model, session.drafting, so_far, drafted, max(0, prompt - window))


def test_a_text_goes_on_after_a_failure(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, drafter, text = made("qwen3_5")
    with (model := opened(folder, drafter, resident=0)).outcore as session:
        shared, usual, calls = session.drafting.shared, reader_module.read_chunk, [0]
        draw = shared.logits

        def interrupted(states: mx.array) -> mx.array:
            calls[0] += 1
            if calls[0] == 6:
                raise KeyboardInterrupt
            made: mx.array = draw(states)
            return made

        def broken(*args: Any) -> int:
            calls[0] += 1
            if calls[0] >= 22:
                raise OSError(5, "Input/output error")
            return usual(*args)

        for failure, where, name, fails in (
            (KeyboardInterrupt, shared, "logits", interrupted),
            (ReadError, reader_module, "read_chunk", broken),
        ):
            calls[0], cache, given = 0, make_prompt_cache(model), list[int]()
            with monkeypatch.context() as patch, pytest.raises(failure):
                patch.setattr(where, name, fails)
                for r in outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=8, prompt_cache=cache):
                    given.append(r.token)
            assert 0 < len(given) < 8 and given == text[: len(given)]
            held = session.in_cache - len(PROMPT)
            more = tokens(model, 8 - len(given), given[held:], prompt_cache=cache, history=[*PROMPT, *given[:held]])
            assert given + more == text[:8] == tokens(model, 8)


def test_a_seed_gives_one_text_with_a_drafter_or_without(made: Any) -> None:
    folder, drafter, _ = made("llama")
    texts = []
    for draft in ("none", drafter):
        with (model := opened(folder, draft, resident=0)).outcore:
            mx.random.seed(5)
            texts.append(tokens(model, 6, sampler=make_sampler(0.9, coupled=True)))
    assert texts[0] == texts[1]


def test_the_budget_holds_with_a_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo.CONFIGS, "llama", copy.deepcopy(zoo.CONFIGS["llama"]))
    # The drafter is larger than all that is planned for what may come on top.
    zoo.CONFIGS["llama"] |= {"hidden_size": 256, "intermediate_size": 128}
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    monkeypatch.setattr(drafter_files, "BETWEEN", 2048)
    drafter = drafter_files.save_eagle3("llama", tmp_path / "drafter")
    options: dict[str, Any] = {"context": 170, "prompt": 150}
    with pytest.raises(BudgetError, match="and draft drafter") as refused:
        opened(folder, drafter, memory=100_000, **options)
    budget = refused.value.smallest
    assert budget is not None
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    with (model := opened(folder, drafter, memory=budget, **options)).outcore as session:
        mx.reset_peak_memory()
        assert len(tokens(model, 4, (PROMPT * 20)[:150])) == 4 and session.metrics.drafted > 2
        peak = mx.get_peak_memory() - others
        weights = sum(a.nbytes for _, a in tree_flatten(session.drafting.model.parameters()))
        assert budget - weights < peak <= budget
    # Of a long prompt no more states are planned, whatever its chunks.
    long: dict[str, Any] = {"context": 4096, "prompt": 4000}
    rest = [preparation.prepare(folder, draft=str(each), **long).profile.size.rest for each in (drafter, "none")]
    assert rest[0] - rest[1] == (WINDOW + 2 * (MOST + STEP)) * 3 * 256 * 4
    least = {bits: smallest(folder, drafter, draft_bits=bits, **options) for bits in (None, 8, 2)}
    assert least[None] - least[8] > 0.6 * weights and least[8] - least[2] > 0.1 * weights


def smallest(folder: Path, drafter: Path, **options: Any) -> int:
    with pytest.raises(BudgetError) as refused:
        opened(folder, drafter, memory=100_000, **options)
    assert refused.value.smallest is not None
    return refused.value.smallest


def test_a_drafter_is_given_up_while_it_drafts(made: Any) -> None:
    folder, drafter, text = made("llama")
    with (model := opened(folder, drafter, resident=0)).outcore as session:
        before = 0
        for n, r in enumerate(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=10), 1):
            assert r.token == text[n - 1]
            if n == 4:
                before = session.metrics.drafted
                session.residency.layers.give_up_draft()
        assert session.drafting.name == "ngram" and session.metrics.drafted - before < 4
        without = preparation.prepare(folder, context=48).profile.size
        assert (session.size.rest, session.size.non_layer, session.size.cache) == (
            without.rest, without.non_layer, without.cache
        )  # fmt: skip
        assert tokens(model) == text[:10]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target_hidden_size": 48}, "for another model, with states of 48; .*model has 64; give one that was made"),
        ({"transformer_layer_config": {"hidden_size": 64, "vocab_size": 99}}, "another model, with 99 tokens; .* 128"),
        ({"speculators_config": {"verifier": {"num_hidden_layers": 7}}}, "another model, with 7 layers; .* has 4"),
        ({"speculators_config": {"verifier": {"model_type": "olmo"}}}, "of type olmo; .*model is of type llama"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads layer 8, and this one's last is 3"),
    ],
)
def test_a_drafter_for_another_model_is_refused(
    made: Any, changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = made("llama")
    drafter = drafter_files.save_eagle3("llama", tmp_path / "drafter", **changes)
    monkeypatch.setattr(mx, "eval", None)  # nothing is loaded
    with pytest.raises(UsageError, match=why):
        opened(folder, drafter)


def test_drafters_that_cannot_be_used(made: Any, tmp_path: Path) -> None:
    folder, drafter, _ = made("llama")
    unknown = {"architectures": ["MedusaModel"], "speculators_model_type": "medusa"}
    strange = drafter_files.save_eagle3("llama", tmp_path / "strange", **unknown)
    with pytest.raises(UnsupportedModelError, match=r"an unknown kind \(medusa, MedusaModel\); known are EAGLE-3"):
        opened(folder, strange)
    wide = drafter_files.save_eagle3("llama", tmp_path / "wide", transformer_layer_config={"hidden_size": 64})
    with pytest.raises(UnsupportedModelError, match="its EAGLE-3 drafter cannot be made: KeyError"):
        opened(folder, wide)
    part = drafter_files.save_eagle3("llama", tmp_path / "part", norm_before_fc=False)
    config = json.loads((part / "config.json").read_text(encoding="utf-8"))
    config["transformer_layer_config"]["intermediate_size"] = 80
    (part / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"gate_proj.weight has the shape \(96, 64\), not \(80, 64\)"):
        opened(folder, part)
    (part / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors files here"):
        opened(folder, part)
    with pytest.raises(UsageError, match="draft_bits 5: give 2, 3, 4, 6 or 8"):
        opened(folder, drafter, draft_bits=5)
    with pytest.raises(UsageError, match="draft_bits: only for a published drafter"):
        opened(folder, "ngram", draft_bits=4)
    with pytest.raises(UsageError, match="needs the model's head in memory"):
        opened(folder, drafter, head_resident=False)
    with pytest.raises(UsageError, match="give the drafter's folder"):
        opened(folder, "drafter")


PUBLISHED = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    "dflash": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}},
    "dspark": {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"},
    "of its type": {
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": {"model_type": "qwen3_5"}},
    },
}


@pytest.mark.parametrize("tokenizer", [False, True])
@pytest.mark.parametrize("form", PUBLISHED)
def test_a_drafter_in_place_of_a_model_is_called_one(
    form: str, tokenizer: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drafter_files.save_eagle3("llama", tmp_path / "drafter")
    (folder / "config.json").write_text(json.dumps(PUBLISHED[form]), encoding="utf-8")
    for name in ("tokenizer.json", "chat_template.jinja") if tokenizer else ():
        shutil.copy(Path(outcore_demo_model.__file__).parent / name, folder)
    (text := tmp_path / "text.txt").write_text("a b c " * 10_000, encoding="utf-8")
    train = ["draft", "train", "--input", str(text), "--output", str(tmp_path / "new"), "--model"]
    of = "a model of type qwen3_5" if form == "of its type" else "a model"
    for words in (["generate", "-p", "hi"], ["chat"], ["info"], ["pack"], ["plan", "--no-calibrate"], train):
        assert main([*words, str(folder)]) == 1
        said = f"{folder}: is a drafter for {of}; give that model, with --draft {folder}\n"
        assert capsys.readouterr().err.endswith(f"outcore {words[0]}: {said}")
    assert main(["pull", str(folder)]) == 0


def test_no_model_s_type_is_taken_for_a_drafter_s() -> None:
    assert not [t for t, config in zoo.CONFIGS.items() if is_drafter({**config, "model_type": t})]


def test_drafts_that_never_happen_are_noted(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("dbrx", tmp_path / "model")
    with (model := opened(folder, "ngram", resident=0)).outcore as session:
        tokens(model, prompt=[3, 4] * 8)
        assert session.metrics.drafted == 0 and any("nothing is drafted" in note for note in session.notes)
    with (model := opened(folder, "ngram", memory="1GB")).outcore as session:
        tokens(model, prompt=[3, 4] * 8)
        assert session.metrics.drafted > 0 and not any("nothing is drafted" in note for note in session.notes)


def test_a_folder_s_config_says_what_drafts(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, drafter, _ = made("llama")
    assert parse_draft(str(folder)) == ("model", str(folder))
    assert parse_draft(str(drafter)) == parse_draft(f"drafter:{drafter}") == ("drafter", str(drafter))
    monkeypatch.chdir(drafter.parent)
    assert parse_draft("drafter") == ("drafter", "drafter")
    with (model := opened(folder, folder)).outcore as session:
        assert session.drafting.kind == "model" and len(tokens(model)) == 10 and session.metrics.accepted > 0


def test_states_that_cannot_be_read_are_no_states(made: Any) -> None:
    folder, drafter, text = made("iquestloopcoder")
    with (model := opened(folder, drafter)).outcore as session:
        assert tokens(model, 6) == text[:6] and session.metrics.drafted == 0
        assert any("cannot read the states of this type of model" in note for note in session.notes)


def test_models_of_mlx_vlm_that_keep_their_sizes_in_config_are_drafted_for(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    import vision_zoo

    folder = vision_zoo.save_checkpoint("dots_ocr", tmp_path / "model")
    with (model := opened(folder, "none")).outcore:
        text = tokens(model, 12)
    # The drafter fits the tiny llama's width, tokens and layers, which are this one's too.
    drafter = drafter_files.save_eagle3("llama", tmp_path / "own", sorted(set(text)), speculators_config={})
    with (model := opened(folder, drafter, resident=0)).outcore as session:
        assert tokens(model, 12) == text and session.drafting.name == "own"
        assert 0 < session.metrics.accepted < session.metrics.drafted


def test_specforge_s_names_are_read(made: Any, tmp_path: Path) -> None:
    folder, drafter, _ = made("llama")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    flat = {**config.pop("transformer_layer_config"), **config, "architectures": ["LlamaForCausalLMEagle3"]}
    flat = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": flat.pop("eagle_aux_hidden_state_layer_ids")}} | flat
    del flat["speculators_model_type"]
    (theirs / "config.json").write_text(json.dumps(flat), encoding="utf-8")
    loaded: Any = mx.load(str(drafter / "model.safetensors"))
    named = {name.replace("layers.0.", "midlayer."): a for name, a in loaded.items()}
    mx.save_safetensors(str(theirs / "model.safetensors"), named)
    said = []
    for each in (drafter, theirs):
        with (model := opened(folder, each)).outcore as session:
            assert isinstance(session.drafting.shared, SharedParts) and session.drafting.model.taps == (0, 2, 3)
            said.append(reference(model, session.drafting, PROMPT, [4, 5], 0))
    assert said[0] == said[1]


def test_states_are_the_outputs_of_the_layers_that_the_config_names(made: Any) -> None:
    folder, drafter, _ = made("llama")
    theirs, _ = mlx_lm.utils.load_model(folder)
    ids, outputs = mx.array([PROMPT[:4]]), []  # within the layers' windows
    states = theirs.model.embed_tokens(ids)
    for layer in theirs.layers:
        outputs.append(states := layer(states, "causal"))
    for resident in (None, 1):
        with (model := opened(folder, drafter, resident=resident)).outcore as session:
            with session.drafting._taps.listening() as heard:
                model(ids)
            # The numbers count from the embeddings.
            wanted = mx.concatenate([outputs[n] for n in (0, 2, 3)], axis=-1)
            assert len(heard) == 1 and mx.array_equal(heard[0], wanted).item()


def test_auto_takes_the_drafter_in_the_model_s_folder(made: Any, tmp_path: Path) -> None:
    """A machine that was never measured: it guesses more than repetitions do, and reads hardly more."""
    folder, drafter, _ = made("qwen3")
    model = shutil.copytree(folder, tmp_path / "model")
    options: dict[str, Any] = {"resident": 0, "context": 64, "prompt": 16}
    memory = prepare(model, memory="1GB", draft=str(drafter), **options).planning.smallest
    names = []
    for _ in range(2):
        prepared = prepare(model, memory=memory, draft="auto", **options)
        names.append((prepared.draft and prepared.draft.name, "drafter" in [c.name for c in prepared.choices]))
        shutil.copytree(drafter, model / "drafter", dirs_exist_ok=True)
    assert names == [("ngram", False), ("drafter", True)]
    assert (own := prepare(model, draft="drafter", **options).draft) is not None and own.kind == "drafter"
