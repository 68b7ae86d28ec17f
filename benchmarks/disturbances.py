"""Whether a disturbance changes a later answer: conversations that are disturbed and go on, against mlx-lm's.

    python benchmarks/disturbances.py --rounds 10000 --json FILE

Each round takes a tiny random model of one of mlx-lm's types, held in memory in a random way (all, some or none of it
resident, whole layers or parts), a random length of chunks, a kind of cache and a draft, and has several turns with one
prompt cache. In one of them something goes wrong: a read fails, a callback, a sampler or a logits processor raises, MLX
does, a signal comes, or the answer is not read to its end. Then the same model and cache go on with the tokens that the
cache does not hold. All tokens must be those of mlx-lm's own loop over the resident model, and the caches as long.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate as their_stream_generate
from mlx_lm.models.cache import KVCache, make_prompt_cache

import _support  # noqa: F401
import outcore
from held_models import TYPES, Model, Models
from outcore.decode import text_drafts
from outcore.decode.prompt import cached_tokens
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting
from outcore.disk import reader as reader_module
from outcore.disk.open_file import read_chunk
from result_file import document_of
from stand_ins import Oracle, TokensOnly

KINDS = ("read", "unit", "progress", "sampler", "processor", "async_eval", "eval", "alarm", "interrupt", "leave")

TURNS, MOST_PROMPT, MOST_ANSWER = 3, 24, 8


class Disturbed(Exception):
    """What a disturbance raises that is no error of the system's."""


@dataclass
class Round:
    """What was tried, and how it ended: ``differs`` is None where all was as it should be."""

    model: str
    options: dict[str, Any]
    kind: str
    settings: dict[str, Any]
    happened: bool = False
    differs: str | None = None


@dataclass
class Turn:
    """One turn of a conversation; ``answer`` gets what comes of it."""

    prompt: list[int]
    wanted: int
    cache: list[Any]
    settings: dict[str, Any]
    answer: list[int] = field(default_factory=list)


@dataclass
class Trigger:
    """Raises at the ``left``-th event of its kind."""

    left: int
    error: Callable[[], BaseException]
    happened: bool = False
    armed: bool = False  # a signal may come: whoever waits for it is there

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.happened = True
            raise self.error()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self()
            return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


@contextlib.contextmanager
def disturbance(
    kind: str, rng: random.Random, model: nn.Module, expected_s: float
) -> Iterator[tuple[Trigger, dict[str, Any]]]:
    """Something that goes wrong once inside; gives further arguments of ``stream_generate``."""
    trigger = Trigger(rng.randint(1, 8 if kind in ("sampler", "processor") else 25), lambda: Disturbed(kind))
    options: dict[str, Any] = {}
    streaming = model.outcore.streaming
    with contextlib.ExitStack() as stack:
        if kind == "read":
            trigger.error = lambda: OSError(5, "Input/output error")
            stack.enter_context(replaced(reader_module, "read_chunk", trigger.before(read_chunk)))
        elif kind in ("async_eval", "eval"):
            trigger.error = lambda: RuntimeError("[malloc] Unable to allocate")
            stack.enter_context(replaced(mx, kind, trigger.before(getattr(mx, kind))))
        elif kind == "unit" and streaming is not None:
            streaming.after_unit.append(trigger)
            stack.callback(streaming.after_unit.remove, trigger)
        elif kind == "progress":
            trigger.left = rng.randint(1, 2)
            options["prompt_progress_callback"] = trigger
        elif kind == "sampler":
            options["sampler"] = trigger.before(lambda logprobs: mx.argmax(logprobs, axis=-1))
        elif kind == "processor":
            options["logits_processors"] = [trigger.before(lambda _, logits: logits)]
        elif kind in ("alarm", "interrupt"):

            def ring(_: int, frame: FrameType | None) -> None:
                if not trigger.armed or (frame is not None and frame.f_code is _disturbed.__code__):
                    # Between a token's coming out and its being noted here: what is lost is the test's own.
                    signal.setitimer(signal.ITIMER_REAL, 1e-4)
                    return
                trigger.happened = True
                raise Disturbed(kind) if kind == "alarm" else KeyboardInterrupt

            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, ring))
            stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, rng.random() * expected_s))
        yield trigger, options


def disturb(found: Model, rng: random.Random) -> Round:
    """One round."""
    kind = rng.choice(KINDS)
    settings: dict[str, Any] = {}
    if rng.random() < 0.7:
        settings["prefill_step_size"] = rng.choice([1, 3, 8, 16])
    bounded = None
    if rng.random() < 0.3 and _quantizes(found):
        settings |= {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": rng.choice([0, 5, 20])}
    elif rng.random() < 0.3:
        bounded = rng.choice([8, 16, 64])
    result = Round(found.name, found.options, kind, settings | {"max_kv_size": bounded})
    cache, their_cache = (make_prompt_cache(m, bounded) for m in (found.model, found.theirs))
    disturbed_turn, wrong = rng.randrange(TURNS), rng.choice([2, 3, 1000])
    took = 0.05
    for n in range(TURNS):
        prompt = [rng.randrange(3, 60) for _ in range(rng.randint(1, MOST_PROMPT))]
        turn = Turn(prompt, rng.randint(1, MOST_ANSWER), cache, settings)
        wanted, answer = turn.wanted, turn.answer
        # What a draft is to guess: the whole answer, whatever will become of it.
        whole_cache = copy.deepcopy(their_cache)
        whole = theirs(found, prompt, wanted, whole_cache, settings)
        text = [*prompt, *whole]
        began = time.perf_counter()
        with _drafting(text, wrong):
            left: list[int] | None = prompt
            if n == disturbed_turn:
                left = _disturbed(found.model, turn, rng, took, result)
                if result.differs:
                    break
            if left is not None:
                held = [*prompt, *answer][: len(prompt) + len(answer) - len(left)]
                answer += ours(found.model, left, wanted - len(answer), cache, settings, history=held)
        took = time.perf_counter() - began
        if len(answer) == wanted:
            expected, their_cache = whole, whole_cache
        else:
            expected = theirs(found, prompt, len(answer), their_cache, settings) if answer else []
        lengths = cached_tokens(cache), cached_tokens(their_cache)
        if answer != expected:
            result.differs = f"turn {n}: tokens {answer} instead of {expected}"
        elif answer and lengths[0] != lengths[1]:
            result.differs = f"turn {n}: {lengths[0]} tokens in the cache instead of {lengths[1]}"
        if result.differs:
            break
    return result


def _quantizes(found: Model) -> bool:
    """Whether mlx-lm can quantize the caches of this model."""
    if any(type(c) is not KVCache for c in make_prompt_cache(found.theirs)):
        return False
    settings = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    try:
        theirs(found, [3, 4, 5], 2, make_prompt_cache(found.theirs), settings)
    except (TypeError, ValueError, AttributeError):
        return False
    return True


@contextlib.contextmanager
def _drafting(text: list[int], wrong: int) -> Iterator[None]:
    """Drafts that are right but for every so many tokens, however little they are worth here."""
    with (
        replaced(Drafting, "source", lambda *_: Oracle(text, wrong)),
        replaced(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(5, fixed=True)),
    ):
        yield


def _disturbed(model: nn.Module, turn: Turn, rng: random.Random, expected_s: float, result: Round) -> list[int] | None:
    """A turn that is disturbed.

    Returns:
        tokens to go on with in the same turn; None where the cache holds all there is: the next turn has to come.
    """
    prompt, wanted, cache, answer, kind = turn.prompt, turn.wanted, turn.cache, turn.answer, result.kind
    stop_after = rng.randint(1, wanted)
    model.outcore.in_cache = 0  # of the turn before; it may be disturbed before it begins
    try:
        with disturbance(kind, rng, model, expected_s) as (trigger, options):
            trigger.armed = True
            responses = outcore.stream_generate(
                model, TokensOnly(), prompt, max_tokens=wanted, prompt_cache=cache, **turn.settings, **options
            )
            with contextlib.closing(responses):  # type: ignore[type-var]
                for r in responses:
                    answer.append(r.token)
                    if kind == "leave" and len(answer) == stop_after:
                        result.happened = True
                        break
    except (Disturbed, KeyboardInterrupt, outcore.OutcoreError, RuntimeError, OSError) as e:
        if not trigger.happened:
            raise
        result.happened = True
        result.settings["raised"] = type(e).__name__
    known = [*prompt, *answer]
    left = known[model.outcore.in_cache :]
    if not left:
        return None
    if (model.outcore.in_cache > 0 and len(left) != 1) or (model.outcore.in_cache == 0) != (not answer):
        told = f"{model.outcore.in_cache} of {len(prompt)} and {len(answer)} tokens are in the cache"
        result.differs = f"{told}, which is at {cached_tokens(cache)}"
        return None
    if len(answer) == wanted:
        # All was said, and the last token did not get into the cache. It is computed, and its successor forgotten.
        ours(model, left, 1, cache, turn.settings, leave_last=True)
        return None
    return left


def ours(
    model: nn.Module, prompt: list[int], tokens: int, cache: list[Any], settings: dict[str, Any], **options: Any
) -> list[int]:
    """Tokens of an answer that nothing disturbs."""
    given = {"max_tokens": tokens, "prompt_cache": cache, **settings, **options}
    return [r.token for r in outcore.stream_generate(model, TokensOnly(), prompt, **given)]


def theirs(found: Model, prompt: list[int], tokens: int, cache: list[Any], settings: dict[str, Any]) -> list[int]:
    """The same by mlx-lm, everything resident."""
    given = {"max_tokens": tokens, "prompt_cache": cache, **settings}
    return [r.token for r in their_stream_generate(found.theirs, TokensOnly(), prompt, **given)]


def run(models: Models, rounds: int, seed: int, each: int, done: Callable[[Round], None]) -> None:
    """So many rounds, some on each model in turn, so that it goes on after more than one disturbance."""
    rng = random.Random(seed)
    for at in range(0, rounds, each):
        found = models.draw(rng)
        with found.model.outcore:
            for _ in range(min(each, rounds - at)):
                done(disturb(found, rng))


def together(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The results of an earlier run and of this one as one: numbers added up, commands and differences one after the
    other; the machine is this one's."""
    kinds = {
        kind: {what: before["by_kind"].get(kind, {}).get(what, 0) + n for what, n in counts.items()}
        for kind, counts in now["by_kind"].items()
    }
    return now | {
        "command": [*before["command"], "+", *now["command"]],
        "rounds": before["rounds"] + now["rounds"],
        "disturbed": before["disturbed"] + now["disturbed"],
        "by_kind": kinds,
        "by_model": dict(Counter(before["by_model"]) + Counter(now["by_model"])),
        "differ": before["differ"] + now["differ"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Conversations that are disturbed, against mlx-lm's.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=5, help="rounds on one loaded model")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--add", action="store_true", help="to what FILE holds already; give another --seed")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    found: list[Round] = []

    def done(ended: Round) -> None:
        found.append(ended)
        if ended.differs:
            print(ended, flush=True)
        elif len(found) % 100 == 0:
            print(len(found), "rounds,", sum(r.happened for r in found), "disturbed", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run(Models(Path(folder), args.types.split(",")), args.rounds, args.seed, args.each, done)
    by_kind = {
        kind: {"rounds": len(mine), "disturbed": sum(r.happened for r in mine)}
        for kind in KINDS
        for mine in [[r for r in found if r.kind == kind]]
    }
    document = document_of(
        "disturbances",
        Path.cwd(),
        rounds=len(found),
        disturbed=sum(r.happened for r in found),
        by_kind=by_kind,
        by_model=dict(Counter(r.model for r in found)),
        differ=[asdict(r) for r in found if r.differs],
    )
    print(json.dumps({k: v for k, v in document.items() if k != "machine"}, indent=1))
    if args.json is not None:
        if args.add and args.json.exists():
            document = together(json.loads(args.json.read_text()), document)
        args.json.write_text(json.dumps(document, indent=1))
    return int(any(r.differs for r in found))


if __name__ == "__main__":
    sys.exit(main())
