"""Drafting changes how many sweeps a text takes, and nothing else."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

import outcore
import zoo
from outcore.cli.main import main
from outcore.decode import one_text, text_drafts
from outcore.decode.one_text import Sampler
from outcore.decode.sampling import SAMPLING, MlxLmSampler, make_sampler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import TextState
from outcore.decode.speculative.proposers import Both, Guess, NGram, Proposer, drawn
from outcore.errors import BudgetError, UsageError
from outcore_drafts.self_draft import CopyProposer
from stand_ins import Oracle, TokensOnly

TYPES = [
    "llama", "gemma3_text", "qwen3_5", "qwen3_5_moe", "mamba2", "nemotron_h", "rwkv7", "falcon_h1", "lfm2", "gpt_oss",
    "recurrent_gemma", "jamba", "deepseek_v3", "qwen3_next",
]  # fmt: skip
"""A type for each set of caches."""


def tokens(model: Any, prompt: list[int], n: int, **kwargs: Any) -> list[int]:
    return [r.token for r in outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=n, **kwargs)]


def with_oracle(monkeypatch: pytest.MonkeyPatch, oracle: Oracle, most: int = 7) -> None:
    monkeypatch.setattr(outcore.decode.speculative.drafting.Drafting, "source", lambda *_: oracle)
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(most, fixed=True))


def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft whether it is worth it here or not: a small model's weights are read in no time."""
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda most, _: DraftLengthPolicy(min(most, 6), fixed=True))


CASES = [(t, n % 2 == 1) for n, t in enumerate(TYPES)]


@pytest.mark.parametrize(("model_type", "in_blocks"), CASES, ids=lambda v: v if isinstance(v, str) else f"blocks={v}")
def test_any_cache_goes_back(model_type: str, in_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    prompt = [3 + i % 40 for i in range(9)]
    model, _ = outcore.load_model(folder, resident=0, context=64, prompt=9, draft="none", govern=False)
    with model.outcore:
        plain = tokens(model, prompt, 24)
    monkeypatch.setattr(one_text, "on_cpu", lambda: not in_blocks)
    for wrong in (3,) if in_blocks else (3, 1000):
        with_oracle(monkeypatch, Oracle([*prompt, *plain], wrong))
        model, _ = outcore.load_model(folder, resident=0, context=64, prompt=9, draft="ngram", govern=False)
        with model.outcore as session:
            found = tokens(model, prompt, 24)
            assert found == plain
            assert session.metrics.accepted > 10 and session.metrics.sweeps < 18
            if wrong < 24:
                assert session.metrics.accepted < session.metrics.drafted


@pytest.mark.parametrize("model_type", TYPES[::2])
def test_a_copy_goes_on_from_any_cache_and_leaves_it_alone(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of all bits is always right, where the text goes on from any number of guesses."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    prompt = [3 + i % 40 for i in range(9)]
    twin, _ = outcore.load_model(folder, draft="none", govern=False)
    with twin.outcore:
        plain = tokens(twin, prompt, 24)
        copies: list[Proposer] = []

        def source(
            _: Any, control: DraftLengthPolicy, sampler: Any, vocabulary: int, state: TextState, *__: Any
        ) -> Proposer:
            copies.append(CopyProposer(twin, partial(drawn, how=None, vocabulary=vocabulary, name="self"), state))
            return copies[-1]

        monkeypatch.setattr(outcore.decode.speculative.drafting.Drafting, "source", source)
        monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(5, fixed=True))
        model, _ = outcore.load_model(folder, resident=0, context=64, prompt=9, draft="ngram", govern=False)
        with model.outcore as session:
            assert tokens(model, prompt, 24) == plain
            assert copies and session.metrics.drafted == session.metrics.accepted > 12


@pytest.mark.parametrize(
    ("model_type", "draft"),
    [
        ("llama", "self:2"), ("qwen3_5", "ngram"), ("qwen3_5_moe", "self:2"), ("gemma3_text", "self:4"),
    ],
)  # fmt: skip
def test_every_source_gives_the_text_of_plain_decoding(
    model_type: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    prompt = [3 + i % 7 for i in range(20)]
    texts = []
    for what in ("none", draft):
        model, _ = outcore.load_model(folder, resident=1, context=64, prompt=20, draft=what, govern=False)
        with model.outcore as session:
            texts.append(tokens(model, prompt, 32))
            # A text of random weights hardly ever repeats itself.
            assert session.metrics.drafted or what in ("none", "ngram")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("how", [None, MlxLmSampler(temp=0.8)], ids=["greedy", "drawn"])
def test_a_draft_of_no_numbers_guesses_nothing(how: Any) -> None:
    """A GPU has been seen to give NaN for a copy's logits: that costs drafts, and no text."""
    draw = partial(drawn, how=how, vocabulary=9, name="copy")
    assert draw(mx.full((8,), mx.nan)) is None
    assert draw(mx.arange(8.0)) is not None


@pytest.mark.parametrize(
    "options", [{"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 24}, {"max_kv_size": 24}], ids=str
)
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
def test_a_copy_goes_on_from_caches_that_are_quantized_or_bounded_on_the_way(
    options: dict[str, int], on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where drafted tokens share a pass, as on a GPU, in which mlx-lm's bounded caches show each of them another
    window than by itself."""
    always_draft(monkeypatch)
    monkeypatch.setattr(one_text, "on_cpu", lambda: on_cpu)
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    prompt = [3 + i % 7 for i in range(20)]
    texts = []
    for draft in ("none", "self:4"):
        model, _ = outcore.load_model(folder, resident=0, context=64, prompt=20, draft=draft, govern=False)
        with model.outcore as session:
            texts.append(tokens(model, prompt, 32, **options))
            assert (session.metrics.drafted > 8) == (draft != "none")
    assert texts[0] == texts[1]


def test_the_same_seed_draws_the_same_tokens_with_any_sampler(
    short_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's own sampler does not tell what it draws from: it decides, token by token, as without a draft."""
    always_draft(monkeypatch)
    texts = []
    for draft in ("none", "ngram"):
        model, tokenizer = outcore.load(
            str(short_model), memory="25MB", resident=1, draft=draft, context=128, prompt=30
        )
        with model.outcore as session:
            mx.random.seed(7)
            sampler = mlx_lm_sampler(temp=0.8, top_p=0.9)
            texts.append([r.token for r in outcore.stream_generate(model, tokenizer, PROMPT, 60, sampler=sampler)])
            assert (session.metrics.accepted > 0) == (draft == "ngram")
    assert texts[0] == texts[1]


PROMPT = "def read_text(path):\n    return path.read_text()\n\ndef read_"


def test_processors_see_what_they_would_without_a_draft(short_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    texts, seen = [], []
    for draft in ("none", "self:4"):
        model, tokenizer = outcore.load(
            str(short_model), memory="80MB", resident=1, draft=draft, context=128, prompt=30
        )
        with model.outcore:
            calls: list[list[int]] = []

            def spy(ids: mx.array, logits: mx.array, calls: list[list[int]] = calls) -> mx.array:
                calls.append(ids.tolist())  # type: ignore[arg-type]
                return logits

            processors = [*make_logits_processors(repetition_penalty=1.3), spy]
            texts.append(
                [r.token for r in outcore.stream_generate(model, tokenizer, PROMPT, 40, logits_processors=processors)]
            )
            seen.append(calls)
    assert texts[0] == texts[1] and seen[0] == seen[1]


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


@pytest.mark.parametrize("options", [{"temp": 0.9, "top_p": 0.95, "xtc_probability": 0.5}], ids=str)
def test_one_seed_gives_one_text_drafted_or_not(
    options: dict[str, Any], short_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[list[int]] = []
    drafted = [(draft, "80MB", most) for draft, most in (("ngram", 6), ("self:2", 3))]
    for way, memory, most in (("none", "500MB", 1), *drafted):
        monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_, most=most: DraftLengthPolicy(most, fixed=True))
        # So much that nothing depends on it but what drafts and what is streamed.
        resident: dict[str, Any] = {"dtype": "float32"} | ({"resident": 2} if memory == "80MB" else {})
        model, tokenizer = outcore.load(str(short_model), memory=memory, draft=way, context=128, prompt=30, **resident)
        with model.outcore as session:
            mx.random.seed(7)
            sampler = make_sampler(**options, xtc_special_tokens=[2], coupled=True)
            made = outcore.stream_generate(model, tokenizer, PROMPT, 28, sampler=sampler)
            texts.append([r.token for r in made])
            if way in ("ngram", "self:2"):
                assert session.metrics.drafted > session.metrics.accepted
    assert texts.count(texts[0]) == len(texts)


@pytest.mark.parametrize(("kind", "temp"), [("draws", 0.8), ("likeliest", 1.5), ("both", 0.8), ("both", 1.5)])
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
    while len(chooser.text) < 1500:
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
    short_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    model, tokenizer = outcore.load(str(short_model), memory="80MB", draft="self:4", context=128, prompt=30)
    with model.outcore:
        for n in (1, 4, 9):
            cache = make_prompt_cache(model)
            responses = outcore.stream_generate(model, tokenizer, PROMPT, 40, prompt_cache=cache)
            taken = [next(responses).token for _ in range(n)]
            responses.close()
            assert {c.offset for c in cache if hasattr(c, "offset")} == {len(tokenizer.encode(PROMPT)) + n}
            logits = model(mx.array([[7]]), cache=cache)
            again = make_prompt_cache(model)
            model(mx.array([tokenizer.encode(PROMPT)]), cache=again)
            for token in taken:
                model(mx.array([[token]]), cache=again)
            assert mx.allclose(logits, model(mx.array([[7]]), cache=again), atol=1e-3).item()


@pytest.mark.parametrize("draft", ["ngram", "self:2", "self:8"])
def test_the_budget_holds_with_what_drafts(draft: str, short_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of layers and of the head; some with a copy, or none for want of memory; and all of it resident."""
    always_draft(monkeypatch)
    for memory in (14_000_000, 20_000_000, 30_000_000):
        gc.collect()
        mx.clear_cache()
        others = mx.get_active_memory()
        try:
            model, tokenizer = outcore.load(str(short_model), memory=memory, draft=draft, context=160, prompt=40)
        except BudgetError as e:
            assert "draft self" in str(e) and e.smallest is not None and e.smallest > memory
            continue
        with model.outcore as session:
            mx.reset_peak_memory()
            list(outcore.stream_generate(model, tokenizer, PROMPT, 24))
            assert mx.get_peak_memory() - others <= memory
            assert session.metrics.drafted


@pytest.mark.parametrize(
    ("draft", "says"), [("self:1", "bits"), ("self:x", "number"), ("self:7", "bits"), ("nowhere/at-all", "nowhere")]
)
def test_drafts_that_cannot_be_meant(draft: str, says: str, short_model: Path) -> None:
    with pytest.raises(outcore.OutcoreError, match=says):
        outcore.load(str(short_model), memory="40MB", draft=draft)


@pytest.mark.parametrize("most", [0, -3, 100_000])
def test_a_number_of_drafted_tokens_that_cannot_be_meant(most: int, short_model: Path) -> None:
    model, tokenizer = outcore.load(str(short_model), memory="25MB", context=64, prompt=20)
    with model.outcore, pytest.raises(UsageError, match="num_draft_tokens"):
        list(outcore.stream_generate(model, tokenizer, PROMPT, 4, num_draft_tokens=most))


def test_a_model_with_another_tokenizer_is_refused(
    short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    other = tmp_path / "other"
    shutil.copytree(short_model, other)
    found = json.loads((other / "tokenizer.json").read_text())
    names = list(found["model"]["vocab"])
    vocab = found["model"]["vocab"]
    vocab[names[300]], vocab[names[301]] = vocab[names[301]], vocab[names[300]]
    (other / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(UsageError, match="another tokenizer"):
        outcore.load(str(short_model), memory="160MB", draft=str(other))
    model, tokenizer = outcore.load(
        str(short_model), memory="160MB", resident=1, draft=str(short_model), context=96, prompt=30
    )
    with model.outcore as session:
        list(outcore.stream_generate(model, tokenizer, PROMPT, 40))
        # The model itself is never wrong about itself; the text's repetitions were asked too.
        assert session.metrics.accepted > 20 and session.metrics.sweeps < 15


def test_a_copy_that_was_made_beside_a_packed_one_is_used(
    short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "packed"
    assert main(["pack", str(short_model), "-o", str(packed)]) == 0
    args = ["generate", "--model", str(packed), "--memory", "80MB", "--resident", "1", "--prompt", PROMPT, "--json"]
    texts, stamps = [], []
    for draft in ("none", "self:4", "self:4"):
        capsys.readouterr()
        assert main([*args, "-m", "24", "--draft", draft]) == 0
        texts.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
        stamps.append([f.stat().st_mtime_ns for f in sorted((packed / "draft-4bit").glob("*.safetensors"))])
    assert texts[0]["tokens"] == texts[1]["tokens"] == texts[2]["tokens"] and texts[1]["draft"] == "self:4"
    # 4 layers, and the head where the model's is streamed.
    assert stamps[0] == [] and len(stamps[1]) in (4, 5) and stamps[1] == stamps[2]


@pytest.mark.parametrize("taken", [24, 18], ids=["ended", "left"])
def test_a_texts_last_sweep_is_learnt_from(taken: int, short_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks on after a text's last token; what the sweep that made it gave counts like any other."""
    prompt = [3 + i % 40 for i in range(9)]
    model, _ = outcore.load_model(short_model, context=64, draft="none", govern=False)
    with model.outcore:
        plain = tokens(model, prompt, 24)
    controls: list[DraftLengthPolicy] = []
    with_oracle(monkeypatch, Oracle([*prompt, *plain], 1000))
    monkeypatch.setattr(
        text_drafts, "DraftLengthPolicy", lambda *_: controls.append(DraftLengthPolicy(7, fixed=True)) or controls[-1]
    )
    model, _ = outcore.load_model(short_model, resident=0, context=64, prompt=9, draft="ngram", govern=False)
    with model.outcore as session:
        answer = outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=24)
        assert [next(answer).token for _ in range(taken)] == plain[:taken]
        answer.close()
        assert session.metrics.accepted > 10
    # The first token is the prompt's own; the one after the last may have been looked at.
    assert controls[-1].acceptance.made in (taken - 1, taken)


def test_what_a_cache_held_before_may_be_repeated(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    model, tokenizer = outcore.load(str(demo_model), memory="25MB", resident=2, draft="ngram", context=160, prompt=60)
    with model.outcore as session:
        said = tokenizer.encode("def add(a, b):\n    return a + b\n\n")
        for history, drafts in (((), False), (said, True)):
            cache = make_prompt_cache(model)
            list(outcore.stream_generate(model, tokenizer, said, 1, prompt_cache=cache))
            session.metrics.reset()
            more = tokenizer.encode("def add(a,")
            list(outcore.stream_generate(model, tokenizer, more, 3, prompt_cache=cache, history=history))
            assert (session.metrics.drafted > 0) == drafts


def test_a_text_that_leaves_no_room_for_guesses_says_so(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_5", tmp_path / "model")
    options = {"draft": "self:4", "context": 64, "govern": False}
    with pytest.raises(outcore.BudgetError) as refused:
        outcore.load_model(folder, memory=1000, **options)
    for tokens, noted in ((8, False), (62, True)):
        model, _ = outcore.load_model(folder, memory=refused.value.smallest, **options)
        with model.outcore as session:
            list(outcore.stream_generate(model, TokensOnly(), [5 + i % 7 for i in range(tokens)], max_tokens=20))
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
        drawn = np.array(mx.concatenate([ours(logprobs) for _ in range(3000)])).reshape(3000, 4)
        for row in range(4):
            counts = np.bincount(drawn[:, row], minlength=50)
            assert chi_squared_passes(counts, p[row])
