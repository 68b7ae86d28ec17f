"""Drafting changes how many forward passes a text takes, and nothing else."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

import outcore
import zoo
from outcore.cli.main import main
from outcore.decode import one_text, text_drafts
from outcore.decode.one_text import Sampler
from outcore.decode.preparation import prepare
from outcore.decode.sampling import SAMPLING, MlxLmSampler, make_sampler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import TextState
from outcore.decode.speculative.proposers import Both, Guess, NGram, Proposer, drawn
from outcore.errors import BudgetError, UsageError
from outcore_drafts.self_draft import CopyProposer
from stand_ins import Oracle, TokensOnly

TYPES = {
    "llama": False, "gemma3_text": True, "qwen3_5": False, "mamba2": True, "rwkv7": False, "falcon_h1": True,
    "recurrent_gemma": True, "deepseek_v3": True, "qwen3_5_moe": True,
}  # fmt: skip
"""A type for each set of caches, and whether its drafted tokens share a pass."""


def tokens(model: Any, prompt: list[int], n: int, **kwargs: Any) -> list[int]:
    return [r.token for r in outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=n, **kwargs)]


def with_oracle(monkeypatch: pytest.MonkeyPatch, oracle: Oracle, most: int = 7) -> None:
    monkeypatch.setattr(outcore.decode.speculative.drafting.Drafting, "source", lambda *_: oracle)
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(most, fixed=True))


def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft whether it is worth it here or not: a small model's weights are read in no time."""
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda most, _: DraftLengthPolicy(min(most, 6), fixed=True))


def plain_answer(folder: Path, prompt: list[int], n: int, **options: Any) -> list[int]:
    """mlx-lm's own tokens; drawn ones are those of seed 7."""
    whole, _ = mlx_lm.utils.load_model(folder)
    mx.random.seed(7)
    return [int(token) for token, _ in generate_step(mx.array(prompt), whole, max_tokens=n, **options)]


NINE = [3 + i % 40 for i in range(9)]


@pytest.mark.parametrize(("model_type", "in_blocks"), TYPES.items())
def test_any_cache_goes_back(model_type: str, in_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    plain = plain_answer(folder, NINE, 10)
    monkeypatch.setattr(one_text, "on_cpu", lambda: not in_blocks)
    model, _ = outcore.load_model(folder, resident=0, context=64, prompt=9, draft="ngram", govern=False)
    with model.outcore as session:
        # Of three drafted tokens, the last alone is wrong.
        for wrong, most in ((3, 7), (3, 3)) if in_blocks else ((3, 7), (1000, 7)):
            with_oracle(monkeypatch, Oracle([*NINE, *plain], wrong), most)
            session.metrics.reset()
            assert tokens(model, NINE, 10) == plain
            assert session.metrics.accepted > 3 and session.metrics.sweeps < 9
            assert (session.metrics.accepted < session.metrics.drafted) == (wrong == 3)


@pytest.mark.parametrize("model_type", ["rwkv7", "recurrent_gemma"])
def test_a_copy_goes_on_from_any_cache_and_leaves_it_alone(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of all bits is always right, where the text goes on from any number of guesses."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    twin, _ = mlx_lm.utils.load_model(folder)
    plain = [int(token) for token, _ in generate_step(mx.array(NINE), twin, max_tokens=9)]

    def source(
        _: Any, control: DraftLengthPolicy, sampler: Any, vocabulary: int, state: TextState, *__: Any
    ) -> Proposer:
        return CopyProposer(twin, partial(drawn, how=None, vocabulary=vocabulary, name="self"), state)

    monkeypatch.setattr(outcore.decode.speculative.drafting.Drafting, "source", source)
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(5, fixed=True))
    model, _ = outcore.load_model(folder, resident=0, context=64, prompt=9, draft="ngram", govern=False)
    with model.outcore as session:
        assert tokens(model, NINE, 9) == plain
        assert session.metrics.drafted == session.metrics.accepted > 5


@pytest.mark.parametrize(("model_type", "draft"), [("llama", "self:2"), ("qwen3_5", "ngram")])
def test_every_source_gives_the_text_of_plain_decoding(
    model_type: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    prompt = [3 + i % 7 for i in range(12)]
    model, _ = outcore.load_model(folder, resident=1, context=64, prompt=12, draft=draft, govern=False)
    with model.outcore as session:
        assert tokens(model, prompt, 8) == plain_answer(folder, prompt, 8)
        # A text of random weights hardly ever repeats itself.
        assert session.metrics.drafted or draft == "ngram"


@pytest.mark.parametrize("how", [None, MlxLmSampler(temp=0.8)], ids=["greedy", "drawn"])
def test_a_draft_of_no_numbers_guesses_nothing(how: Any) -> None:
    """A GPU has been seen to give NaN for a copy's logits: that costs drafts, and no text."""
    draw = partial(drawn, how=how, vocabulary=9, name="copy")
    assert draw(mx.full((8,), mx.nan)) is None
    assert draw(mx.arange(8.0)) is not None


@pytest.mark.parametrize(
    "options", [{"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 24}, {"max_kv_size": 24}], ids=str
)
def test_a_copy_goes_on_from_caches_that_are_quantized_or_bounded_on_the_way(
    options: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafted tokens share a pass, as on a GPU, in which mlx-lm's bounded caches show each of them another
    window than by itself."""
    always_draft(monkeypatch)
    monkeypatch.setattr(one_text, "on_cpu", lambda: False)
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    prompt = [3 + i % 7 for i in range(20)]
    model, _ = outcore.load_model(folder, resident=0, context=64, prompt=20, draft="self:4", govern=False)
    with model.outcore as session:
        assert tokens(model, prompt, 14, **options) == plain_answer(folder, prompt, 14, **options)
        assert session.metrics.drafted > 4


def test_with_mlx_lms_samplers_and_processors_a_seed_gives_mlx_lms_tokens(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's sampler does not tell what it draws from: it decides, token by token, as without a draft. Processors see
    the tokens that they would see without one."""
    seen: dict[bool, list[list[int]]] = {False: [], True: []}

    def options(ours: bool) -> dict[str, Any]:
        def spy(ids: mx.array, logits: mx.array) -> mx.array:
            seen[ours].append(ids.tolist())  # type: ignore[arg-type]
            return logits

        processors = [*make_logits_processors(repetition_penalty=1.3), spy]
        return {"sampler": mlx_lm_sampler(temp=0.8, top_p=0.9), "logits_processors": processors}

    folder = quick_models(2)
    plain = plain_answer(folder, NINE, 10, **options(False))
    with_oracle(monkeypatch, Oracle([*NINE, *plain]))
    model, _ = outcore.load_model(folder, resident=1, draft="ngram", context=64, prompt=9, govern=False)
    with model.outcore as session:
        mx.random.seed(7)
        assert tokens(model, NINE, 10, **options(True)) == plain
        assert session.metrics.drafted > session.metrics.accepted > 0
    assert seen[True] == seen[False][:10]  # mlx-lm computes one token more than it hands out


def chi_squared_passes(counts: Any, p: Any) -> bool:
    """Pearson's test at 6 standard deviations; no draw of what has no chance."""
    n = counts.sum()
    if counts[p == 0].any():
        return False
    large = p * n >= 5
    expected = np.append(p[large] * n, max(p[~large].sum() * n, 1e-9))
    found = np.append(counts[large], counts[~large].sum())
    if expected[-1] < 1:
        expected, found = expected[:-1], found[:-1]
    degrees = max(1, len(expected) - 1)
    return bool(((found - expected) ** 2 / expected).sum() < degrees + 6 * (2 * degrees) ** 0.5)


class Tilted:
    """A source that draws its guesses from a distribution of its own."""

    name, cheaper = "tilted", None

    def __init__(self, rows: Any, draws: bool) -> None:
        self.rows, self.draws, self.text = rows, draws, [0]

    def begin(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        q = mx.array(self.rows[[*self.text, *drafted][-1]])
        token = mx.random.categorical(mx.log(q)) if self.draws else mx.argmax(q)
        return Guess(int(token), ("tilted", 0), q if self.draws else None, int(mx.argmax(q)) if self.draws else None)


def test_one_seed_gives_one_text_drafted_or_not(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[list[int]] = []
    for draft in ("none", "self:2"):
        monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(3, fixed=True))
        model, _ = outcore.load_model(quick_models(2), resident=1, draft=draft, context=64, prompt=9, govern=False)
        with model.outcore as session:
            mx.random.seed(7)
            coupled = {"temp": 0.9, "top_p": 0.95, "xtc_probability": 0.5, "xtc_special_tokens": [2], "coupled": True}
            texts.append(tokens(model, NINE, 7, sampler=make_sampler(**coupled)))  # type: ignore[arg-type]
            assert (session.metrics.drafted > session.metrics.accepted) == (draft != "none")
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("kind", "temp"), [("draws", 0.8), ("likeliest", 1.5), ("both", 0.8)])
def test_sampled_text_is_distributed_like_plain_sampling(kind: str, temp: float) -> None:
    """Pairs of tokens of a text that is drafted by something quite different, against a chain's own."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(6, 6)).astype(np.float32) * 1.5
    sampler = MlxLmSampler(temp=temp, top_p=0.95)
    p = np.array(sampler.distribution(mx.array(logits)))
    q = rng.dirichlet(np.ones(6), size=6).astype(np.float32)
    mx.random.seed(11)
    chooser = Sampler(sampler, (), [0])
    control = DraftLengthPolicy(3, fixed=True)
    source: Any = Tilted(q, kind != "likeliest")
    if kind == "both":
        # Repetitions are followed where they differ from the model's likeliest token.
        source = Both(NGram(), source, lambda key: {"ngram": 0.1, "against": 0.9, "tilted": 0.5}[key[0]])
    drafted = accepted = 0
    while len(chooser.text) < 700:
        guesses = control.draft(source, chooser.text, 3)
        drafted += len(guesses)
        for guess in (*guesses, None):
            _, _, right = chooser.choose(mx.array(logits[chooser.text[-1]])[None], guess)
            accepted += right
            if not right:
                break
    assert 0 < accepted < drafted
    for before in range(6):
        after = [b for a, b in pairwise(chooser.text) if a == before]
        assert chi_squared_passes(np.bincount(after, minlength=6), p[before])


def test_a_text_that_is_left_early_leaves_the_cache_as_mlx_lm_does(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quick_models(2)
    whole, _ = mlx_lm.utils.load_model(folder)
    plain = plain_answer(folder, NINE, 10)
    with_oracle(monkeypatch, Oracle([*NINE, *plain], 4))
    model, _ = outcore.load_model(folder, resident=1, draft="ngram", context=64, prompt=9, govern=False)
    with model.outcore:
        for n in (1, 5):
            cache = make_prompt_cache(model)
            responses = outcore.stream_generate(model, TokensOnly(), NINE, 40, prompt_cache=cache)
            assert [next(responses).token for _ in range(n)] == plain[:n]
            responses.close()
            assert {c.offset for c in cache if hasattr(c, "offset")} == {len(NINE) + n}
            logits = model(mx.array([[7]]), cache=cache)
            again = make_prompt_cache(whole)
            whole(mx.array([NINE]), cache=again)
            for token in plain[:n]:
                whole(mx.array([[token]]), cache=again)
            assert mx.allclose(logits, whole(mx.array([[7]]), cache=again), atol=1e-3).item()


@pytest.mark.parametrize("draft", ["ngram", "self:2"])
def test_the_budget_holds_with_what_drafts(
    draft: str, quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of layers and of the head; and layers with a copy."""
    always_draft(monkeypatch)
    options: dict[str, Any] = {"draft": draft, "context": 64, "prompt": 9}
    folder = quick_models(4)
    memory = prepare(folder, memory="1GB", **options).planning.smallest
    if draft == "ngram":  # random weights hardly ever repeat themselves
        with_oracle(monkeypatch, Oracle([*NINE, *plain_answer(folder, NINE, 6)]), 3)
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    model, _ = outcore.load_model(folder, memory=memory, govern=False, **options)
    with model.outcore as session:
        assert session.plan.streams
        mx.reset_peak_memory()
        tokens(model, NINE, 6)
        assert mx.get_peak_memory() - others <= memory
        assert session.metrics.drafted


def test_a_budget_that_is_too_small_for_a_draft_names_it_and_says_what_is_enough(
    quick_models: Callable[[int], Path],
) -> None:
    options: dict[str, Any] = {"context": 160, "prompt": 40}
    memory = prepare(quick_models(2), memory="1GB", draft="none", **options).planning.smallest
    with pytest.raises(BudgetError, match="draft self") as refused:
        outcore.load_model(quick_models(2), memory=memory, draft="self:8", **options)
    assert refused.value.smallest is not None and refused.value.smallest > memory


@pytest.mark.parametrize(
    ("draft", "says"), [("self:1", "bits"), ("self:x", "number"), ("self:7", "bits"), ("nowhere/at-all", "nowhere")]
)
def test_drafts_that_cannot_be_meant(draft: str, says: str, quick_models: Callable[[int], Path]) -> None:
    with pytest.raises(outcore.OutcoreError, match=says):
        outcore.load(str(quick_models(2)), memory="40MB", draft=draft)


def test_a_number_of_drafted_tokens_that_cannot_be_meant(quick_models: Callable[[int], Path]) -> None:
    model, _ = outcore.load_model(quick_models(2), memory="25MB", context=64, prompt=20)
    with model.outcore:
        for most in (0, -3, 100_000):
            with pytest.raises(UsageError, match="num_draft_tokens"):
                tokens(model, NINE, 4, num_draft_tokens=most)


def test_a_model_with_another_tokenizer_is_refused(quick_models: Callable[[int], Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(quick_models(2), other)
    found = json.loads((other / "tokenizer.json").read_text())
    names = list(found["model"]["vocab"])
    vocab = found["model"]["vocab"]
    vocab[names[300]], vocab[names[301]] = vocab[names[301]], vocab[names[300]]
    (other / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(UsageError, match="another tokenizer"):
        outcore.load(str(quick_models(2)), memory="160MB", draft=str(other))


def test_a_copy_that_was_made_beside_a_packed_one_is_used(
    quick_models: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "packed"
    assert main(["pack", str(quick_models(2)), "-o", str(packed)]) == 0
    args = ["generate", "--model", str(packed), "--memory", "80MB", "--resident", "1", "--prompt", "def f", "--json"]
    stamps = []
    for _ in range(2):
        capsys.readouterr()
        assert main([*args, "-m", "2", "--draft", "self:4"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["draft"] == "self:4"
        stamps.append([f.stat().st_mtime_ns for f in sorted((packed / "draft-4bit").glob("*.safetensors"))])
    # 2 layers, and the head where the model's is streamed.
    assert len(stamps[0]) in (2, 3) and stamps[0] == stamps[1]


def test_the_last_forward_pass_of_a_text_counts_for_the_acceptance(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks on after a text's last token; what the pass that made it gave counts like any other."""
    folder = quick_models(2)
    plain = plain_answer(folder, NINE, 12)
    controls: list[DraftLengthPolicy] = []
    with_oracle(monkeypatch, Oracle([*NINE, *plain], 1000))
    monkeypatch.setattr(
        text_drafts, "DraftLengthPolicy", lambda *_: controls.append(DraftLengthPolicy(7, fixed=True)) or controls[-1]
    )
    model, _ = outcore.load_model(folder, resident=0, context=64, prompt=9, draft="ngram", govern=False)
    with model.outcore as session:
        for taken in (12, 10):  # to its end, and left before
            session.metrics.reset()
            answer = outcore.stream_generate(model, TokensOnly(), NINE, max_tokens=12)
            assert [next(answer).token for _ in range(taken)] == plain[:taken]
            answer.close()
            assert session.metrics.accepted > 5
            # The first token is the prompt's own; the one after the last may have been looked at.
            assert controls[-1].acceptance.made in (taken - 1, taken)


def test_what_a_cache_held_before_may_be_repeated(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    folder = quick_models(2)
    model, _ = outcore.load_model(folder, resident=1, draft="ngram", context=64, prompt=20, govern=False)
    with model.outcore as session:
        said, more = [*range(40, 48)], [50, 51]
        first = plain_answer(folder, [*said, *more], 1)
        for history, drafts in (((), False), ((*more, *first, 52, 53, *said), True)):
            cache = make_prompt_cache(model)
            model(mx.array([said]), cache=cache)
            session.metrics.reset()
            tokens(model, more, 3, prompt_cache=cache, history=history)
            assert (session.metrics.drafted > 0) == drafts


def test_a_text_that_leaves_no_room_for_guesses_says_so(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_5", tmp_path / "model")
    options = {"draft": "self:4", "context": 64, "govern": False}
    with pytest.raises(outcore.BudgetError) as refused:
        outcore.load_model(folder, memory=1000, **options)
    for tokens, noted in ((8, False), (62, True)):
        model, _ = outcore.load_model(folder, memory=refused.value.smallest, **options)
        with model.outcore as session:
            list(outcore.stream_generate(model, TokensOnly(), [5 + i % 7 for i in range(tokens)], max_tokens=4))
            assert not (noted and session.metrics.drafted)
            assert any("nothing is drafted" in note for note in session.notes) == noted


def test_samplers_are_mlx_lms() -> None:
    logprobs = mx.log(mx.softmax(mx.random.normal((4, 50)) * 3, axis=-1))
    every: list[dict[str, float]] = [
        {"temp": 1.0, "top_p": 0.8}, {"temp": 0.6, "min_p": 0.9, "min_tokens_to_keep": 3},
        {"temp": 2.0, "top_k": 5}, {"temp": 0.7, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    ]  # fmt: skip
    assert set().union(*every) == set(SAMPLING)
    for options in every:
        mx.random.seed(3)
        theirs = mlx_lm_sampler(**options)(logprobs)
        mx.random.seed(3)
        ours = make_sampler(**options)
        assert mx.array_equal(ours(logprobs), theirs).item()
        p = np.array(ours.distribution(logprobs))
        assert np.allclose(p.sum(axis=-1), 1, atol=1e-5)
        drawn = np.array(ours(mx.tile(logprobs, (2000, 1)))).reshape(2000, 4)
        for row in range(4):
            counts = np.bincount(drawn[:, row], minlength=50)
            assert chi_squared_passes(counts, p[row])
