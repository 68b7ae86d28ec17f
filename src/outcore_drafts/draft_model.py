"""A draft model: any model in memory with the same tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from outcore.checkpoint.find_model import name_of, resolve_model
from outcore.checkpoint.packed_store import open_model
from outcore.decode.loader import load_model
from outcore.decode.opening import Opening
from outcore.decode.preparation import prepare
from outcore.decode.speculative.drafting import Drafting
from outcore.decode.speculative.proposers import Draw, Guess
from outcore.decode.speculative.sources import DraftSource
from outcore.engine.binding import Progress
from outcore.engine.model_profile import ModelProfile
from outcore.engine.whole_profile import profile_of
from outcore.errors import CheckpointError, UsageError, called
from outcore.machine.device import COMPUTE_DTYPES
from outcore.machine.small_files import CONFIG_BYTES, TOKENIZER_BYTES, parse_json, read_small
from outcore.modules.cache_rollback import Snapshot
from outcore.modules.hooks import handles
from outcore.options import LoadOptions
from outcore.plan.joint_plan import NONE, Draft
from outcore.plan.planner import resident_budget

MODEL = "model"

# Chunk length in which a draft model computes a prompt, in tokens.
PROMPT_STEP = 256

# More new tokens of a text than this count as a prompt.
CATCH_UP = 64

# Guesses between two snapshots of the caches, and how many snapshots the longest draft takes.
SNAPSHOT_STEP, HELD = 16, 4


class DraftModels(DraftSource):
    kind, usage, names_models = MODEL, "or a model", True

    def parse(self, asked: str, argument: str | None) -> str:
        return asked

    def open(self, which: str, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft]:
        folder = draft_folder(which)
        check_tokenizers(opening.folder, folder)
        dtype = opening.options.dtype
        compute = COMPUTE_DTYPES[dtype] if dtype is not None else None
        size = profile_of(open_model(folder), context=None, prompt=None, dtype=compute).size
        size = replace(size.at_context(profile.size.context), prompt=PROMPT_STEP)
        return profile, Draft(
            MODEL,
            name_of(folder),
            weights=resident_budget(size) - size.cache,
            # Includes the snapshots of states.
            cache=size.cache + HELD * size.states,
            growing=size.growing,
            detail=folder,
        )

    def load(self, draft: Draft, profile: ModelProfile, opening: Opening, progress: Progress) -> Drafting:
        o = opening.options
        its = LoadOptions(dtype=o.dtype, cpu_streams=o.cpu_streams, draft=NONE, govern=False)
        memory = resident_budget(prepare(draft.detail, its).profile.size)
        model, _ = load_model(draft.detail, replace(its, memory=memory), progress=progress)
        return ByModel(model, draft.name, own=True)

    def of_model(self, model: nn.Module) -> Drafting:
        return ByModel(model, "draft_model")


class ByModel(Drafting):
    """A draft model in memory. ``own``: ``load`` loaded it for drafting, so ``close`` closes it."""

    kind = MODEL

    def __init__(self, model: nn.Module, name: str, own: bool = False) -> None:
        super().__init__(name)
        self.model, self._own = model, own

    def proposer(self, draw: Draw, *_: Any) -> ModelProposer | None:
        return None if self.model is None else ModelProposer(self.model, draw)

    def close(self) -> None:
        model, self.model = self.model, None
        if model is not None and self._own:
            model.outcore.close()


class ModelProposer:
    """Proposes tokens by a draft model, all in memory; ``draw`` as in ``Drafting.proposer``."""

    name = MODEL
    cheaper = None

    def __init__(self, model: nn.Module, draw: Draw) -> None:
        self._model: nn.Module | None = model
        self._draw = draw
        self._text: list[int] = []
        self._cache: list[Any] = make_prompt_cache(model)
        self._fed: list[int] = []  # tokens that the caches hold
        self._same = 0  # how many of the first tokens of ``_fed`` are the text's
        self._snapshots: list[tuple[int, Snapshot]] = [(0, Snapshot(self._cache))]

    def give_up(self) -> None:
        self._model, self._cache, self._snapshots = None, [], []

    def begin(self, text: Sequence[int]) -> None:
        """Sets the text, and rolls the caches back to the tokens that they have in common with it."""
        if self._model is None:
            return
        self._text = list(text)
        while self._same < min(len(self._fed), len(text)) and self._fed[self._same] == text[self._same]:
            self._same += 1
        # The text's last token is fed again: the next guess comes from its logits.
        most = min(self._same, len(text) - 1)
        if len(self._fed) > most:
            while self._snapshots[-1][0] > most:
                self._snapshots.pop()
            at, snapshot = self._snapshots[-1]
            snapshot.restore()
            # A snapshot can be restored once only.
            self._snapshots[-1] = at, Snapshot(self._cache)
            del self._fed[at:]
            self._same = min(self._same, at)
        del self._snapshots[:-1]
        if len(text) - len(self._fed) > CATCH_UP:
            # A prompt, computed here so that it does not count as the cost of a guess.
            self._follow(list(text[len(self._fed) : -1]))

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        if self._model is None:
            return None
        new = [*self._text[len(self._fed) :], *drafted[max(0, len(self._fed) - len(self._text)) :]]
        if len(new) > 1:
            self._follow(new[:-1])
        with mx.stream(generation_stream):
            logits = self._feed(new[-1:])
            return self._draw(logits[0, -1])

    def _follow(self, ids: list[int]) -> None:
        with mx.stream(generation_stream):
            for at in range(0, len(ids), PROMPT_STEP):
                self._feed(ids[at : at + PROMPT_STEP])
                mx.eval(handles(*self._cache))
                if len(self._fed) <= len(self._text):
                    del self._snapshots[:-1]

    def _feed(self, ids: Sequence[int]) -> mx.array:
        assert self._model is not None
        logits: mx.array = self._model(mx.array(list(ids), dtype=mx.int32)[None], cache=self._cache)
        self._fed += ids
        if len(self._fed) <= len(self._text) or len(self._fed) >= self._snapshots[-1][0] + SNAPSHOT_STEP:
            self._snapshots.append((len(self._fed), Snapshot(self._cache)))
        return logits


def draft_folder(model: str) -> Path:
    """Returns the local folder of a draft model, or of a model with a head that drafts. Raises as ``resolve_model``;
    the message begins with ``--draft``."""
    try:
        return resolve_model(model)
    except CheckpointError as e:
        raise type(e)(f"--draft: {e}") from e


def check_tokenizers(model: Path, draft: Path) -> None:
    """Raises ``UsageError`` if the draft model has other tokens than the model."""
    ours, theirs = _tokens(model), _tokens(draft)
    if ours != theirs:
        raise UsageError(
            f"{called('draft')} {draft}: has another tokenizer than {model}; give a model with the same tokens"
        )


def _tokens(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    try:
        if path.exists():
            found = parse_json(read_small(path, TOKENIZER_BYTES))
            added = {t["content"]: t["id"] for t in found.get("added_tokens", [])}
            return found["model"]["vocab"], added
        for name in ("tokenizer.model", "tiktoken.model", "vocab.json"):
            if (folder / name).exists():
                return read_small(folder / name, TOKENIZER_BYTES)
        path = folder / "config.json"
        config = parse_json(read_small(path, CONFIG_BYTES))
        return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path}: cannot be read to compare tokenizers: {' '.join(str(e).split())[:200]}") from e
