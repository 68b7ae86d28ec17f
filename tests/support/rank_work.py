"""What ranks do in tests and benchmarks: the same program on each, of which the first one's results count."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import mlx_lm.utils
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import outcore
import outcore_cluster.sharing
import quick_mlx_lm  # noqa: F401
from outcore.cli.main import main
from outcore.decode import one_text, text_drafts
from outcore.decode.model_runner import ModelRunner
from outcore.decode.preparation import prepare
from outcore.decode.request import Request
from outcore.decode.sampling import make_sampler, own_sampler
from outcore.decode.scheduler import Scheduler
from outcore.decode.sequence_room import SequenceRoom
from outcore.decode.speculative.acceptance import AcceptanceStats
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.proposers import Guess
from outcore.errors import BudgetError, OutcoreError, UsageError
from outcore.options import LoadOptions
from outcore.plan.machine_profile import Calibration
from outcore_cluster.group import RankGroup
from outcore_cluster.leading import RankLeader, follow
from outcore_cluster.link_protocol import Link, RankAgreement
from outcore_cluster.sharing import RankMeans
from outcore_cluster.stage import Incoming
from outcore_tools.demo import demo_model
from stand_ins import TokensOnly

PROMPT = [(7 * n * n + 3) % 60 + 2 for n in range(40)]
BY_TIME = outcore_cluster.sharing.share_layers


@dataclass(frozen=True)
class Alone:
    """A link to nobody."""

    rank: int = 0
    size: int = 1


@functools.cache
def demo_tokenizer() -> Any:
    """Loading it takes longer than a tiny model's text."""
    with demo_model() as demo:
        return mlx_lm.utils.load_tokenizer(demo)


@functools.cache
def tokenizer_without_end() -> Any:
    """Random weights may end a text anywhere."""
    with demo_model() as demo:
        tokenizer = mlx_lm.utils.load_tokenizer(demo)
    tokenizer.eos_token_ids = set()
    return tokenizer


def alternate(
    nbytes: Sequence[int], groups: Sequence[Sequence[int]], ranks: Sequence[RankMeans], hop_s: float = 0.0
) -> list[int]:
    """Layers in turn, whatever memory there is."""
    owners = [0] * len(nbytes)
    for n, group in enumerate(groups):
        for i in group:
            owners[i] = (n + 1) % len(ranks)
    return owners


def always(most: int, acceptance: AcceptanceStats) -> DraftLengthPolicy:
    """Drafts whether it is worth it or not: a small model's weights are read in no time."""
    return DraftLengthPolicy(most, acceptance, fixed=True)


def loaded(link: Link | None, folder: Path, in_turn: bool = True, **options: Any) -> Any:
    """A model in memory that is large enough, on this rank's share of layers or alone; what drafts is asked always."""
    text_drafts.DraftLengthPolicy = always  # type: ignore[assignment, misc, attr-defined, unused-ignore]
    if in_turn:
        outcore_cluster.sharing.share_layers = alternate  # type: ignore[attr-defined, unused-ignore]
    else:
        outcore_cluster.sharing.share_layers = BY_TIME  # type: ignore[attr-defined, unused-ignore]
    own: dict[str, Any] = {} if link is None or link.size == 1 else {"ranks": RankGroup(link)}
    given: dict[str, Any] = (
        {"memory": "8GB", "context": 160, "prompt": 64, "govern": False, "draft": "none"} | options | own
    )
    model, _ = outcore.load_model(folder, **given)
    return model


def held(link: Link, folder: Path, **options: Any) -> tuple[int, int, int]:
    """Bytes of this rank's weights in memory, of caches behind a prompt, and tokens that the caches say they hold."""
    model = loaded(link, folder, **options)
    with model.outcore:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([PROMPT]), cache=cache), [c.state for c in cache])
        weights = sum(a.nbytes for m in model.modules() for a in m.values() if isinstance(a, mx.array))
        return weights, sum(c.nbytes for c in cache), min(c.offset for c in cache)


def on_known_machine(link: Link, folder: Path, **options: Any) -> Any:
    """As ``loaded``, on a machine that takes 0.1 ms for a layer and 0.02 for each token."""
    size = prepare(folder).profile.size
    times = {kind: {1: 1.2e-4, 512: 1.034e-2} for kind in (size.rest_kind, *(layer.kind for layer in size.layers))}
    known = Calibration(kinds=times, measured=True)
    with patch("outcore.decode.preparation.load_calibration", lambda *_: known):
        return loaded(link, folder, **options)


def cut_into(link: Link, folder: Path, options: dict[str, Any]) -> tuple[int, float]:
    """Tokens of a chunk that a prompt of 500 was computed in, and seconds to the first token that were foreseen."""
    used: list[int] = []
    prompting = ModelRunner.prompting

    def noted(self: ModelRunner, ids: mx.array, step: int, *more: Any) -> Any:
        used.append(step)
        return prompting(self, ids, step, *more)

    own = {"context": 600, "prompt": 500, "in_turn": False}
    model = on_known_machine(link, folder, **(own | options))
    with model.outcore as session:
        assert session.transport.forecast is not None
        ModelRunner.prompting = noted  # type: ignore[method-assign, assignment]
        try:
            ids = [n % 90 for n in range(500)]
            list(outcore.stream_generate(model, TokensOnly(), ids, max_tokens=1))
        finally:
            ModelRunner.prompting = prompting  # type: ignore[method-assign]
        return used[0], session.transport.forecast.ttft_s


class Joined:
    """A link that a command may close."""

    def __init__(self, link: Link) -> None:
        self._link, self.host = link, f"host{link.rank}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def close(self) -> None: ...


def command(link: Link, words: Sequence[str]) -> tuple[int, str, str]:
    """How ``outcore`` ends as one of the ranks, and what it prints on standard output and error."""
    outcore_cluster.sharing.share_layers = BY_TIME  # type: ignore[attr-defined, unused-ignore]
    out, err = io.StringIO(), io.StringIO()
    own = {"MLX_RANK": str(link.rank), "OUTCORE_MONITOR": "off", "OUTCORE_CONFIG": os.devnull}
    with (
        patch("outcore_cluster.launch.as_rank.from_environment", lambda: Joined(link)),
        patch.dict(os.environ, own),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        return main([*words]), out.getvalue(), err.getvalue()


class Told:
    """Drafts what a text is known to go on with; each third guess is another token."""

    name = "ngram"
    cheaper = None

    def __init__(self, answer: Sequence[int], prompt: int) -> None:
        self._answer, self._prompt, self._at = answer, prompt, 0

    def begin(self, text: Sequence[int]) -> None:
        self._at = len(text) - self._prompt

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        at = self._at + len(drafted)
        if at >= len(self._answer):
            return None
        return Guess(self._answer[at] if at % 3 else 1, ("ngram", 9))


class ToldDrafting:
    """What has a model's drafts be ``Told``."""

    kind, name, model = "ngram", "ngram", None

    def __init__(self, told: Told) -> None:
        self._told = told

    def source(self, control: Any, *_: Any) -> Told:
        control.fixed = True  # whether it is worth its time is not the question
        return self._told

    def hidden(self) -> None:
        return None

    def close(self) -> None: ...


def conversation(
    link: Link | None, folder: Path, options: dict[str, Any], coupled: bool = False, most: int | None = None
) -> list[int]:
    """Two drawn texts that share a prompt cache; of the first the caller hears only the beginning.

    Args:
        coupled: a seed gives one text, drafted or not. ``most``: tokens that are drafted at most.
    """
    model = loaded(link, folder, **options)
    tokenizer = tokenizer_without_end()
    mx.random.seed(7)
    found: list[int] = []
    with model.outcore:
        cache, sampler = make_prompt_cache(model), make_sampler(temp=0.9, top_p=0.95, coupled=coupled)
        for prompt, heard in ((PROMPT, 5), ([3, 1, 4], 8)):
            for r in outcore.stream_generate(
                model, tokenizer, prompt, max_tokens=8, prompt_cache=cache, sampler=sampler, prefill_step_size=16,
                num_draft_tokens=most,
            ):  # fmt: skip
                found.append(r.token)
                heard -= 1
                if not heard:
                    break
        found += [c.offset for c in cache if hasattr(c, "offset")]
    return found


def shedding(link: Link, folder: Path, tokens: int, rank: int) -> Any:
    """A text of a model that is in memory on all ranks, and of which one has to stream its layers from the middle on;
    then they come back."""
    model = loaded(link, folder)
    tokenizer = tokenizer_without_end()
    found, swept = [], []
    with model.outcore as session:
        for n, r in enumerate(
            outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=tokens, prefill_step_size=16)
        ):
            found.append((r.token, digest(r.logprobs)))
            if link.rank == rank and n == 3:
                session.residency.layers.shed(2)
            if link.rank == rank and n == 7:
                session.residency.layers.regrow(2)
            swept.append(session.metrics.bytes_read)
    return found, swept


def failing(link: Link | None, folder: Path, options: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """A text for which memory runs out before its sixth token, on all ranks, and how it goes on from its caches: tokens
    of both, and how far the caches were after the first."""
    model = loaded(link, folder, **options)
    reserve = one_text.OneText.reserve

    def short(self: Any, more: int = 0) -> None:
        if len(self.sampler.text) + more > len(PROMPT) + 5:
            raise BudgetError("no room")
        reserve(self, more)

    first: list[int] = []
    with model.outcore:
        cache = make_prompt_cache(model)
        how = {"prompt_cache": cache, "prefill_step_size": 16}
        one_text.OneText.reserve = short  # type: ignore[method-assign]
        try:
            for r in outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=9, **how):
                first.append(r.token)
        except BudgetError:
            reached = [c.offset for c in cache if hasattr(c, "offset")]
        finally:
            one_text.OneText.reserve = reserve  # type: ignore[method-assign]
        rest = [first[-1]] if reached[0] < len(PROMPT) + len(first) else [7]
        second = [r.token for r in outcore.stream_generate(model, TokensOnly(), rest, max_tokens=6, **how)]
        return first, reached, second


def giving_up(link: Link, folder: Path, tokens: int, options: dict[str, Any]) -> Any:
    """Two texts, and what had been drafted behind each token; the first rank gives up its draft after the sixth."""
    model = loaded(link, folder, **options)
    tokenizer = tokenizer_without_end()
    found, counts, freed = [], [], 0
    with model.outcore as session:
        for _ in range(2):
            for n, r in enumerate(
                outcore.stream_generate(model, tokenizer, PROMPT, tokens, prefill_step_size=16, num_draft_tokens=3)
            ):
                found.append((r.token, digest(r.logprobs)))
                if link.rank == 0 and n == 5:
                    freed += session.residency.layers.give_up_draft()
                counts.append(session.metrics.drafted)
        return found, counts, freed


def refused(link: Link, folder: Path, options: dict[str, Any]) -> str:
    """Why a model is not loaded."""
    try:
        loaded(link, folder, **options).outcore.close()
    except OutcoreError as e:
        return str(e)
    return ""


def drafted(
    link: Link, folder: Path, answer: Sequence[int], options: dict[str, Any]
) -> tuple[list[tuple[int, str]], dict[str, Any]]:
    """A text of which the first rank knows how it goes on, and the others do not."""

    def tell(session: Any) -> None:
        told = answer if link.rank == 0 else ()
        session.drafting = ToldDrafting(Told(told, len(PROMPT)))

    return text(link, folder, len(answer), how={"num_draft_tokens": 4}, begin=tell, draft="ngram", **options)


def guessed(
    link: Link | None, folder: Path, tokens: int, options: dict[str, Any]
) -> tuple[list[tuple[int, str]], dict[str, Any], list[int | None]]:
    """A text, what this rank did for it, and every token that its drafter with weights guessed."""
    guesses: list[int | None] = []

    def note(session: Any) -> None:
        original = session.drafting.proposer

        def proposer(*args: Any) -> Any:
            made = original(*args)
            if made is not None:
                guess = made.guess

                def noted(drafted: Sequence[int]) -> Guess | None:
                    found: Guess | None = guess(drafted)
                    guesses.append(None if found is None else found.token)
                    return found

                made.guess = noted
            return made

        session.drafting.proposer = proposer

    found, did = text(link, folder, tokens, how={"num_draft_tokens": 4}, begin=note, **options)
    return found, did, guesses


def interrupted(
    link: Link, folder: Path, tokens: int, options: dict[str, Any], rank: int
) -> tuple[list[int], str, list[int]]:
    """A text that Ctrl-C ends on one rank, in the middle of a pass: its tokens, what was raised, and how many tokens
    the caller's caches hold afterwards."""
    model, found = loaded(link, folder, **options), list[int]()
    cache = make_prompt_cache(model)

    def press() -> None:
        raise KeyboardInterrupt

    with model.outcore as session:
        how: dict[str, Any] = {"prompt_cache": cache, "num_draft_tokens": 4, "prefill_step_size": 16}
        try:
            for r in outcore.stream_generate(model, TokensOnly(), PROMPT, tokens, **how):
                found.append(r.token)
                if link.rank == rank and len(found) == 4:
                    session.streaming.after_unit.append(press)
        except (KeyboardInterrupt, OutcoreError) as e:
            link.fail("Ctrl-C")  # as the command does
            return found, type(e).__name__, [c.offset for c in cache if hasattr(c, "offset")]
    return found, "", []


def digest(logprobs: mx.array) -> str:
    """Of all bits."""
    return hashlib.sha256(np.array(logprobs.astype(mx.float32)).tobytes()).hexdigest()[:16]


def text(
    link: Link | None, folder: Path, tokens: int, prompt: Sequence[int] = PROMPT, how: dict[str, Any] | None = None,
    begin: Callable[[Any], None] = lambda _: None, **options: Any,
) -> tuple[list[tuple[int, str]], dict[str, Any]]:  # fmt: skip
    """A greedy text's tokens with a digest of their log-probabilities, and what this rank did."""
    model = loaded(link, folder, **options)
    tokenizer = tokenizer_without_end()
    given: dict[str, Any] = {"prefill_step_size": 16} | (how or {})
    with model.outcore as session:
        begin(session)
        found = [
            (r.token, digest(r.logprobs))
            for r in outcore.stream_generate(model, tokenizer, list(prompt), max_tokens=tokens, **given)
        ]
        return found, _did(session)


def batch(
    link: Link | None, folder: Path, prompts: Sequence[Sequence[int]], tokens: Sequence[int], **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Several texts' tokens, which share sweeps."""
    model = loaded(link, folder, sequences=len(prompts), **options)
    tokenizer = demo_tokenizer()
    with model.outcore as session:
        got = outcore.batch_generate(
            model, tokenizer, [list(p) for p in prompts], max_tokens=list(tokens), return_token_ids=True,
            prefill_step_size=16,
        )  # fmt: skip
        return [list(t) for t in got.token_ids or []], _did(session)


def while_others_are_late(link: Link, folder: Path, late: int) -> list[float]:
    """Seconds of sweeps as this rank counts them, of which one layer stays in memory, where another one sends late."""
    model = loaded(link, folder, resident=1)
    found: list[float] = []
    with model.outcore as session:
        if link.rank == late:
            session.transport.before_send = lambda: time.sleep(LATE_S)
        for _ in outcore.stream_generate(model, TokensOnly(), PROMPT, 8):
            if session.streaming.pass_s is not None and session.streaming.pass_tokens == 1:
                found.append(session.streaming.pass_s)
    return found


LATE_S = 0.2  # more than a pass takes on a busy machine


def _did(session: Any) -> dict[str, Any]:
    return {
        "streams": session.plan.streams,
        "layers": len(session.size.layers),
        "bytes_read": session.metrics.bytes_read,
        "drafted": session.metrics.drafted,
        "accepted": session.metrics.accepted,
        "sweeps": session.metrics.sweeps,
        "misses": session.metrics.misses,
        "weights": session.plan.weight_bytes,
        "pools": len(session.plan.pools),
        "cache": session.plan.cache_bytes,
    }


def least_memory(link: Link, folder: Path, options: dict[str, Any]) -> int:
    """Bytes of memory that this rank needs at least, with layers in turn."""
    outcore_cluster.sharing.share_layers = alternate  # type: ignore[attr-defined, unused-ignore]
    given: dict[str, Any] = {"memory": "8GB", "context": 160, "prompt": 64} | options
    return prepare(folder, LoadOptions(**given, ranks=RankGroup(link)), least=True).planning.smallest


def with_options(link: Link, folder: Path, tokens: int, options: dict[str, Any]) -> Any:
    """``text`` by a dictionary of options; why a model is refused, as a string."""
    try:
        return text(link, folder, tokens, **options)
    except UsageError as e:
        return str(e)


def each_with_options(link: Link, folder: Path, tokens: int, options: Sequence[dict[str, Any]]) -> Any:
    """``with_options`` by a dictionary for each rank."""
    return with_options(link, folder, tokens, options[link.rank])


def batch_with_options(
    link: Link, folder: Path, prompts: Sequence[Sequence[int]], tokens: Sequence[int], options: dict[str, Any]
) -> Any:
    """``batch`` by a dictionary of options."""
    return batch(link, folder, prompts, tokens, **options)


def perplexity(link: Link | None, folder: Path, options: dict[str, Any]) -> tuple[float, float]:
    """mlx-lm's figure and its error, of texts in batches without caches."""
    from mlx_lm.perplexity import eval_ppl  # here: it brings training's modules along, a tenth of a rank's start

    model = loaded(link, folder, batch=3, context=20, prompt=20, **options)
    with model.outcore:
        found: tuple[float, float] = eval_ppl(model, mx.array([PROMPT, PROMPT[::-1]]).reshape(4, 20), batch_size=3)
    return found


def slots_held(link: Link, folder: Path) -> tuple[int, int]:
    """How many slots this rank holds, at most, while it waits for others, of a token and of a prompt in chunks."""
    model = loaded(link, folder, False, resident=0)
    with model.outcore as session:
        engine, most = session.streaming, [0, 0]
        wait = Incoming.wait

        def watched(incoming: Incoming) -> None:
            if not incoming.ready:
                most[at] = max(most[at], len(engine.ring.held))
            wait(incoming)

        def late() -> None:
            time.sleep(0.05)  # so that the others do wait

        session.transport.before_send = late
        Incoming.wait = watched  # type: ignore[method-assign, assignment]
        try:
            cache = make_prompt_cache(model)
            for at, chunks in enumerate(([[1]], [[2, 3], [4, 5]])):
                mx.eval(
                    engine.run_passes([functools.partial(model, mx.array([c]), cache=cache) for c in chunks])
                    if at
                    else model(mx.array(chunks), cache=cache)
                )
        finally:
            Incoming.wait = wait  # type: ignore[method-assign]
    return most[0], most[1]


def of_folders(link: Link, folders: Sequence[Path], tokens: int, options: dict[str, Any]) -> Any:
    """``text`` of a model of which each rank has a folder of its own."""
    return with_options(link, folders[link.rank], tokens, options)


def _sampler(seed: int | None) -> Any:
    """Greedy; drawn; or, of a negative seed, one that raises for the token of that number, from 1."""
    if seed is None or seed >= 0:
        return None if seed is None else own_sampler(0.9, seed=seed)
    left = -seed

    def broken(logprobs: mx.array) -> mx.array:
        nonlocal left
        left -= 1
        if not left:
            raise ValueError("a sampler of a request")
        return mx.argmax(logprobs, axis=-1)

    return broken


def _room_for(most: int) -> None:
    """Have this rank say that it has room for so many sequences."""
    fit = SequenceRoom._fit_here

    def fit_here(self: SequenceRoom, lengths: Sequence[int], joining: Sequence[int], begun: Sequence[int] = ()) -> int:
        if len(lengths) > most:
            raise BudgetError("no room here")
        return fit(self, lengths, joining, begun)

    SequenceRoom._fit_here = fit_here  # type: ignore[method-assign]


def sequences(
    link: Link | None, folder: Path, joining: Mapping[int, Sequence[tuple[int, list[int], int, int | None]]],
    leaving: Mapping[int, Sequence[int]], room: int | None = None, alone: int | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Sequences that come and go as the first rank says, and what this rank did.

    Args:
        joining: number, prompt, tokens and seed (``_sampler``) of those that join before a step; ``leaving``: who is
            not wanted any more after one.
        room: sequences that the last rank has room for at most. alone: the one rank that streams its layers.

    How much is drafted does not depend on how long things take.
    """
    fit, control = SequenceRoom._fit_here, DraftLengthPolicy
    vars(text_drafts)["DraftLengthPolicy"] = functools.partial(control, fixed=True)
    if link is not None and room is not None and link.rank == link.size - 1:
        _room_for(room)
    if link is not None and link.rank == alone:
        options |= {"resident": 0}
    model = loaded(link, folder, **options)
    try:
        with model.outcore as session:
            own = Scheduler(model, prefill_step=16)
            if link is not None and link.rank:
                follow(model, own)
                return {"streams": session.plan.streams, "running": own.running}
            engine = own if link is None else RankLeader(own, RankAgreement(link))
            written = _written(engine, own, joining, leaving)
            by = session.drafting.name if session.drafting is not None else None
            return written | {"streams": session.plan.streams, "drafted": session.metrics.drafted, "by": by}
    finally:
        SequenceRoom._fit_here = fit  # type: ignore[method-assign]
        vars(text_drafts)["DraftLengthPolicy"] = control


def _written(
    engine: Scheduler | RankLeader, own: Scheduler, joining: Mapping[int, Any], leaving: Mapping[int, Sequence[int]]
) -> dict[str, Any]:
    tokens: dict[int, list[int]] = {}
    limits: dict[int, int] = {}
    failed: dict[int, str] = {}
    full: list[int] = []
    step = most = 0
    while step <= max(joining) or own.running or own.waiting:
        for uid, prompt, limit, seed in joining.get(step, ()):
            engine.add(Request(uid, prompt, limit, _sampler(seed)))
            limits[uid] = limit
        if isinstance(engine, RankLeader) and not own.running and not own.waiting:
            engine.rest()
        found = engine.step()
        most = max(most, own.running)
        for token in found.tokens:
            tokens.setdefault(token.uid, []).append(token.token)
        failed |= {uid: str(error) for uid, error in found.failed}
        full += found.full
        engine.remove([uid for uid, got in tokens.items() if len(got) >= limits[uid]])
        engine.remove(leaving.get(step, ()))
        step += 1
    engine.close()
    return {"tokens": tokens, "failed": failed, "full": full, "most": most}


def smallest(link: Link, folder: Path, options: dict[str, Any]) -> int:
    """Bytes of the smallest budget that works on this rank."""
    model = loaded(link, folder, **options)
    with model.outcore as session:
        return int(session.plan.smallest_budget_bytes)


def sequences_with_options(link: Link, folder: Path, joining: Any, leaving: Any, options: dict[str, Any]) -> Any:
    """``sequences`` by a dictionary of options."""
    return sequences(link, folder, joining, leaving, **options)


def choosing_by_numbers(link: Link | None, folder: Path, options: dict[str, Any]) -> list[list[tuple[int, str]]]:
    """Texts whose processor looks at all tokens so far, whose processor looks at logits, and whose sampler looks at
    log-probabilities: Python, that has MLX compute what it is given."""
    model = loaded(link, folder, **options)

    def by_text(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + 3.0 * (mx.arange(logits.shape[-1]) % 7 == sum(tokens.tolist()) % 7)  # type: ignore[arg-type]

    def by_logits(_: mx.array, logits: mx.array) -> mx.array:
        return logits - 2.0 * (mx.arange(logits.shape[-1]) == cast(int, mx.argmax(logits).item()))

    def second(logprobs: mx.array) -> mx.array:
        return mx.array(np.array(logprobs).argsort(-1)[:, -2])

    ways: list[dict[str, Any]] = [
        {"logits_processors": [by_text]}, {"logits_processors": [by_logits]}, {"sampler": second}
    ]  # fmt: skip
    with model.outcore:
        return [
            [
                (r.token, digest(r.logprobs))
                for r in outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=8, prefill_step_size=16, **way)
            ]
            for way in ways
        ]


def told_apart(
    link: Link, folder: Path, texts: Sequence[tuple[Sequence[Sequence[int]], Sequence[int], Sequence[int] | None]],
    options: dict[str, Any],
) -> list[Any]:  # fmt: skip
    """Texts one after the other: tokens of each, or why there are none.

    Args:
        texts: of each text the prompt and the most tokens that each rank is told, and tokens that each has room for;
            None: for any number.
    """
    model = loaded(link, folder, **options)
    found: list[Any] = []
    make_room = one_text.make_room
    with model.outcore:
        for prompts, most, room in texts:

            def made(session: Any, tokens: int, *more: Any, room: Any = room, **how: Any) -> int:
                if room is not None and tokens > room[link.rank]:
                    raise BudgetError(f"no room for {tokens}")
                return make_room(session, tokens, *more, **how)

            with patch("outcore.decode.prefix_cache.make_room", made):
                try:
                    text = outcore.stream_generate(model, TokensOnly(), prompts[link.rank], most[link.rank])
                    found.append([r.token for r in itertools.islice(text, 9)])
                    text.close()  # type: ignore[attr-defined]
                except OutcoreError as e:
                    found.append(f"{type(e).__name__}: {e}")
    return found
