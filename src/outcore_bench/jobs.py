"""What ``outcore bench`` was asked for, and the rows that come of it: settings in, jobs out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outcore.checks import choice, whole
from outcore.decode.budget import given_budget
from outcore.errors import UsageError
from outcore.options import DTYPES, IO_MODES

from .words import AUTO, OUTCORE, WAYS

RESIDENT = ("0%", "50%", "100%")
"""Residencies measured where neither budgets nor residencies were asked for."""
_LEAST = {"tokens": 1, "prompt_tokens": 1, "repeats": 1, "warmup": 0, "prefill_step_size": 1, "cpu_streams": 1}
_LEAST |= {"slots": 2, "threads": 1}


@dataclass(frozen=True)
class RunSettings:
    """How each row is measured.

    Attributes:
        tokens: decoded and timed in each repeat, for each sequence of a batch; the first token is not one of them.
        prefill_step_size, quantize_activations, trust_remote_code: as in mlx-lm. Others as in ``load_model``.

    Raises:
        UsageError: a value that cannot be used.
    """

    tokens: int = 16
    prompt_tokens: int = 32
    repeats: int = 3
    warmup: int = 1
    prefill_step_size: int | None = None
    quantize_activations: bool = False
    trust_remote_code: bool = False
    dtype: str | None = None
    cpu_streams: int | None = None
    slots: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            choice("--dtype", self.dtype, DTYPES)
        for name, least in _LEAST.items():
            if (number := getattr(self, name)) is not None:
                whole(f"--{name.replace('_', '-')}", number, least)

    @property
    def context(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.tokens + 1

    @property
    def model_config(self) -> dict[str, Any] | None:
        """As mlx-lm's ``load`` takes it."""
        return {"quantize_activations": True} if self.quantize_activations else None


@dataclass(frozen=True)
class BenchSettings:
    """The flags of ``outcore bench``.

    Attributes:
        memory: budgets, each a size or ``auto``.
        resident: numbers of layers, or shares such as ``25%``.

    Raises:
        UsageError: a value that cannot be used.
    """

    modes: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    io: tuple[str, ...] = (AUTO,)
    batch: tuple[int, ...] = (1,)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        for mode in self.modes:
            choice("--modes", mode, WAYS)
        for io in self.io:
            choice("--io", io, IO_MODES)
        for n in self.batch:
            whole("--batch", n)
        for size in self.memory:
            if size != AUTO:
                given_budget(size)

    def record(self) -> dict[str, Any]:
        """By the names of flags."""
        raw = asdict(self)
        return raw | raw.pop("run")


@dataclass(frozen=True)
class BenchJob:
    """One row to be measured, as it goes to a process of its own.

    Attributes:
        folder: of the model. ``vocabulary``: its tokens; prompts are made of them.
        context: tokens that are planned for. ``memory``, ``resident``, ``io``: as in ``load_model``.
    """

    mode: str
    folder: str
    label: str
    run: RunSettings
    context: int
    vocabulary: int
    batch: int = 1
    memory: str | None = None
    resident: int | None = None
    io: str = AUTO

    @staticmethod
    def of(raw: dict[str, Any]) -> BenchJob:
        """From its JSON object."""
        return BenchJob(**(raw | {"run": RunSettings(**raw["run"])}))


def listed(text: str) -> tuple[str, ...]:
    """What stands between commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas, each once.

    Raises:
        UsageError: what is there is none.
    """
    try:
        return tuple(int(n) for n in listed(text))
    except ValueError:
        raise UsageError(f"{flag} {text}: give whole numbers, separated by commas") from None


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
    jobs = []
    for batch in settings.batch:
        context = _context(settings.run.context, batch, longest)
        for name in settings.modes or WAYS:
            # Only what runs within budgets keeps layers.
            run = settings.run if name == OUTCORE else replace(settings.run, slots=None, threads=None)
            job = BenchJob(name, folder, name, run, context, vocabulary, batch)
            jobs += _budgets(job, settings, layers, fits) if name == OUTCORE else [job]
    if settings.batch != (1,):
        jobs = [replace(j, label=f"{j.label}, batch {j.batch}") for j in jobs]
    # What everything else is compared with first; the sort keeps the order within each kind.
    return sorted(jobs, key=lambda j: (j.mode in (OUTCORE, "plain"), j.resident != layers))


def _budgets(job: BenchJob, settings: BenchSettings, layers: int, fits: bool) -> list[BenchJob]:
    resident = settings.resident or (RESIDENT if not settings.memory else ())
    whole = replace(job, resident=layers, label=f"{job.mode}, all resident")
    jobs = [whole] if fits else []
    for io in settings.io:
        how = f", {io}" if len(settings.io) > 1 else ""
        for size in settings.memory:
            label = f"{job.mode}, {size if size != AUTO else 'budget of its own choice'}{how}"
            jobs.append(replace(job, io=io, memory=size, label=label))
        for text in resident:
            count, shown = _layers(text, layers)
            if count < layers:
                jobs.append(replace(job, io=io, resident=count, label=f"{job.mode}, {shown} resident{how}"))
            elif whole not in jobs:  # nothing is read, so it is the same however it would be read
                jobs.append(whole)
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


def _context(needed: int, batch: int, longest: int | None) -> int:
    """Tokens that a plan makes room for. Each sequence of a batch has a cache, which grows by 256 tokens at a time."""
    return needed if batch == 1 else min(batch * -(-needed // 256) * 256, longest or 2**31)
