"""Trains a drafter on collected states, and goes on where an interrupted training stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from outcore.machine.device import on_cpu

from .collect import Shards
from .network import Network, accepted, gradients
from .work_folder import WorkFolder

# Guesses that are trained for each place, at the end, and guesses that count in "tokens a pass".
DEPTH, TRIED = 5, 8

# One in so many files is held out.
HELD_OUT = 20

# The rate rises over so many steps, then falls along a cosine to this share of its highest value.
WARM, LEAST = 100, 0.02

# On a CPU: a token with at least this chance anywhere in a step is among those whose probabilities are computed; and so
# many of the other tokens.
LEAST_CHANCE, SAMPLED = 0.02, 1024

# An evaluation follows the one before it after at least so many times its own duration.
JUDGING = 4

# Evaluations without a better result, after which training ends.
PATIENCE = 6


@dataclass
class Progress:
    """What a training has come to. ``best``: tokens a pass of the best evaluation so far."""

    steps: int = 0
    seconds: float = 0.0
    best: float = 0.0
    stale: int = 0
    loss: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Trains ``net`` on the shards' texts.

    Args:
        table, head: as in ``Network.guesses``.
        prompt: tokens of each text's prompt.
        ends: tokens after which a continuation does not count.
        rows: texts in a step.
        seconds: the longest time, over all runs of this training.
        work: the folder of what a resumed training needs. Where no more may be written, training goes on unsaved.
        report: called with each evaluation; ``step_done``: after each step.
    """

    def __init__(
        self, net: Network, table: mx.array, head: mx.array, shards: Shards, *, prompt: int, ends: list[int], rows: int,
        seconds: float, work: WorkFolder, seed: int, rate: float = 2e-3, every: float | None = None,
        report: Callable[[Progress, dict[str, float]], None] = lambda *_: None,
        step_done: Callable[[Progress], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.net, self._table, self._head, self._shards = net, table, head, shards
        self._prompt, self._ends, self._rows, self._seconds = prompt, ends, rows, seconds
        self._work, self._seed, self._rate, self._report, self._step_done = work, seed, rate, report, step_done
        self._every = seconds / 20 if every is None else every
        self.progress = Progress()
        self._optimizer = optim.AdamW(learning_rate=rate, betas=[0.9, 0.95], weight_decay=0.01)
        self._optimizer.init(net.trainable_parameters())

    def run(self) -> Progress:
        """Trains until the time is over, or until held-out texts show no more progress; ``net`` then has the weights
        of the best evaluation."""
        self._resume()
        done, began, saved, best = self.progress.seconds, time.monotonic(), time.monotonic(), False
        self._every = max(self._every, (self._seconds - done) / max(1.0, self._room()))
        while self.progress.seconds < self._seconds and self.progress.stale < PATIENCE:
            batch = self._batch(self.progress.steps)
            part = self.progress.seconds / self._seconds
            cosine = LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * part))
            self._optimizer.learning_rate = mx.array(self._rate * min(1.0, (self.progress.steps + 1) / WARM) * cosine)
            # Deeper guesses are worth more once the first are good.
            value = self._step(batch, 2 + int(part * (DEPTH - 1)))
            p = self.progress
            now = float(cast(float, value.item()))
            p.loss = now if not p.steps else 0.98 * p.loss + 0.02 * now
            p.steps, p.seconds = p.steps + 1, done + time.monotonic() - began
            self._step_done(p)
            due = time.monotonic()
            if p.seconds >= self._seconds or (due - saved > self._every and self._room() >= 1):
                best = self._judge()
                saved = time.monotonic()
                self._every = max(self._every, JUDGING * (saved - due))
                p.seconds = done + saved - began
                self._save("last")
        if not best:
            self._load("best")
        return self.progress

    def _step(self, batch: dict[str, mx.array], depth: int) -> mx.array:
        value, found = gradients(self.net, batch, self._table, self._head, depth)
        squares = mx.array(0.0)
        for _, array in tree_flatten(found):  # one by one, here and below: MLX frees memory once all is computed
            squares = squares + array.square().sum()
            mx.eval(squares)
        clip = mx.minimum(1 / (mx.sqrt(squares) + 1e-6), 1.0)  # as mlx.optimizers.clip_grad_norm
        self._optimizer.update(self.net, tree_map(lambda array: array * clip, found))
        del found
        for weight in sorted((a for _, a in tree_flatten(self.net.parameters())), key=lambda a: a.size):
            mx.eval(weight)  # the largest at last, when the others' gradients are gone
        mx.eval(self._optimizer.state)
        return value

    def _batch(self, step: int) -> dict[str, mx.array]:
        """Returns the texts of a step: whole files in turn, each in an order drawn anew in each round."""
        shard, rows = self._shard_of(step)
        loaded = self._loaded(shard)
        made = self._prepared({key: a[mx.array(rows)] for key, a in loaded.items()})
        return made | _columns(made, self._head.shape[0], step) if on_cpu() else made

    def _shard_of(self, step: int) -> tuple[int, np.ndarray[Any, Any]]:
        trained = [n for n in range(self._shards.count) if not is_held_out(n)]
        texts = self._loaded(trained[0])["tokens"].shape[0]
        turn, place = divmod(step, max(1, texts // self._rows))
        round_, nth = divmod(turn, len(trained))
        shard = int(np.random.default_rng([self._seed, round_]).permutation(trained)[nth])
        rows = np.random.default_rng([self._seed, round_, shard]).permutation(texts)
        return shard, rows[place * self._rows : (place + 1) * self._rows]

    def _loaded(self, shard: int) -> dict[str, mx.array]:
        if getattr(self, "_now", (None,))[0] != shard:
            self._now: tuple[int, dict[str, mx.array]] = shard, self._shards.load(shard)
        return self._now[1]

    def _prepared(self, part: dict[str, mx.array]) -> dict[str, mx.array]:
        tokens, begin = part["tokens"], self._prompt + 1
        ended = mx.zeros(tokens.shape, mx.bool_)
        for end in self._ends:
            ended = ended | (tokens == end)
        # A continuation counts up to its first end of text.
        after = mx.cumsum(ended[:, begin:].astype(mx.int32), axis=1) - ended[:, begin:]
        counts = mx.concatenate([mx.ones((tokens.shape[0], begin)), (after == 0).astype(mx.float32)], axis=1)
        exact = {key: part[key].astype(mx.float32) for key in ("states", "chances") if key in part}
        return part | exact | {"counts": counts}

    def _judge(self) -> bool:
        """Returns whether these weights are the best so far."""
        p = self.progress
        found = self.tokens_a_pass()
        now = {"seconds": round(p.seconds, 1), "steps": p.steps, "loss": round(p.loss, 4), "tokens_a_pass": found}
        p.history.append(now)
        best, p.stale = found > p.best, p.stale + 1
        if best:
            p.best, p.stale = found, 0
            self._save("best")
        self._report(p, now)
        return best

    def tokens_a_pass(self) -> float:
        """Returns how many tokens a verifying pass gives on held-out texts, counted as when drafting: after each pass
        the next begins with the first token that was not guessed."""
        passes = made = 0
        for shard in filter(is_held_out, range(self._shards.count)):
            loaded = self._loaded(shard)
            together = min(8, self._rows)
            for at in range(0, loaded["tokens"].shape[0], together):
                batch = self._prepared({key: loaded[key][at : at + together] for key in ("tokens", "states")})
                first = self._prompt - 1
                right = np.array(accepted(self.net, batch, self._table, self._head, first, TRIED))
                last = np.array(batch["counts"][:, first + 2 :].sum(axis=1)).astype(int)
                for row, places in zip(right, last, strict=True):
                    place = 0
                    while place < places:
                        place += int(row[place]) + 1
                        passes += 1
                    made += min(place, int(places))
            if passes > 2000:
                break
        return round(made / max(1, passes), 4)

    def _weights(self, name: str) -> dict[str, mx.array]:
        arrays = dict(tree_flatten(self.net.parameters(), prefix=".net"))
        if name == "last":
            arrays |= dict(tree_flatten(self._optimizer.state, prefix=".optimizer"))
        return {key: a for key, a in arrays.items() if isinstance(a, mx.array)}

    def _room(self) -> float:
        """Returns after how many evaluations weights may still be saved."""
        return self._work.room(self._weights("best"), self._weights("last"))

    def _save(self, name: str) -> None:
        """Saves weights, if they may still be written."""
        if self._work.room(arrays := self._weights(name)) >= 1:
            self._work.write(self._file(name), arrays, {"progress": json.dumps(self.progress.__dict__)})

    def _file(self, name: str) -> Path:
        return self._work.path / f"{name}.safetensors"

    def _kept(self, name: str) -> tuple[dict[str, mx.array], Progress] | None:
        """Returns what ``_save`` wrote, lazy; None: nothing, or it is not whole."""
        file = self._file(name)
        if not file.exists():
            return None
        try:
            loaded: Any = mx.load(str(file), return_metadata=True)
            arrays, meta = loaded
            return arrays, Progress(**json.loads(meta["progress"]))
        except (RuntimeError, KeyError, TypeError, ValueError):
            return None  # something else has written there

    def _load(self, name: str) -> Progress | None:
        if (kept := self._kept(name)) is None:
            return None
        arrays, progress = kept
        net = {key.removeprefix("net."): a for key, a in arrays.items() if key.startswith("net.")}
        self.net.load_weights(list(net.items()))
        state = [(key.removeprefix("optimizer."), a) for key, a in arrays.items() if key.startswith("optimizer.")]
        if state:
            self._optimizer.state = tree_unflatten(state)
        mx.eval(self.net.parameters(), self._optimizer.state)
        return progress

    def _resume(self) -> None:
        self.progress = self._load("last") or self.progress
        if (best := self._kept("best")) is not None:  # a kill may have come before its "last" was saved
            self.progress.best = max(self.progress.best, best[1].best)


def _columns(batch: dict[str, mx.array], vocabulary: int, seed: int) -> dict[str, mx.array]:
    """Returns ``columns`` and ``offsets`` of ``loss``: the tokens that are likely in this batch, and some of the others
    for all of them (sampled softmax). Probabilities of the whole vocabulary take most of a step's time on a CPU."""
    likely = np.array(batch["likely"])[np.array(batch["chances"]) > LEAST_CHANCE]
    wanted = np.unique(np.concatenate([likely, np.array(batch["tokens"]).ravel()]))
    others = np.setdiff1d(np.arange(vocabulary), wanted)
    drawn = np.random.default_rng(seed).permutation(others)[:SAMPLED]
    offsets = np.zeros(len(wanted) + len(drawn), np.float32)
    if len(drawn):
        offsets[len(wanted) :] = math.log(len(others) / len(drawn))
    return {"columns": mx.array(np.concatenate([wanted, drawn]).astype(np.int32)), "offsets": mx.array(offsets)}


def is_held_out(file: int) -> bool:
    """Whether a file of states is for judging only."""
    return file % HELD_OUT == 0
