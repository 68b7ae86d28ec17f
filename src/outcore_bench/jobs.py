"""What ``outcore bench`` was asked for, and the rows that come of it: settings in, jobs out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outcore.errors import UsageError
from outcore.machine.device import COMPUTE_DTYPES
from outcore.machine.memory import given_budget
from outcore.options import IO_MODES

from .modes import MODES, BenchJob
from .words import AUTO, CACHES

RESIDENT = ("0%", "50%", "100%")
"""Residencies measured where neither budgets nor residencies were asked for."""


@dataclass(frozen=True)
class BenchSettings:
    """The flags of ``outcore bench``.

    Attributes:
        memory: budgets, each a size or ``auto``.
        resident: numbers of layers, or shares such as ``25%``.
        tokens: decoded and timed in each repeat, for each sequence of a batch; the first token is not one of them.
        delay: seconds to wait before each repeat.
        prefill_step_size, quantize_activations, trust_remote_code: as in mlx-lm.
        limit: bytes of the control group that each row runs in.

    Raises:
        UsageError: a value that cannot be used.
    """

    modes: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    io: tuple[str, ...] = (AUTO,)
    cache: str = "cold"
    batch: tuple[int, ...] = (1,)
    tokens: int = 16
    prompt_tokens: int = 32
    repeats: int = 3
    warmup: int = 1
    delay: int = 0
    prefill_step_size: int | None = None
    quantize_activations: bool = False
    trust_remote_code: bool = False
    dtype: str | None = None
    cpu_streams: int | None = None
    slots: int | None = None
    threads: int | None = None
    limit: int | None = None
    timeline: bool = False

    @property
    def context(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.tokens + 1

    def __post_init__(self) -> None:
        for flag, values, known in (
            ("--modes", self.modes, tuple(MODES)),
            ("--io", self.io, IO_MODES),
            ("--cache", (self.cache,), CACHES),
            ("--dtype", () if self.dtype is None else (self.dtype,), tuple(COMPUTE_DTYPES)),
        ):
            for value in values:
                if value not in known:
                    raise UsageError(f"{flag} {value}: choose from {', '.join(known)}")
        for flag, number, least in (
            ("--tokens", self.tokens, 1),
            ("--prompt-tokens", self.prompt_tokens, 1),
            ("--repeats", self.repeats, 1),
            ("--warmup", self.warmup, 0),
            ("--delay", self.delay, 0),
            ("--prefill-step-size", self.prefill_step_size, 1),
            ("--slots", self.slots, 2),
            ("--threads", self.threads, 1),
            ("--cpu-streams", self.cpu_streams, 1),
            *(("--batch", n, 1) for n in self.batch),
        ):
            if number is not None and number < least:
                raise UsageError(f"{flag} {number}: at least {least}")
        for size in self.memory:
            if size != AUTO:
                given_budget(size)


def make_jobs(
    settings: BenchSettings, folder: str, layers: int, *, fits: bool, vocabulary: int = 128, longest: int | None = None
) -> list[BenchJob]:
    """One job a row, in the order of the run: what is resident first, then the budgets as they were given.

    Args:
        layers: of the model. ``longest``: tokens that it was made for, if it says so.
        fits: everything fits into memory. Then a row with everything resident is added where none was asked for: its
            time per token is what the others' compute share and ceiling are made of.

    Raises:
        UsageError: more resident layers than the model has, or no number.
    """
    modes = settings.modes or tuple(MODES)
    jobs = []
    for batch in settings.batch:
        base = BenchJob(
            mode="",
            folder=folder,
            label="",
            tokens=settings.tokens,
            prompt_tokens=settings.prompt_tokens,
            repeats=settings.repeats,
            warmup=settings.warmup,
            delay=settings.delay,
            prefill_step_size=settings.prefill_step_size,
            quantize_activations=settings.quantize_activations,
            trust_remote_code=settings.trust_remote_code,
            batch=batch,
            cache=settings.cache,
            context=_context(settings, batch, longest),
            vocabulary=vocabulary,
            dtype=settings.dtype,
            cpu_streams=settings.cpu_streams,
        )
        for name in modes:
            job = replace(base, mode=name, limit=settings.limit)
            if MODES[name].budgeted:
                job = replace(job, slots=settings.slots, threads=settings.threads, timeline=settings.timeline)
                jobs += _budgets(job, settings, layers, fits)
            else:
                jobs.append(replace(job, label=name))
    several = len(settings.batch) > 1 or settings.batch[0] > 1
    jobs = [replace(j, label=f"{j.label}, batch {j.batch}") for j in jobs] if several else jobs
    # What everything else is compared with first; the sort keeps the order within each kind.
    return sorted(jobs, key=lambda j: (MODES[j.mode].streams, j.resident != layers))


def _budgets(job: BenchJob, settings: BenchSettings, layers: int, fits: bool) -> list[BenchJob]:
    memory, resident = settings.memory, settings.resident
    if not memory and not resident:
        memory, resident = ((AUTO,), ()) if settings.limit else ((), RESIDENT)
    jobs = []
    whole = False
    for io in settings.io:
        how = f", {io}" if len(settings.io) > 1 else ""
        for size in memory:
            label = f"{job.mode}, {size if size != AUTO else 'budget of its own choice'}{how}"
            jobs.append(replace(job, io=io, memory=size, label=label))
        for text in resident:
            count, shown = _layers(text, layers)
            if count == layers:
                if whole:
                    continue  # nothing is read, so it is the same however it would be read
                whole = job.limit is None
            label = f"{job.mode}, all resident" if count == layers else f"{job.mode}, {shown} resident{how}"
            jobs.append(replace(job, io=io, resident=count, label=label))
    if fits and not whole and job.mode == "outcore":
        label = "outcore, all resident" + (", no limit" if job.limit else "")
        jobs.insert(0, replace(job, resident=layers, limit=None, label=label))
    return jobs


def _layers(text: str, layers: int) -> tuple[int, str]:
    """Number of layers, and how to show it."""
    number = text.removesuffix("%").strip()
    try:
        value = float(number) if text.endswith("%") else int(number)
    except ValueError:
        raise UsageError(f"--resident {text}: give numbers of layers or shares, such as 0,25%,50%") from None
    if text.endswith("%"):
        if not 0 <= value <= 100:
            raise UsageError(f"--resident {text}: a share is between 0% and 100%")
        return round(layers * value / 100), f"{number} %"
    if not 0 <= value <= layers:
        raise UsageError(f"--resident {text}: this model has {layers} layers")
    return int(value), f"{number} of {layers} layers"


def _context(settings: BenchSettings, batch: int, longest: int | None) -> int:
    """Tokens that a plan makes room for. Each sequence of a batch has a cache, which grows by 256 tokens at a time."""
    needed = settings.context
    if batch == 1:
        return needed
    return min(batch * -(-needed // 256) * 256, longest or 2**31)
