"""One case from beginning to end: the answers, mlx-lm's, and how they compare."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

import outcore
import outcore.decode.prefix_cache
import outcore.serve.prompting
from combined_cases import Case, named, parsed
from combined_faces import BLOCK, FACES, Clients, Face, Place, disturbing, exact, on_cpu
from combined_faults import Fault
from combined_models import Shelf
from combined_reference import SEED, Reference, Text, unlikely
from outcore.decode import one_text, text_drafts
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore_cluster.group import RankGroup
from outcore_prefix import prefix_cache as prompts

EQUAL, DIFFERENT, REFUSED, FAILED = "equal", "different", "refused", "failed"
ROUNDED, NO_REFERENCE = "rounded", "no reference"


@dataclass
class Result:
    """How a case ended: ``equal`` and ``different`` from mlx-lm, ``refused`` by name, or ``failed``, which is any other
    error, or a feature that was not there. On a GPU also ``rounded``, which differs, and is equal where each drafted
    token has a pass of its own (passes of several tokens round differently, and a random router makes another expert of
    that); and ``no reference``: mlx-lm alone ends in the same error.

    Attributes:
        why: what differs, or was said.
        drafted: tokens. ``found``: of prompts, in the prefix cache. ``happened``: the disturbance.
        idle: parameters whose feature was not there; pairs of theirs do not count.
        seconds: of a processor, in this process.
    """

    case: str
    end: str = EQUAL
    why: str = ""
    drafted: int = 0
    found: int = 0
    happened: bool = False
    idle: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run(case: Case, shelf: Shelf, ranks: Any = None, *, one_by_one: bool = False) -> Result:
    """The case.

    Args:
        ranks: two processes that wait for work (``rank_processes``).
        one_by_one: each drafted token has a pass of its own, as on the CPU.
    """
    result, began = Result(str(case)), time.process_time()
    try:
        with scales_on_cpu(), always_drafting(one_by_one), small_blocks():
            _run(case, shelf, ranks, result, one_by_one)
    except outcore.OutcoreError as e:
        result.end, result.why = REFUSED, f"{type(e).__name__}: {e}"
        constraint = named(result.why, case)
        if constraint is None:
            result.end = FAILED
    except Exception as e:
        told = traceback.format_exc().strip().splitlines()
        result.end, result.why = FAILED, f"{type(e).__name__}: {e} | {' < '.join(told[-7:-1:2])}"
        if not on_cpu() and mlx_lm_ends_in(e, Place(case, shelf)):
            result.end = NO_REFERENCE
    if result.end == DIFFERENT and not on_cpu() and case.draft != "none" and not one_by_one:
        again = run(case, shelf, ranks, one_by_one=True)
        if again.end == EQUAL:
            result.end, result.idle = ROUNDED, again.idle
    result.seconds = round(time.process_time() - began, 2)
    return result


def mlx_lm_ends_in(error: Exception, place: Place) -> bool:
    """Whether mlx-lm itself ends a case's first text in the same error: a kernel that MLX has not."""
    try:
        Reference(place.folder, place.adapter, place.cast).answers(place.texts()[:1], place.how)
    except Exception as e:
        return type(e) is type(error) and str(e) == str(error)
    return False


def _run(case: Case, shelf: Shelf, ranks: Any, result: Result, one_by_one: bool) -> None:
    place = Place(case, shelf)
    place.options()  # makes what is to be read, and refuses what is refused first
    if case.face == "ranks":
        if ranks is None:
            raise RuntimeError("two ranks are needed")
        said = ranks.run(on_rank, str(case), shelf.root, on_cpu(), one_by_one)
        refusals = [r for r in said if isinstance(r, str)]
        if refusals:
            raise outcore.OutcoreError(refusals[0])
        (answers, result.drafted, happened), (others, _, too) = said
        if answers != others:
            raise AssertionError(f"ranks say {answers} and {others}")
        result.happened = happened or too
    else:
        answers = scenario(place, result)
    result.why = compare(place, answers) or ""
    result.end = DIFFERENT if result.why else EQUAL
    if result.end == EQUAL:
        absent = idle(case, result)
        result.idle = sorted(absent)
        if set(absent) - may_be_idle(case):
            result.end, result.why = FAILED, "; ".join(absent.values())


def idle(case: Case, result: Result) -> dict[str, str]:
    """Features of the case that were not there while it ran, by parameter, and what was missed."""
    found: dict[str, str] = {}
    if case.draft != "none" and not result.drafted:
        found["draft"] = "nothing was drafted"
    if case.context in ("prefix_warm", "prefix_restart") and not result.found:
        found["context"] = "nothing was found in the prefix cache"
    if case.disturbance != "none" and not result.happened:
        found["disturbance"] = "nothing was disturbed"
    return found


def may_be_idle(case: Case) -> set[str]:
    """Parameters whose feature need not be there: a text may not repeat itself; the smallest budget may have no room
    for tokens that would be drafted, or for states that the prefix cache would keep; and where memory runs short, a
    draft is given up first, or nothing can be."""
    found = set()
    if case.draft == "ngram" or case.memory == "smallest":
        found.add("draft")
    if case.memory == "smallest":
        found.add("context")
    return found | {"draft", "disturbance"} if case.disturbance == "pressure" else found


def on_rank(link: Any, line: str, root: Path, cpu: bool, one_by_one: bool) -> Any:
    """A case on one of two ranks; a refusal is what it says."""
    place, result = Place(parsed(line), Shelf(root)), Result(line)
    if cpu:
        mx.set_default_device(mx.cpu)
    try:
        with scales_on_cpu(), always_drafting(one_by_one), small_blocks():
            answers = scenario(place, result, ranks=RankGroup(link))
    except outcore.OutcoreError as e:
        return f"{type(e).__name__}: {e}"
    return answers, result.drafted, result.happened


def scenario(place: Place, result: Result, **more: Any) -> list[list[int]]:
    """Load, ask once or more, be disturbed, and ask what counts."""
    case, texts = place.case, place.texts()
    fault = None if case.disturbance == "none" else Fault(case.disturbance)
    again = case.context in ("prefix_warm", "prefix_restart")

    def last(face: Any) -> list[list[int]]:
        seeded = case.face != "patch" or fault is not None or again
        if fault is not None and case.face != "session":
            _disturb(face, texts, fault, case)
        if seeded:
            mx.random.seed(SEED)
        answers: list[list[int]] = face.ask(texts, fault if case.face == "session" else None)
        result.happened = fault is not None and fault.happened
        return answers

    def one_by_one(face: Any) -> Any:
        for text in texts:  # a prompt that joins others is found in the prefix cache, and not kept there
            face.ask([text])
        return face

    if case.face == "server":
        clients = Clients(place)
        try:
            if case.context == "prefix_restart":
                clients.serve(one_by_one)
                return clients.serve(last)
            return clients.serve(lambda face: last(one_by_one(face) if again else face))
        finally:
            result.drafted, result.found = clients.drafted, clients.found
    mx.random.seed(SEED)
    face = FACES.get(case.face, Face)(place, **more)
    try:
        face.open()
        if again:
            face.ask(texts)
        if case.context == "prefix_restart":
            face.close()
            face.open()
        return last(face)
    finally:
        face.close()
        result.drafted, result.found = face.drafted, face.found


def _disturb(face: Any, texts: Sequence[Text], fault: Fault, case: Case) -> None:
    """Ask, and be disturbed."""
    for seconds in (0.02, 0.01, 0.005, 0.002, 0.001):
        with contextlib.suppress(outcore.OutcoreError), disturbing(fault, seconds):
            face.ask(texts, fault)
        if fault.happened or fault.kind != "interrupt":
            return


ROUNDING = 0.05
"""Nats by which a token may be less likely on a GPU, where mlx-lm's own answers differ from run to run."""


def compare(place: Place, answers: Sequence[Sequence[int]]) -> str | None:
    """How answers differ from mlx-lm's; None: not at all."""
    case, how = place.case, place.how
    texts = place.texts()
    if case.face == "session":  # of one that was left there is a part
        texts = [replace(t, tokens=len(a)) for t, a in zip(texts, answers, strict=True)]
    for n, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        if len(answer) != text.tokens:
            return f"text {n}: {len(answer)} tokens instead of {text.tokens}"
    reference = Reference(place.folder, place.adapter, place.cast)
    if not exact(case):
        rows = reference.probabilities(texts, answers, how)
        return unlikely(
            [(t, p) for answer, row in zip(answers, rows, strict=True) for t, p in zip(answer, row, strict=True)],
            1e-3 if on_cpu() else ROUNDING,
        )
    if case.face != "patch" or case.disturbance != "none" or case.context in ("prefix_warm", "prefix_restart"):
        mx.random.seed(SEED)
    expected = reference.answers(texts, how)
    for n, (theirs, ours) in enumerate(zip(expected, answers, strict=True)):
        if theirs != ours:
            at = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
            gap = ""
            if case.sampling == "greedy":
                row = reference.probabilities(texts, answers, how)[n][at]
                less = float(row[theirs[at]] - row[ours[at]])
                if not on_cpu() and less < ROUNDING:
                    continue
                gap = f", {less:.2g} nats less likely"
            return f"text {n}: {list(ours)} instead of {theirs}, from {at} on{gap}"
    return None


@contextlib.contextmanager
def always_drafting(one_by_one: bool) -> Iterator[None]:
    """Drafts whether they are worth their time or not: tiny models' weights are read in no time.

    Args:
        one_by_one: drafted tokens have a pass each, whatever the device, also where experts are read one by one.
    """

    def control(most: int, *args: Any) -> DraftLengthPolicy:
        return DraftLengthPolicy(min(most, 3), *args, fixed=True)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(text_drafts, "DraftLengthPolicy", control))
        if one_by_one:
            stack.enter_context(patch.object(one_text, "on_cpu", lambda: True))
            stack.enter_context(patch.object(text_drafts.TextDrafts, "_fits_expert_cache", lambda *_: True))
        yield


@contextlib.contextmanager
def small_blocks(tokens: int = BLOCK) -> Iterator[None]:
    """Few tokens fill a block of the prefix cache, and tiny models' states are kept behind so few."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(("outcore.", "outcore_prefix.")) and "GRID" in vars(module):
                stack.enter_context(patch.object(module, "GRID", tokens))
        stack.enter_context(patch.object(prompts, "STATE_SHARE", 1e6))
        yield


@contextlib.contextmanager
def scales_on_cpu() -> Iterator[None]:
    """On the CPU MLX has no global scales of experts: a product is scaled afterwards there, for mlx-lm and Outcore
    alike. That is not what a GPU makes of them, but which expert's scale is taken is the same."""
    if not on_cpu():
        yield
        return
    real = mx.gather_qmm

    def gather_qmm(*args: Any, global_scale: mx.array | None = None, **kwargs: Any) -> mx.array:
        out = real(*args, **kwargs)
        if global_scale is None:
            return out
        scale = global_scale[kwargs["rhs_indices"]] / 2688.0
        return out * scale.reshape(*scale.shape, 1, 1).astype(out.dtype)

    with patch.object(mx, "gather_qmm", gather_qmm):
        yield
