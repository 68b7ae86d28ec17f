"""``outcore doctor``: whether what Outcore relies on holds on this machine, within 20 seconds.

Each check is a function of its own that finds one thing and says what to do about it; one that itself fails is a
finding too.
"""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoint.packed_store import open_model
from ..checkpoint.random_checkpoint import save_random_checkpoint
from ..disk.cold_ranges import scratch_file
from ..disk.disk_probe import REWRITES, unseen_rewrites
from ..errors import OutcoreError, StoreError
from ..loading.loader import load_model
from ..loading.preparation import prepare
from ..machine.cache_folder import cache_dir, make_cache
from ..machine.device import device_facts
from ..machine.hardware import cpu_name, gpu_name
from ..machine.kernels import keep_kernels
from ..machine.memory import default_budget, memory_limits
from ..machine.pressure import read_pressure
from ..plan.planner import resident_budget
from ..sizes import format_size
from .disk_checks import direct, offsets, overlap, rates
from .patient import REPORT, Check, Finding, Patient

SCRATCH_BYTES = 512 << 20
"""Of the file that is read where no model's is; written in a second or two."""


def examine(
    model: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    facts: dict[str, Any] | None = None,
) -> list[Finding]:
    """All findings, in the order of ``CHECKS``.

    Args:
        model: a folder whose files and plan are looked at, too.
        facts: gets numbers for a program, by name.
    """
    findings = []
    with _patient(model) as patient:
        patient.facts = {} if facts is None else facts
        for n, (name, check) in enumerate(CHECKS.items()):
            progress(name, n, len(CHECKS))
            try:
                findings.append(check(patient))
            except Exception as e:  # whatever a broken machine raises: the other checks are of use all the same
                said = " ".join(str(e).split()) or type(e).__name__
                known = isinstance(e, OutcoreError)
                findings.append(Finding(name, False, said if known else f"{type(e).__name__}: {said}", REPORT))
    return findings


SMALL: dict[str, Any] = {"memory": "400MB", "context": 8, "prompt": 4, "draft": "none"}
"""How the small model is loaded."""


@contextlib.contextmanager
def _small_model() -> Iterator[Path]:
    """A model of random weights, in a folder that is there for as long as the block runs.

    Raises:
        StoreError: it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outcore-doctor-")))
            save_random_checkpoint(folder)
        except OSError as e:
            raise StoreError(
                f"a small model to look at cannot be written ({e.strerror or e}): set TMPDIR to a folder that can be "
                "written to and has 20 MB free"
            ) from e
        yield folder


@contextlib.contextmanager
def _patient(model: Path | None) -> Iterator[Patient]:
    if model is not None:
        files = open_model(model).checkpoint.files
        yield Patient(max(files, key=lambda f: f.stat().st_size), model)
        return
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(scratch_file(make_cache(), nbytes=SCRATCH_BYTES))
        except (OutcoreError, OSError):
            # The disk of temporary files, then.
            folder = stack.enter_context(_small_model())
            path = next(iter(sorted(folder.glob("*.safetensors"))))
            yield Patient(path)
            return
        yield Patient(path, disk=cache_dir())


def machine(_: Patient) -> Finding:
    """What it is, and which MLX computes on what."""
    device = gpu_name() or "the CPU"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding("machine", True, f"{cpu_name()}, {system}; MLX {version('mlx')} on {device}")


def memory(patient: Patient) -> Finding:
    """What may be used, by each limit."""
    limits = memory_limits()
    patient.facts["default_budget_bytes"] = budget = default_budget()
    text = "; ".join(f"{x.source}: {format_size(x.available)} of {format_size(x.total)}" for x in limits)
    return Finding("memory", True, f"{text}; without --memory {format_size(budget)} are used")


def slots(_: Patient) -> Finding:
    """A slot that is written in place is what the device sees."""
    unseen = unseen_rewrites()
    if unseen:
        advice = f"nothing can be streamed on this device, and answers would be wrong: {REPORT}"
        return Finding("slots", False, f"{unseen} of {REWRITES} rewrites were not seen by the device", advice)
    return Finding("slots", True, f"{REWRITES} of {REWRITES} rewrites were seen by the device")


def pressure(_: Patient) -> Finding:
    """What tells that memory gets short."""
    return Finding("pressure", True, f"this system tells: {', '.join(read_pressure().told())}")


def limits(patient: Patient) -> Finding:
    """The device's limits, against the plan of the model."""
    facts = device_facts()
    told = [f"largest slot {format_size(facts.slot)}"]
    told += [f"largest buffer {format_size(facts.buffer)}"] if facts.buffer is not None else []
    told += [f"recommended working set {format_size(facts.working_set)}"] if facts.working_set is not None else []
    told += [f"wired limit {format_size(facts.wired_limit)}"] if facts.wired_limit is not None else []
    if patient.model is None:
        return Finding("limits", True, ", ".join(told))
    prepared = prepare(patient.model, least=True)
    plan, whole = prepared.plan, resident_budget(prepared.profile.size)
    told.append(
        f"this model with {prepared.profile.size.context} tokens: smallest budget "
        f"{format_size(plan.smallest_budget_bytes, round_up=True)}, all resident from "
        f"{format_size(whole, round_up=True)}, without --memory {format_size(plan.peak_bytes)} at most"
        + (f", slots of {format_size(plan.slot_bytes)}" if plan.streams else "")
    )
    if facts.working_set is not None and plan.peak_bytes > facts.working_set:
        advice = f"give --memory {format_size(facts.working_set)} or less: more cannot stay wired, and would crawl"
        return Finding("limits", False, ", ".join(told), advice)
    if prepared.refused is not None:
        return Finding("limits", False, prepared.refused, "free memory, or give a smaller context")
    return Finding("limits", True, ", ".join(told))


def answers(_: Patient) -> Finding:
    """A small model gives the same logits, streamed and resident."""
    with _small_model() as folder:
        logits = []
        for resident in (0, None):
            model, _config = load_model(folder, resident=resident, **SMALL)
            with model.outcore as session:
                found = model(mx.array([[5, 7, 11, 13]]))
                again = model(mx.array([[5, 7, 11, 13]]))
                mx.eval(found, again)
                logits += [np.array(found.astype(mx.float32)), np.array(again.astype(mx.float32))]
                streamed = session.streaming is not None
            if resident == 0 and not streamed:
                return Finding("answers", False, "the model was not streamed", REPORT)
    differs = sum(not np.array_equal(logits[-1], other) for other in logits[:-1])
    if differs or not np.isfinite(logits[-1]).all():
        return Finding("answers", False, "streamed logits are not the resident ones", f"do not use it; {REPORT}")
    told = f"model of random weights: {logits[0].size} logits equal, bit for bit, streamed and resident"
    return Finding("answers", True, told)


def kernels(_: Patient) -> Finding:
    """Where compiled kernels are kept."""
    if (folder := keep_kernels()) is None or not folder.is_dir():
        return Finding("kernels", True, "compiled by MLX as they are needed, in seconds")
    nbytes = sum(file.stat().st_size for file in folder.rglob("*.*"))
    return Finding("kernels", True, f"compiled once and kept, {format_size(nbytes)} in {folder}; removing it is safe")


CHECKS: dict[str, Check] = {
    "machine": machine,
    "memory": memory,
    "slots": slots,
    "offsets": offsets,
    "direct reads": direct,
    "disk": rates,
    "pressure": pressure,
    "limits": limits,
    "overlap": overlap,
    "answers": answers,
    "kernels": kernels,
}
