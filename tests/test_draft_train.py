"""``outcore draft train``: states are collected, a drafter is trained and resumed, and it drafts what was trained."""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from combined_models import save_tokenizer
from outcore.checks import parse_size
from outcore.cli.main import main
from outcore.decode import budget
from outcore.decode.preparation import prepare
from outcore.errors import UsageError
from outcore.machine.memory import MemoryLimit
from outcore_drafters import command, published
from outcore_drafters.commands import DRAFT
from outcore_drafters.config import kind_of, open_drafter
from outcore_drafters.drafter import DraftedModel
from outcore_drafters.train import collect, drafter_files, network, products, sizes, texts, training
from outcore_drafters.train.network import Network, Shape, accepted
from outcore_drafters.train.work_folder import WorkFolder
from stand_ins import TokensOnly

SHAPE = Shape(hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, vocabulary=40, tapped=(0, 1, 2))
FIRST, LENGTH = 3, 16


class Shared:
    """The model's embeddings and output head."""

    def __init__(self, table: mx.array, head: mx.array) -> None:
        self._table, self._head = table, head

    def embedded(self, ids: mx.array) -> mx.array:
        return self._table[ids][None]

    def logits(self, states: mx.array) -> mx.array:
        return states @ self._head.T


@pytest.fixture
def parts() -> tuple[mx.array, mx.array]:
    mx.random.seed(3)
    table, head = (0.3 * mx.random.normal((SHAPE.vocabulary, SHAPE.hidden)) for _ in range(2))
    return table, head


def counting(texts: int, folder: Path, files: int = 1) -> collect.Shards:
    """Texts in which each token is the one before it plus 7: a drafter can learn them without any states."""
    shards = collect.Shards(folder, files)
    for n in range(files):
        tokens = (np.arange(texts)[:, None] * 3 + n + np.arange(LENGTH)[None] * 7) % SHAPE.vocabulary
        states = np.random.default_rng(n).standard_normal((texts, LENGTH - 1, 3 * SHAPE.hidden))
        made = {"tokens": mx.array(tokens.astype(np.int32)), "states": mx.array(states.astype(np.float16))}
        next_ = {"likely": made["tokens"][:, 1:, None], "chances": mx.ones((texts, LENGTH - 1, 1), mx.float16)}
        mx.save_safetensors(str(shards.path(n)), made | next_)
    return shards


def test_a_saved_drafter_drafts_what_the_trained_network_does(parts: tuple[mx.array, mx.array], tmp_path: Path) -> None:
    """For every place of a text: the guesses in training are those with a cache, over several rounds of drafting."""
    net = Network(SHAPE, mx.ones(SHAPE.hidden))
    net.update({"layers": [{"self_attn": {"o_proj": {"weight": mx.random.normal((SHAPE.hidden, 32))}}}]})
    net.set_dtype(mx.bfloat16)  # as it is stored
    net.set_dtype(mx.float32)
    drafter_files.save(tmp_path, net, drafter_files.config_of(SHAPE, "llama", 4, 64, 3), "card")
    config = json.loads((tmp_path / "config.json").read_text())
    model = DraftedModel(SHAPE.hidden, SHAPE.vocabulary, 4, "llama")
    drafter = open_drafter(tmp_path, config, kind_of(tmp_path, config), model, 4, lambda *_: mx.float32)
    tokens = mx.random.randint(0, SHAPE.vocabulary, (1, LENGTH)).astype(mx.int32)
    states = mx.random.normal((1, LENGTH - 1, 3 * SHAPE.hidden))

    net.coarsen()
    made = net.guesses(tokens, states, *parts, FIRST, 3, own=True)

    text, done = drafter.text(Shared(*parts)), 0
    for place in range(FIRST, LENGTH - 1):
        text.begin(states[:, done : place + 1], tokens[0, done + 1 : place + 2])
        done, drafted = place + 1, list[int]()
        for n in range(3):
            logits = text.logits(drafted)
            assert logits is not None
            expected = (made[n] @ parts[1].T)[0, place - FIRST]
            assert mx.allclose(logits, expected, rtol=1e-4, atol=1e-4).item(), (place, n)
            drafted.append(int(mx.argmax(logits).item()))
        text.cut()


def test_accepted_guesses_are_counted_up_to_the_first_wrong_one(parts: tuple[mx.array, mx.array]) -> None:
    net = Network(SHAPE, mx.ones(SHAPE.hidden))
    batch = {"tokens": mx.zeros((1, 8), mx.int32), "states": mx.zeros((1, 7, 3 * SHAPE.hidden))}
    always = mx.zeros((SHAPE.vocabulary, SHAPE.hidden))  # every guess is token 0
    assert accepted(net, batch, parts[0], always, 2, 3)[0].tolist() == [3, 3, 2, 1, 0]
    batch["tokens"] = mx.array([[0, 0, 0, 0, 0, 5, 0, 0]])
    assert accepted(net, batch, parts[0], always, 2, 3)[0].tolist() == [1, 0, 2, 1, 0]


class Killed(BaseException):
    """Stands for a kill."""


def trainer(parts: tuple[mx.array, mx.array], shards: collect.Shards, folder: Path, **more: Any) -> training.Trainer:
    folder.mkdir(exist_ok=True)
    net = Network(SHAPE, mx.ones(SHAPE.hidden))
    settings: dict[str, Any] = {"prompt": FIRST + 1, "ends": [], "rows": 8, "seconds": 12.0, "seed": 1, "rate": 3e-3}
    return training.Trainer(net, *parts, shards, work=WorkFolder(folder), **settings | more)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock on which each look takes a tenth of a second."""
    now = itertools.count()
    monkeypatch.setattr(training.time, "monotonic", lambda: next(now) / 10)
    yield


@pytest.mark.usefixtures("clock")
def test_training_learns_and_goes_on_after_a_kill(
    parts: tuple[mx.array, mx.array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "DEPTH", 2)
    monkeypatch.setattr(training, "TRIED", 3)
    shards = counting(40, tmp_path / "states", files=2)
    judged = list[dict[str, float]]()

    def dies(progress: training.Progress) -> None:
        if progress.steps == 20:
            raise Killed

    first = trainer(parts, shards, tmp_path / "work", every=3.0, rate=3e-2, step_done=dies)
    before = first.tokens_a_pass()
    with pytest.raises(Killed):
        first.run()
    again = trainer(parts, shards, tmp_path / "work", every=3.0, rate=3e-2, report=lambda _, now: judged.append(now))
    progress = again.run()

    assert judged[0]["steps"] > 10 and progress.steps > 20  # not from the start
    assert judged[-1]["loss"] < judged[0]["loss"] < 5
    assert before < 1.5 < progress.best == again.tokens_a_pass()


@pytest.mark.usefixtures("clock")
def test_worse_weights_never_replace_the_best_of_a_killed_run(
    parts: tuple[mx.array, mx.array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "DEPTH", 2)
    shards = counting(20, tmp_path / "states", files=2)
    first, again = (trainer(parts, shards, tmp_path / "work", seconds=1e9, every=0.1, rate=0.0) for _ in range(2))
    save = first._save

    def dies(name: str) -> None:
        if name == "last":
            raise Killed
        save(name)

    monkeypatch.setattr(first, "_save", dies)
    monkeypatch.setattr(first, "tokens_a_pass", lambda: 3.0)
    monkeypatch.setattr(again, "tokens_a_pass", lambda: 2.0)
    with pytest.raises(Killed):
        first.run()
    assert again.run().best == 3.0


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("saves", [99, 1, 0])
@pytest.mark.parametrize("found, best", [([3.0, 2.0, 2.5], 0), ([2.0, 3.0, 3.5], 2)])
def test_the_weights_of_the_best_evaluation_are_left(
    found: list[float], best: int, saves: int, parts: tuple[mx.array, mx.array], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where nothing more may be written, there is one more evaluation, at the end."""
    monkeypatch.setattr(training, "DEPTH", 2)

    def stepped(_: training.Progress) -> None:
        if len(seen) >= saves:
            made._work.most = made._work.written

    shards = counting(20, tmp_path / "states", files=2)
    made = trainer(parts, shards, tmp_path / "work", seconds=12.0, every=3.0, step_done=stepped)
    seen, results = list[list[mx.array]](), iter(found)

    def judged() -> float:
        seen.append([mx.array(a) for _, a in tree_flatten(made.net.parameters())])
        mx.eval(seen[-1])
        return next(results, 1.0)

    monkeypatch.setattr(made, "tokens_a_pass", judged)
    progress = made.run()
    assert len(seen) == len(progress.history) and (len(seen) > 2 if saves > 1 else len(seen) == saves + 1)
    assert bool(list((tmp_path / "work").iterdir())) == bool(saves)
    left = [a for _, a in tree_flatten(made.net.parameters())]
    assert all(mx.array_equal(a, b).item() for a, b in zip(seen[min(best, saves)], left, strict=True))


@pytest.mark.usefixtures("clock")
def test_training_ends_when_held_out_texts_gain_nothing(
    parts: tuple[mx.array, mx.array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "DEPTH", 2)
    monkeypatch.setattr(training, "TRIED", 3)
    shards = counting(20, tmp_path / "states", files=2)
    progress = trainer(parts, shards, tmp_path / "work", seconds=1e9, every=0.1, rate=0.0).run()
    assert len(progress.history) == 1 + training.PATIENCE


def test_no_more_texts_are_judged_at_once_than_a_step_has(
    parts: tuple[mx.array, mx.array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, found = list[int](), list[float]()
    measure = training.accepted

    def counted(net: Network, batch: dict[str, mx.array], *more: Any) -> mx.array:
        seen.append(batch["tokens"].shape[0])
        return measure(net, batch, *more)

    monkeypatch.setattr(training, "accepted", counted)
    shards = counting(20, tmp_path / "states", files=2)
    for rows in (3, 20):
        mx.random.seed(0)
        found.append(trainer(parts, shards, tmp_path / "work", rows=rows).tokens_a_pass())
    assert seen == [3, 3, 3, 3, 3, 3, 2, 8, 8, 4] and found[0] == found[1]


def test_tokens_after_the_end_of_a_text_do_not_count(parts: tuple[mx.array, mx.array], tmp_path: Path) -> None:
    made = trainer(parts, counting(20, tmp_path / "states", files=2), tmp_path / "work", ends=[9])
    tokens = mx.array([[9, 1, 1, 9, 1, 1, 9, 1]])
    counts = made._prepared({"tokens": tokens, "states": mx.zeros((1, 7, 1))})["counts"]
    assert counts.tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = zoo.save_checkpoint("llama", tmp_path_factory.mktemp("draft") / "model")
    save_tokenizer(folder)
    return folder


def test_collected_texts_are_the_models_own(model: Path) -> None:
    theirs, _ = mlx_lm.utils.load_model(model)
    prompts = np.array([[3, 4, 5, 6], [9, 8, 7, 6]], np.int32)
    ours, _ = outcore.load_model(str(model), memory="1GB", resident=1, draft="none", context=32, batch=2, govern=False)
    with ours.outcore:
        made = collect.continue_texts(ours, ours.model.layers, (0, 2), prompts, 4, lambda a: mx.argmax(a, axis=-1))
        assert not any(type(layer).__name__.startswith("Tapped") for layer in ours.model.layers)
    for row, prompt in zip(made["tokens"].tolist(), prompts.tolist(), strict=True):
        text = list(prompt)
        for _ in range(4):
            text.append(int(mx.argmax(theirs(mx.array([text]))[0, -1]).item()))
        assert row == text
    hidden, cache = theirs.model.embed_tokens(made["tokens"][:1, :-1]), make_prompt_cache(theirs)[0]
    each = [theirs.model.layers[0](hidden[:, n : n + 1], None, cache) for n in range(hidden.shape[1])]
    first = mx.concatenate(each, axis=1)[0]
    kept = made["states"][0, :, : hidden.shape[-1]]
    assert mx.allclose(kept.astype(mx.float32), first.astype(mx.float32), rtol=1e-2, atol=1e-2).item()
    assert made["states"].shape == (2, 7, 2 * hidden.shape[-1])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Short texts and few guesses; the words of a command line, without what ends it."""
    for name, value in (("PROMPT", 6), ("DEPTH", 2), ("ROWS", 4), ("CPU_ROWS", 4)):
        monkeypatch.setattr(command, name, value)
    for name, value in (("DEPTH", 2), ("TRIED", 3)):
        monkeypatch.setattr(training, name, value)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(" ".join(f"w{n % 50}" for n in range(400)))
    (tmp_path / "text" / "image.png").write_bytes(b"\x89PNG\0\0")
    words = ["--input", str(tmp_path / "text"), "--output", str(tmp_path / "out"), "--max-tokens", "4"]
    return [
        "draft",
        "train",
        *words,
        "--disk",
        "12MB",
        "--memory",
        "1GB",
        "--minutes",
        "0.01",
        "--share",
        "0.9",
        "--quiet",
    ]


def test_the_command_trains_a_drafter_that_drafts(
    model: Path, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small, "--model", str(model), "--json"]) == 0, capsys.readouterr().err
    record = json.loads(capsys.readouterr().out)
    assert record["bytes"] > 1000 and record["history"] and record["folder"] == str(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    found = published.trained(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert found is not None and found.most == record["tokens a pass, on held-out texts"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path / "text") in card and "licences" in card and "drawn from, also those held out" in card
    options: dict[str, Any] = {"memory": "1GB", "resident": 1, "context": 32, "govern": False}
    drafted, _ = outcore.load_model(str(model), draft=str(tmp_path / "out"), **options)
    plain, _ = outcore.load_model(str(model), draft="none", **options)
    with drafted.outcore, plain.outcore:
        texts = [
            [r.token for r in outcore.stream_generate(m, TokensOnly(), [3, 4, 5, 6], max_tokens=8)]
            for m in (drafted, plain)
        ]
        assert texts[0] == texts[1]
    (tmp_path / "out" / "training").mkdir()
    (tmp_path / "out" / "training" / "best.safetensors").touch()  # killed before it was removed
    assert main([*small, "--model", str(model)]) == 0  # it is there already
    assert not (tmp_path / "out" / "training").exists()


def test_an_interrupted_training_goes_on_and_other_settings_are_refused(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = list[list[tuple[str, mx.array]]]()

    def stopped(self: training.Trainer) -> None:
        first.append(tree_flatten(self.net.parameters()))
        raise KeyboardInterrupt

    settings, spent = tmp_path / "out" / "training" / "settings.json", list[float]()
    for _ in range(2):  # with texts collected in this run, and before
        with monkeypatch.context() as patch:
            patch.setattr(training.Trainer, "run", stopped)
            assert main([*small[:-1], "--model", str(model)]) == 130
        spent.append(json.loads(settings.read_text())["seconds"])
    assert spent[0] == spent[1] > 0
    assert all(mx.array_equal(a, b).item() for (_, a), (_, b) in zip(*first, strict=True))
    with pytest.raises(UsageError, match="not trained to its end"):
        prepare(model, draft=str(tmp_path / "out"))
    begun = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "training" / "states").iterdir()}
    assert begun
    assert "what is done is kept; give the same command again" in capsys.readouterr().err
    assert main([*small, "--model", str(model), "--temp", "0.5"]) == 2
    assert "begun with other settings" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(collect, "continue_texts", None)  # nothing is collected again
        patch.setattr(training.Trainer, "run", lambda self: training.Progress(best=1.0))
        assert main([*small, "--model", str(model)]) == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_the_time_of_collecting_counts_over_all_runs(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file takes half of the time, so that the third would be too late, whenever it is begun."""
    now, own, done = [0.0], collect.continue_texts, list[int]()

    def slow(*args: Any, **named: Any) -> Any:
        if len(done) == 1 and not now[1:]:
            now.append(1.0)
            raise KeyboardInterrupt
        done.append(1)
        now[0] += 0.7
        return own(*args, **named)

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    monkeypatch.setattr(collect, "continue_texts", slow)
    monkeypatch.setattr(command, "time", Clock)
    monkeypatch.setattr(training.Trainer, "run", lambda self: training.Progress(best=1.0))
    assert main([*small, "--model", str(model)]) == 130
    now[0] = 0.0  # another process
    assert main([*small, "--model", str(model)]) == 0
    assert len(done) == 2


def test_a_training_goes_on_with_less_memory_than_it_was_begun_with(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``--memory auto`` beside other programs: with fewer texts in a pass, but the same files."""
    asked, own, load = list[int](), collect.continue_texts, outcore.load_model

    def loaded(*args: Any, **named: Any) -> Any:
        asked.append(named["memory"])
        return load(*args, **named)

    def stopped(*args: Any) -> Any:
        made = own(*args)
        monkeypatch.setattr(collect, "continue_texts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        return made

    small[small.index("--minutes") + 1] = "5"
    monkeypatch.setattr(outcore, "load_model", loaded)
    monkeypatch.setattr(training.Trainer, "run", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    whole, again = ([*small, "--model", str(model), "--output", str(tmp_path / name)] for name in ("whole", "again"))
    assert main(whole) == 130
    monkeypatch.setattr(collect, "continue_texts", stopped)
    assert main(again) == 130
    monkeypatch.setattr(collect, "continue_texts", own)
    for together in (24, 1), command.TOGETHER:
        monkeypatch.setattr(command, "TOGETHER", together)
        assert main(again) == 130
    files = [sorted((tmp_path / name / "training" / "states").iterdir()) for name in ("whole", "again")]
    assert len(files[0]) == len(files[1]) > 1
    for one, other in zip(*(map(mx.load, each) for each in files), strict=True):
        assert one["tokens"].shape[0] > 24 and all(a.shape == other[key].shape for key, a in one.items())
        assert mx.array_equal(one["tokens"], other["tokens"]).item()
    assert asked[0] == asked[1] > asked[2] + files[0][1].stat().st_size  # for states of several passes
    assert asked[3] == asked[0]  # enough before, so enough again


@pytest.mark.parametrize("seed", range(2))
def test_what_kills_interrupt_counts_among_the_bytes_that_may_be_written(
    seed: int, model: Path, small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three files are interrupted, up to twenty times. The share leaves room for a few."""
    written, kills, own, draw = list[int](), list[int](), mx.save_safetensors, np.random.default_rng(seed)

    def killed(file: str, *more: Any) -> None:
        own(file, *more)
        written.append(Path(file).stat().st_size)
        if len(kills) < 20 and draw.random() < 2 / 3 and "model" not in file:
            kills.append(1)
            raise KeyboardInterrupt

    at, most = small.index("--disk"), 8_000_000
    small[at + 1] = f"{most}B"
    monkeypatch.setattr(mx, "save_safetensors", killed)
    rc = 130
    while rc == 130:
        rc = main([*small, "--model", str(model), "--json"])
    said = capsys.readouterr()
    assert rc == 0 and kills, (said.err[-400:], written)
    assert sum(written) <= most
    assert sum(written) <= json.loads(said.out.splitlines()[-1])["bytes"] <= 1.1 * sum(written)


@pytest.mark.parametrize("more", [0, 50_000])
def test_the_bytes_on_disk_that_a_refusal_asks_for_are_enough_and_so_are_more(
    more: int, model: Path, small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training.Trainer, "run", lambda self: training.Progress(best=1.0))
    at = small.index("--disk") + 1
    small[at] = "1kB"
    assert main([*small, "--model", str(model)]) == 2
    asked = re.search(r"give at least ([0-9.]+ MB)", capsys.readouterr().err)
    assert asked is not None
    small[at] = f"{parse_size(asked[1]) + more}B"
    assert main([*small, "--model", str(model)]) == 0, capsys.readouterr().err


def test_a_training_keeps_other_files_and_other_processes_out(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training.Trainer, "run", lambda self: training.Progress(best=1.0))
    work = tmp_path / "out" / "training"
    (work / "states").mkdir(parents=True)
    theirs = {work / "precious", work / "best_of_mine.safetensors"}
    for file in theirs:
        file.touch()
    other = WorkFolder(work)
    other.begin({})
    (work / "settings.json").unlink()
    assert main([*small, "--model", str(model)]) == 2
    assert "another process trains there" in capsys.readouterr().err
    other.close()
    assert main([*small, "--model", str(model)]) == 0
    assert set(work.iterdir()) == theirs


def test_states_without_their_settings_are_refused_and_those_that_are_not_whole_made_again(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: training.Trainer) -> training.Progress:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "run", stopped)
        assert main([*small, "--model", str(model)]) == 130
    settings, own = tmp_path / "out" / "training" / "settings.json", training.Trainer.run

    def damaged(self: training.Trainer) -> training.Progress:
        (settings.parent / "states" / "states-00001.safetensors").write_bytes(bytes(4))
        return own(self)

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "run", damaged)
        assert main([*small, "--model", str(model)]) == 1
    assert "states-00001.safetensors: gone, or not whole" in capsys.readouterr().err
    monkeypatch.setattr(training.Trainer, "run", lambda self: training.Progress(best=1.0))
    kept = settings.rename(tmp_path / "kept")
    assert main([*small, "--model", str(model), "--max-tokens", "5"]) == 2
    assert "settings.json: missing" in capsys.readouterr().err
    for known in json.loads(kept.read_text()), {}:
        settings.write_text(json.dumps(known | {"texts": 0}))
        assert main([*small, "--model", str(model)]) == 2
        assert "not written by this version" in capsys.readouterr().err
    kept.rename(settings)
    (settings.parent / "states" / "states-00000.safetensors").write_bytes(bytes(4))
    assert main([*small, "--model", str(model)]) == 0


def test_a_streamed_models_embeddings_are_read_for_training(
    model: Path, small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has a head of its own, so its embeddings are on disk; both tables count in the memory."""
    theirs, _ = mlx_lm.utils.load_model(model)
    tables, load, given = [], outcore.load_model, []

    def loaded(*args: Any, **options: Any) -> Any:
        given.append(options["memory"])
        return load(*args, **options)

    def trainer(_: Any, table: mx.array, head: mx.array, *__: Any, **___: Any) -> None:
        tables.extend((table, head))
        raise UsageError("seen")

    small[small.index("--minutes") + 1] = "5"
    monkeypatch.setattr(outcore, "load_model", loaded)
    monkeypatch.setattr(command, "Trainer", trainer)
    assert main([*small, "--model", str(model), "--resident", "1"]) == 2 and "seen" in capsys.readouterr().err
    assert mx.array_equal(tables[0], theirs.model.embed_tokens.weight)
    assert mx.array_equal(tables[1], theirs.lm_head.weight)
    assert given[0] <= 10**9 - sum(table.nbytes for table in tables)


@pytest.mark.parametrize("memory", ["auto", "50%"])
def test_memory_left_to_choose_or_as_a_share_is_bytes_that_training_keeps_to(
    memory: str, model: Path, small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a resident model is gone when training begins, also where its modules are in cycles."""
    at, free, seen = small.index("--memory"), 600_000_000, list[int]()

    def trainer(net: Network, table: mx.array, head: mx.array, *_: Any, rows: int, **__: Any) -> None:
        seen.extend((mx.get_active_memory() - before - table.nbytes - head.nbytes, rows))
        raise UsageError("seen")

    monkeypatch.setattr(command, "Trainer", trainer)
    monkeypatch.setattr(budget, "default_budget", lambda: free)
    monkeypatch.setattr(budget, "process_memory_limit", lambda: MemoryLimit(2 * free, 2 * free, "test"))
    monkeypatch.setattr(command, "step_bytes", lambda *_: (0, free // 2 - 1_000_000))
    small[at + 1] = memory
    gc.collect()
    before = mx.get_active_memory()
    gc.disable()
    try:
        assert main([*small, "--model", str(model)]) == 2 and "seen" in capsys.readouterr().err
    finally:
        gc.enable()
    assert seen[1] == 2
    assert seen[0] < 200_000  # the new drafter is not there yet, and the model takes more


def test_freed_memory_keeps_to_the_budget_while_training(
    model: Path, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit() -> int:
        mx.set_memory_limit(now := mx.set_memory_limit(1 << 40))
        return now

    seen, before = list[int](), limit()

    def trained(self: training.Trainer) -> training.Progress:
        seen.append(limit())
        return training.Progress(best=1.0)

    monkeypatch.setattr(training.Trainer, "run", trained)
    assert main([*small, "--model", str(model)]) == 0
    assert 10**9 <= seen[0] < 10**9 + mx.get_active_memory() + 10**8 and limit() == before


@pytest.mark.parametrize("hidden, layers", [(384, 16), (4096, 32), (5120, 64)])
def test_what_is_written_by_default_holds_states_and_weights(hidden: int, layers: int) -> None:
    """The 28M, a 9B and a 27B with the drafter's default size: weights are saved twice or more often, beside states of
    some hundred texts."""
    heads = hidden // 128
    inner = int(sizes.WIDTH * hidden) // 64 * 64
    shape = Shape(hidden, heads, max(1, heads // 4), 128, inner, 8192, (1, layers // 2, layers - 1))
    default = next(flag for flag in DRAFT if not isinstance(flag, str) and "--disk" in flag.names).settings["default"]
    states, saves = sizes.disk_shares(disk := parse_size(default), shape.parameters)
    assert saves >= 2 and states >= 400 * 192 * 3 * hidden * 2
    assert states + saves * shape.parameters * 4 * 4 + shape.parameters * 2 <= disk


@pytest.mark.parametrize("content", [b"", b"\x89PNG\0"])
def test_files_without_text_are_refused(
    content: bytes, model: Path, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noise").write_bytes(content)
    assert main([*small, "--model", str(model), "--input", str(tmp_path / "noise")]) == 2
    assert "no text (UTF-8) in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--disk", "10kB"], "give at least"),
        (["--disk", "no"], "--disk no"),
        (["--share", "0.0001"], "--share 0.0001: give at least"),
        (["--share", "nan"], "--share nan"),
        (["--minutes", "0"], "--minutes 0"),
        (["--max-tokens", "1"], "--max-tokens 1"),
        (["--seed", "-1"], "--seed -1"),
        (["--temp", "nan"], "--temp nan"),
        (["--input", "nowhere"], "no such file or folder"),
        (["--input", __file__, "--output", __file__], "is a file; give a folder"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    words: list[str], said: str, model: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small, "--model", str(model), *words]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not Path(small[small.index("--output") + 1]).exists()


@pytest.mark.parametrize("step", [0, 50_000_000])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("memory", ["400kB", "40MB"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_memory_that_a_refusal_asks_for_is_enough(
    step: int, share: bool, memory: str, tied: bool, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whatever takes most; also where the head takes more than layers."""
    more = {"vocab_size": 10007, "tie_word_embeddings": tied}
    monkeypatch.setitem(zoo.CONFIGS, "llama", zoo.CONFIGS["llama"] | more)
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    save_tokenizer(folder)
    for module in (command, sizes):
        monkeypatch.setattr(module, "step_bytes", lambda shape, *_: (step * shape.intermediate // 64, 1))
    monkeypatch.setattr(training.Trainer, "run", lambda self: training.Progress(best=1.0))
    words = [*small, "--model", str(folder)]
    if not share:
        del words[(at := words.index("--share")) : at + 2]
    at = words.index("--memory") + 1
    words[at] = memory
    assert main(words) == (1 if step or memory == "400kB" else 0)
    if not (err := capsys.readouterr().err):
        return
    asked = re.search(r"(?:needs|give) ([0-9.]+) ([KMG]B)", err)
    assert asked is not None, err
    words[at] = asked[1] + asked[2]
    assert main(words) == 0, capsys.readouterr().err


def test_a_drafters_size_follows_the_models_width_unless_a_share_is_asked_for(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a training of which nothing was kept does not bind the next one to its settings."""
    at = small.index("--share")
    words = [*small[:at], *small[at + 2 :], "--model", str(model)]
    words.remove("--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(collect, "continue_texts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main([*words, "--temp", "0.5"]) == 130
    assert list((tmp_path / "out" / "training").iterdir())
    assert main(words) == 0
    sizes = json.loads((tmp_path / "out" / "config.json").read_text())["transformer_layer_config"]
    assert sizes["intermediate_size"] == max(64, int(sizes["hidden_size"] * 11 / 3) // 64 * 64)
    assert "of the memory; it pays where several tokens are computed nearly as fast" in capsys.readouterr().err


def test_a_drafter_is_as_wide_as_it_can_be_trained_and_stays_so(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the memory given, up to its usual width, down to the model's; also where a run with more memory goes on."""
    del small[(at := small.index("--share")) : at + 2]
    small.remove("--quiet")
    hidden, usual, each = 64, sizes.usual_width(64), 1_000_000
    monkeypatch.setattr(zoo, "CONFIGS", zoo.CONFIGS | {"llama": zoo.CONFIGS["llama"] | {"hidden_size": hidden}})
    folder = zoo.save_checkpoint("llama", tmp_path / "wide")
    save_tokenizer(folder)
    for module in (command, sizes):
        monkeypatch.setattr(module, "step_bytes", lambda shape, *_: (each * shape.intermediate, 1))
    seen = list[int]()

    def trained(self: training.Trainer) -> training.Progress:
        seen.append(self.net._shape.intermediate)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "run", trained)
    for n, (memory, inner) in enumerate([(usual, usual), (usual - 32, usual - 64), (70, 64), (40, 0)]):
        words = [*small, "--model", str(folder), "--output", str(tmp_path / f"out {n}")]
        words[words.index("--memory") + 1] = f"{(memory * each + 3_000_000) // 1000}kB"
        assert main(words) == (130 if inner else 1)
        said = capsys.readouterr().err
        assert ("less than usual" in said) == (0 < inner < usual)
        assert seen == [inner] if inner else "training this drafter needs" in said
        if inner:
            words[words.index("--memory") + 1] = "1GB"
            assert main(words) == 130 and seen == [inner, inner]
            capsys.readouterr()
        seen.clear()


def test_what_a_drafter_takes_and_gains_is_said(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.Job, "pays_from", 1.5)
    monkeypatch.setattr(collect, "continue_texts", None)
    monkeypatch.setattr(command.Job, "_collect", lambda *_: None)
    for tokens, said in ((1.4, "does not pay: 1.40 tokens a pass on held-out texts, and it needs 1.50; train longer"),
                         (1.6, "1.60 tokens a pass on held-out texts; use it with --draft")):  # fmt: skip
        monkeypatch.setattr(training.Trainer, "run", lambda self, tokens=tokens: training.Progress(best=tokens))
        assert main([*small, "--model", str(model), "--output", str(tmp_path / str(tokens))]) == 0
        assert f"{tokens}: {said}" in capsys.readouterr().out


def test_a_drafter_pays_from_what_it_has_each_pass_read_more() -> None:
    job = command.Job.__new__(command.Job)
    job.shape, job._model_bytes, job._memory, job._args = SHAPE, 1_000_000, 900_000, Namespace(share=0.1)
    takes = SHAPE.parameters * 4.5 / 8
    assert job.pays_from == pytest.approx(1.07 * (1 + takes / 100_000))
    said = f"takes {takes / 1000:.2f} KB in 4 bits, {takes / 9000:.1f} % of the memory, and pays from"
    assert job._price() == f"{said} {job.pays_from:.2f} tokens a pass"


def test_nothing_to_train_on_lies_where_text_is_held_out() -> None:
    block, cycle, piece = texts.BLOCK, texts.HELD_OUT * texts.BLOCK, 1500
    trained, held = (
        texts._places(np.random.default_rng(1), 5 * cycle + 9 * block, 9999, piece, out) for out in (False, True)
    )
    for places, out in ((trained, False), (held, True)):
        for ends in (places, places + piece - 1):
            assert (((ends % cycle) >= cycle - block) == out).all()
    assert len(set(held // cycle)) == 5 and len(set(trained // cycle)) == 6


def test_only_parameters_of_the_published_form_are_saved(tmp_path: Path) -> None:
    net = Network(SHAPE, mx.ones(SHAPE.hidden))
    assert sum(a.size for _, a in tree_flatten(net.parameters())) == SHAPE.parameters


def test_products_of_numpy_are_mlxs_with_their_gradients() -> None:
    a, b = mx.random.normal((2, 3, 4, 5)), mx.random.normal((2, 3, 5, 6))
    for left, right in ((a, b), (a, b[0, 0])):

        def ours(x: mx.array, y: mx.array) -> mx.array:
            return products.matmul(x, y).square().sum()

        def theirs(x: mx.array, y: mx.array) -> mx.array:
            return (x @ y).square().sum()

        made, expected = (mx.value_and_grad(f, argnums=(0, 1))(left, right) for f in (ours, theirs))
        for one, other in zip((made[0], *made[1]), (expected[0], *expected[1]), strict=True):
            assert mx.allclose(one, other, rtol=1e-4, atol=1e-4).item()


def test_the_loss_and_its_gradient_are_those_of_cross_entropy(
    parts: tuple[mx.array, mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "PIECE", 3 * SHAPE.vocabulary)  # several pieces
    table, head = parts
    net = Network(SHAPE, mx.ones(SHAPE.hidden))
    chances = mx.softmax(mx.random.normal((2, 6, 4)), axis=-1)
    likely = mx.argsort(mx.random.normal((2, 6, SHAPE.vocabulary)), axis=-1)[..., :4]
    batch = {
        "tokens": mx.random.randint(0, 40, (2, 7)), "states": mx.random.normal((2, 6, 3 * SHAPE.hidden)),
        "likely": likely, "chances": chances, "counts": mx.array([[1.0] * 7, [1.0] * 5 + [0.0] * 2]),
    }  # fmt: skip
    highest = (chances == chances.max(-1, keepdims=True)).astype(mx.float32)
    weights = (1 - network.LIKELIEST) * chances + network.LIKELIEST * highest
    target = mx.put_along_axis(mx.zeros((2, 6, SHAPE.vocabulary)), likely, weights, axis=-1)

    def expected(net: Network) -> mx.array:
        made, total, weight = net.guesses(batch["tokens"], batch["states"], table, head, 0, 2, own=False), 0.0, 0.0
        for n, states in enumerate(made):
            logits = states[:, : 5 - n] @ head.T
            each = mx.logsumexp(logits, axis=-1) - (target[:, n + 1 :] * logits).sum(-1)
            total = total + 0.9**n * (each * batch["counts"][:, n + 2 :]).sum()
            weight = weight + 0.9**n * batch["counts"][:, n + 2 :].sum()
        return total / weight

    found = network.gradients(net, batch, table, head, 2)
    for _, matrix in net.matrices:  # MLX's own products and gradients, with the weights that were used
        matrix.weight = products.coarse(matrix.weight)
        matrix.__class__ = nn.Linear
    wanted = nn.value_and_grad(net, expected)(net)
    assert mx.allclose(found[0], wanted[0], rtol=1e-5).item()
    for (name, one), (_, other) in zip(tree_flatten(found[1]), tree_flatten(wanted[1]), strict=True):
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-5).item(), name


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    "rows, texts, length, shape",
    [
        (4, 4, 24, replace(SHAPE, hidden=192, intermediate=768)),
        (4, 4, 24, replace(SHAPE, hidden=64)),
        (1, 400, 24, replace(SHAPE, hidden=64)),
        (1, 2, 300, replace(SHAPE, hidden=64, heads=4, kv_heads=1, intermediate=256)),
    ],
    ids=["weights", "places", "a file's texts", "long texts"],
)
def test_a_step_takes_no_more_memory_than_is_counted(
    rows: int, texts: int, length: int, shape: Shape, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What weighs most is named; the products of a GPU are run on the CPU."""
    for module in (network, sizes):
        monkeypatch.setattr(module, "PIECE", 8 * shape.vocabulary)
    for module in (products, training, sizes):
        monkeypatch.setattr(module, "on_cpu", lambda: not gpu)
    table = mx.random.normal((shape.vocabulary, shape.hidden))
    states = mx.random.normal((texts, length - 1, 3 * shape.hidden)).astype(mx.float16)
    likely = mx.random.randint(0, shape.vocabulary, (texts, length - 1, 16)).astype(mx.int32)
    shards = collect.Shards(tmp_path / "states", 2)
    for n in range(2):
        tokens = mx.random.randint(0, shape.vocabulary, (texts, length)).astype(mx.int32)
        chances = mx.full(likely.shape, 1 / 16).astype(mx.float16)
        texts_of = {"tokens": tokens, "states": states, "likely": likely, "chances": chances}
        mx.save_safetensors(str(shards.path(n)), texts_of)
    mx.eval(table)
    (tmp_path / "work").mkdir()
    gc.collect()
    before = mx.get_active_memory()
    net = Network(shape, mx.ones(shape.hidden))
    trained = training.Trainer(
        net, table, table, shards, prompt=8, ends=[], rows=rows, seconds=60, work=WorkFolder(tmp_path / "work"), seed=0
    )
    fixed, each = sizes.step_bytes(shape, length, texts)
    for step in range(3):
        mx.reset_peak_memory()
        trained._step(trained._batch(step), training.DEPTH)
        assert mx.get_peak_memory() - before <= fixed + rows * each
        assert mx.get_peak_memory() - before > 0.3 * (fixed + rows * each)  # nor much less
    if texts > 8:
        monkeypatch.setattr(training, "TRIED", 1)  # many texts one by one take long
    mx.reset_peak_memory()
    trained.tokens_a_pass()
    assert mx.get_peak_memory() - before <= fixed + rows * each


def test_a_step_of_a_wide_drafter_takes_weights_averages_and_gradients_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a part of a matrix: quantized weights go before gradients are made, a gradient as its weight is renewed."""
    shape = replace(SHAPE, hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=1856)
    monkeypatch.setattr(network, "PIECE", 8 * shape.vocabulary)
    for module in (products, training):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    table, length = mx.random.normal((shape.vocabulary, shape.hidden)), 12
    shards = collect.Shards(tmp_path / "states", 2)
    for n in range(2):
        states = mx.random.normal((1, length - 1, 3 * shape.hidden)).astype(mx.float16)
        likely = mx.random.randint(0, shape.vocabulary, (1, length - 1, 16)).astype(mx.int32)
        chances = mx.full(likely.shape, 1 / 16).astype(mx.float16)
        tokens = mx.random.randint(0, shape.vocabulary, (1, length)).astype(mx.int32)
        made = {"tokens": tokens, "states": states, "likely": likely, "chances": chances}
        mx.save_safetensors(str(shards.path(n)), made)
    mx.eval(table)
    gc.collect()
    before, net = mx.get_active_memory(), Network(shape, mx.ones(shape.hidden))
    made_of: dict[str, Any] = {
        "prompt": 8,
        "ends": [],
        "rows": 1,
        "seconds": 60,
        "work": WorkFolder(tmp_path / "work"),
        "seed": 0,
    }
    trained = training.Trainer(net, table, table, shards, **made_of)
    trained._step(trained._batch(0), training.DEPTH)
    mx.reset_peak_memory()
    trained._step(trained._batch(1), training.DEPTH)
    assert mx.get_peak_memory() - before < 4.6 * 4 * shape.parameters


def test_left_out_tokens_are_stood_for_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAMPLED", 4)
    batch = {
        "likely": mx.array([[[1, 2], [3, 4]]]), "chances": mx.array([[[0.9, 0.1], [0.999, 0.001]]]),
        "tokens": mx.array([[1, 5, 5]]),
    }  # fmt: skip
    made = training._columns(batch, 20, 0)
    assert sorted(made["columns"].tolist()[:4]) == [1, 2, 3, 5]
    assert len(set(made["columns"].tolist())) == 8
    assert made["offsets"].tolist() == pytest.approx([0] * 4 + [math.log(16 / 4)] * 4)


def test_quantized_layers_multiply_by_numpy_while_texts_are_collected() -> None:
    layer, own = nn.QuantizedLinear.from_linear(nn.Linear(64, 32), 32, 4), mx.quantized_matmul
    x = mx.random.normal((3, 64))
    plain = layer(x)
    heads, stacked = mx.random.normal((2, 3, 64)), mx.quantize(mx.random.normal((2, 32, 64)), 32, 4)
    for_each = mx.quantized_matmul(heads, *stacked, group_size=32, bits=4)
    with products.fast_quantized(evaluated=True):
        assert mx.quantized_matmul is not own
        assert mx.allclose(layer(x), plain, rtol=1e-3, atol=1e-3).item()
        assert mx.array_equal(mx.quantized_matmul(heads, *stacked, group_size=32, bits=4), for_each).item()
    with products.fast_quantized(evaluated=False):  # streamed weights have not been read yet
        assert mx.quantized_matmul is own
