"""Drafts of a model whose layers lie on several ranks: the first one guesses, and all write what one rank writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import rank_work
import zoo
from link_ranks import in_threads, linked
from outcore.checkpoint.packed_store import open_model
from outcore.decode.one_text import Sampler
from outcore.decode.opening import Opening
from outcore.errors import LinkError
from outcore.options import LoadOptions
from outcore.plan.joint_plan import NGRAM
from outcore.plan.planner import ASSUMED
from outcore_cluster import sharing as ranked
from outcore_cluster.group import RankGroup
from outcore_cluster.link_protocol import RankAgreement
from outcore_cluster.rank_share import cuts_of
from outcore_cluster.sharing import share_layers
from outcore_cluster.timing import LinkTimes
from rank_processes import RankProcesses

TOKENS = 10
MOST = {"num_draft_tokens": 4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


HELD: dict[str, dict[str, Any]] = {
    "gemma4": {"resident": 0, "head_resident": False},
    "qwen3_next": {"resident": 0},
}


@pytest.mark.parametrize("model_type", HELD)
def test_a_copy_of_the_model_drafts_on_the_first_rank(model_type: str, two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path)
    expected, _ = rank_work.text(None, folder, TOKENS)
    _, alone = rank_work.text(None, folder, TOKENS, draft="self:8", how=MOST, resident=0)
    held = HELD[model_type]
    plain = two.run(rank_work.with_options, folder, 1, held)
    (found, did), (told, other) = two.run(
        rank_work.with_options, folder, TOKENS, {"draft": "self:8", "how": MOST, **held}
    )
    assert found == expected
    assert [t for t, _ in told] == [t for t, _ in expected]
    assert did["drafted"] == other["drafted"] > 0 < did["accepted"] == other["accepted"]
    # Nearly as many are right as where it goes on from the model's own caches.
    assert did["accepted"] > 0.7 * alone["accepted"]
    # What drafts is the first rank's alone.
    assert did["weights"] > plain[0][1]["weights"] and other["weights"] == plain[1][1]["weights"]


def test_what_is_received_for_a_draft_is_computed_before_more_takes_its_place(
    two: RankProcesses, quick_models: Callable[[int], Path]
) -> None:
    """Of three layers of the other rank, one behind the other, and a prompt in three passes."""
    folder = quick_models(6)
    expected, _ = rank_work.text(None, folder, TOKENS)
    right = []
    for in_turn in (True, False):
        options = {"in_turn": in_turn, "draft": "self:8", "how": MOST}
        (found, did), _ = two.run(rank_work.with_options, folder, TOKENS, options)
        assert found == expected
        right.append(did["accepted"] / did["drafted"])
    assert right[1] > 0.9 * right[0] > 0


def test_another_model_drafts_on_the_first_rank(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    expected, alone = rank_work.text(None, llama, TOKENS, resident=0)
    same = tmp_path / "same"
    shutil.copytree(llama, same)
    options = [
        {"draft": str(same), "how": MOST, "resident": 0},
        {"draft": "nowhere/at-all", "how": MOST, "resident": 0},
    ]
    (found, did), (_, other) = two.run(rank_work.each_with_options, llama, TOKENS, options)
    assert found == expected
    # It knows what the model says; the other ranks need not have it.
    assert did["accepted"] == did["drafted"] > 5 and did["sweeps"] == other["sweeps"] < alone["sweeps"] / 2


def test_drawn_texts_with_a_seed_are_one_ranks(two: RankProcesses, llama: Path) -> None:
    """Drafted or not, and over two texts that share caches."""
    folder = llama
    expected = rank_work.conversation(None, folder, {"resident": 0}, coupled=True)
    options = {"draft": "self:8"}
    assert two.run(rank_work.conversation, folder, options, True, 3) == [expected] * 2
    # By the rejection rule the text is another one, and the same on all ranks.
    first, other = two.run(rank_work.conversation, folder, options, False, 3)
    assert first == other


def test_a_draft_that_is_given_up_in_the_middle_of_a_text(two: RankProcesses, llama: Path) -> None:
    expected, _ = rank_work.text(None, llama, TOKENS)
    (found, counts, freed), (told, others, _) = two.run(
        rank_work.giving_up, llama, TOKENS, {"resident": 0, "draft": "self:8"}
    )
    assert found == expected * 2 and [t for t, _ in told] == [t for t, _ in expected] * 2
    assert freed > 0 and counts == others
    assert 0 < counts[5] <= counts[-1] <= counts[5] + 3, "guesses that were under way are the last"


@pytest.mark.parametrize(("model_type", "options"), [("dbrx", {"resident": 0}), ("mixtral", {"experts": 2})])
def test_ranks_that_draft_nothing_while_others_could(
    model_type: str, options: dict[str, Any], two: RankProcesses, tmp_path: Path
) -> None:
    """One evaluates on the way as its layers are streamed, or reads experts one by one; the other has all in memory."""
    folder = zoo.save_checkpoint(model_type, tmp_path)
    expected, _ = rank_work.text(None, folder, TOKENS)
    how = {"draft": "ngram" if model_type == "dbrx" else "self:8", "how": MOST}
    for each in ([how, how | options], [how | options, how])[: 2 if model_type == "dbrx" else 1]:
        (found, did), (_, other) = two.run(rank_work.each_with_options, folder, TOKENS, each)
        assert found == expected
        assert did["drafted"] == other["drafted"] == 0


def test_automatic_drafts_refuse_nothing_on_any_rank(two: RankProcesses, llama: Path) -> None:
    expected, _ = rank_work.text(None, llama, 20)
    options: dict[str, Any] = {"resident": 0, "draft": "none"}
    without = two.run(rank_work.least_memory, llama, options)
    with_them = two.run(rank_work.least_memory, llama, options | {"draft": NGRAM})
    automatic = {"resident": 0, "draft": "auto"}
    for small, memory, drafts in ((0, without, False), (1, without, False), (1, with_them, True)):
        assert without[small] < with_them[small]
        each = [automatic | ({"memory": memory[small]} if rank == small else {}) for rank in range(2)]
        (found, did), (_, other) = two.run(rank_work.each_with_options, llama, 20, each)
        assert found == expected
        assert (did["drafted"] > 0) == (other["drafted"] > 0) == drafts
    # Who asked for them is told what they need.
    told = two.run(rank_work.refused, llama, options | {"draft": NGRAM, "memory": min(without)})
    assert all("the smallest that works is" in each for each in told)


def test_what_cannot_draft_is_refused_on_all_ranks(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    other = zoo.save_checkpoint("qwen3_next", tmp_path)
    (other / "vocab.json").write_text("{}")
    for told in two.run(rank_work.refused, llama, {"draft": str(other)}):
        assert "another tokenizer" in told
    evaluates = zoo.save_checkpoint("dbrx", tmp_path / "dbrx")
    for told in two.run(rank_work.refused, evaluates, {"draft": "self:3"}):
        assert "a copy of this model cannot draft over several machines" in told
    for told in two.run(rank_work.refused, llama, {"draft": "mtp"}):
        assert "no multi-token-prediction head" in told


def test_a_sampler_that_fails_ends_the_run() -> None:
    """The first rank alone calls it. What it said next would have been taken for the token by the others."""

    def sampler(_: mx.array) -> mx.array:
        raise ValueError("no luck")

    with linked(2) as links:

        def choose(rank: int) -> int:
            chooser = Sampler(sampler, (), [1, 2], transport=RankAgreement(links[rank]))
            try:
                return chooser.choose(mx.zeros((1, 4)))[0]
            except ValueError:
                # Whoever catches it goes on with another text.
                return RankAgreement(links[rank]).numbers(lambda: [77])

        first, other = in_threads([partial(choose, 0), partial(choose, 1)])
    assert isinstance(first, LinkError) and isinstance(other, LinkError)
    assert "rank 0 (host0): no token was chosen: no luck" in str(other)


class Alike:
    """A link of the first rank to one that has what it has."""

    rank, size = 0, 2

    def gather(self, value: bytes) -> list[bytes]:
        return [value, value]

    def agree(self, value: bytes) -> bytes:
        return value


def test_the_first_rank_has_fewer_layers_beside_a_draft(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked, "share_layers", share_layers)
    monkeypatch.setattr(RankGroup, "times", LinkTimes(0.0005))
    profile = Opening(demo_model, LoadOptions(context=64, prompt=16), None).measured(open_model(demo_model))
    cuts = cuts_of(profile)  # once: of 16 layers it takes longer than all else here
    monkeypatch.setattr(ranked, "cuts_of", lambda _: cuts)

    def layers(draft: str, which: int | None, megabytes: int) -> int:
        link: Any = Alike()
        group = RankGroup(link)
        o = LoadOptions(draft=draft if which is None else f"{draft}:{which}", ranks=group)
        found = ranked.shared_out(profile, group, o, demo_model, ASSUMED, megabytes * 10**6)
        return found.profile.share.owners.count(0)

    assert layers("none", None, 34) == 8 and layers("self", 3, 34) < layers("self", 2, 34) < 8
    assert layers("self", 3, 400) == 8
