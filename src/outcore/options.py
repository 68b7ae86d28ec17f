"""What a user asks for: how a model is to be held in memory, and the rule by which numbers and words are checked.

What is no count, or no known word, is refused by its name: an argument's in Python, a flag's on the command line.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

from .errors import BudgetError, OutcoreError, UsageError
from .sizes import MOST_BYTES, parse_size
from .text import refuse_unknown, shortened

COUNT = 2**31 - 1
"""The most that is counted to: MLX's shapes and indices are 32 bits."""

LEAST_TEMPERATURE = 1e-30
"""The least temperature but 0: log-probabilities divided by less leave float32."""


def whole(name: str, value: Any, least: int = 1, most: int = COUNT) -> int:
    """A whole number: an int, of NumPy too, or a float that is one; ``True`` is none.

    Args:
        name: the flag or argument, named in the error.

    Raises:
        UsageError: another kind of value, or out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{_shown(name, value)}: a whole number is needed") from None
    if not least <= number <= most:
        bounds = f"at least {least}" if number < least else f"at most {most}"
        raise UsageError(f"{_shown(name, value)}: {bounds}")
    return number


def real(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number.

    Raises:
        UsageError: another kind of value, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise UsageError(f"{_shown(name, value)}: a number is needed")
    if not least <= value <= most or value in (math.inf, -math.inf):
        if math.isfinite(least) and math.isfinite(most):
            raise UsageError(f"{_shown(name, value)}: from {least:g} to {most:g}")
        bounds = f"at least {least:g}" if value < least else "a finite number is needed"
        raise UsageError(f"{_shown(name, value)}: {bounds}")
    return float(value)


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """One of these words.

    Raises:
        UsageError: another one.
    """
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        raise UsageError(f"{_shown(name, value)}: choose one of {', '.join(words)}")
    return value


def not_endless(name: str, path: Path) -> Path:
    """A file to read whole, if it has an end: devices such as /dev/zero have none.

    Raises:
        UsageError: it is a device.
    """
    try:
        endless = path.is_char_device()
    except OSError:
        endless = False  # whoever opens it tells why it cannot be
    if endless:
        raise UsageError(f"{_shown(name, path)}: a device; give a file, or a pipe")
    return path


def _shown(name: str, value: Any) -> str:
    """As it was given: a flag with its value, or an argument."""
    return f"{name} {shortened(value)}" if name.startswith("-") else f"{name}={shortened(repr(value))}"


FEW_BYTES = 1_000_000
"""A number of bytes below which some other unit was meant."""

AUTO = "auto"
"""What is chosen for the user: memory, drafts, the way of reading."""

SHARE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")
"""Of what may be used now, as in ``50%``."""

PRIORITIES = {"speed": 512, "balanced": 1024, "context": None}
"""Tokens of context that memory is reserved for at first; None: as many as are expected. More is made room for as it
comes, by streaming layers that were resident."""

PUBLISHED_PRIORITIES = {"maxTPS": "speed", "maxContext": "context"}
"""Other names for them, from the literature."""

PROFILES = ("safety", "balanced", "performance")
PLACEMENTS = ("even", "interleaved", "first", "last")
KV_DISK = (AUTO, "on", "off")
KV_EVICTIONS = ("window", "halve", "none")
LEAST_HALVED = 16
"""Tokens of a text of which a half can go."""
IO_MODES = ("auto", "direct", "cached")
DTYPES = ("float32", "bfloat16", "float16")

FLAGS = {"prompt": "--prompt-tokens"}
"""Flags whose names are not their arguments'."""


class SequenceCount(Protocol):
    """As many sequences as answer a number of requests soonest (``plan.workload``)."""

    @property
    def most(self) -> int: ...


class MemoryArguments(TypedDict, total=False):
    """The fields of ``LoadOptions`` that are no arguments of mlx-lm's ``load``, as keywords of ours."""

    memory: int | float | str | None
    resident: int | None
    slots: int | None
    priority: str
    profile: str
    placement: str
    io: str
    context: int | None
    prompt: int | None
    prefill_step_size: int | None
    dtype: str | None
    cpu_streams: int | None
    head_resident: bool | None
    experts: int | None
    sequences: int | SequenceCount
    batch: int | None
    threads: int | None
    govern: bool
    resumable: bool
    prefix_cache: int | str
    kv_disk: str
    kv_dir: str | Path | None
    mirror: str | Path | Sequence[str | Path] | None
    draft: str


class LoadArguments(MemoryArguments, total=False):
    """All of them."""

    model_config: dict[str, Any] | None
    trust_remote_code: bool
    adapter_path: str | None
    lazy: bool


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is opened and held in memory. Checked when it is made, before a model is opened.

    Attributes:
        memory: bytes, a size such as ``"4GB"``, or ``"50%"`` of what may be used now, that weights, slots, caches,
            activations and MLX's own cache may use together. None or ``"auto"``: from what is free.
        resident: keep exactly so many layers in memory; None: as many as fit.
        slots: slots of the ring, at least 2; None: 3 where they fit.
        priority: ``speed``, ``balanced`` or ``context``: reserve memory for 512, 1024, or all of the tokens of
            ``context``; room for more is made while running.
        profile: ``safety``, ``balanced`` or ``performance``: how much of what is free is used without ``memory``.
        placement: where resident layers lie: ``even``, ``interleaved``, ``first`` or ``last``.
        io: ``auto``, ``direct`` (around the page cache) or ``cached``.
        context: tokens of prompt and answer that memory is reserved for; None: 2048, or the model's own maximum.
        prompt: tokens of the longest prompt, if known: less memory is set aside for computing it.
        prefill_step_size: prompt tokens computed at a time; None: 2048 as in mlx-lm, or less where memory is short.
        dtype: ``float32``, ``bfloat16`` or ``float16`` to compute in; None: as the checkpoint says.
        cpu_streams: streams that linear layers are split over on the CPU device; None: one per core.
        head_resident: whether the head stays in memory; None: it does, unless layers would fit in parts alone beside
            it, and it is faster to stream it too.
        experts: routed experts of each layer that have a place in memory, where they are read one by one; 0: layers are
            streamed whole; None: what is fastest.
        sequences: that share each sweep (``batch_generate``), each with that context, without drafts; a ``Workload``:
            as many as answer it soonest.
        batch: sequences of ``context`` tokens that are evaluated in one call, without caches and with the logits of
            every token (mlx-lm's ``eval_ppl``); None: memory for such calls is not set aside.
        threads: reads in flight at once; None: 4, or 8 where there are as many cores.
        govern: watch memory while the model runs, and stream resident layers where it gets short.
        resumable: one prompt cache will serve several texts: set memory aside for taking it back where a sweep fails.
            Otherwise that is found when such a cache is used, in place of resident layers.
        prefix_cache: ``on``: keep what was computed of prompts on disk, for who begins in the same way, after a restart
            too; a size (``"5GB"``, or bytes): let it take so much; ``off``. Prompts are computed 512 tokens at a time.
        kv_disk: whether keys and values of streamed layers may lie on disk: ``auto``: where a context does not fit
            otherwise; ``on``, ``off``. Each token reads them all. Of one text at a time, and not with a draft of the
            model itself, whose every guess would read them, too.
        kv_dir: the folder for them, made if it alone is missing; None: the cache folder. What lies there has no name
            and goes with the process.
        mirror: a folder on another disk with a copy of the model's files, or several: what is streamed is read from all
            of them at once, and from the others where one fails. The model's folder may also lie in it under its name.
        draft: what drafts tokens, so that a sweep over the weights makes several: ``none``, ``ngram`` (the text's own
            repetitions), ``self`` or ``self:BITS`` (a low-bit copy of the model, in memory; of a quantized one the high
            bits of its codes, of which only the low ones are read then), ``mtp`` or ``mtp:FOLDER`` (a multi-token-
            prediction head, of the model's own folder or the original's), or a model with the same tokenizer, in
            memory; ``auto``: what is predicted to be fastest, where something is streamed.
        model_config, trust_remote_code, adapter_path: as in ``mlx_lm.load``.
        lazy: as in ``mlx_lm.load``: where nothing is streamed, weights are read by the model's first call. It refuses
            files that were written to since; whoever evaluates parameters before is not told.
        flags: the values came from a command line: errors name its flags.
        ranks: other machines that have layers of the model (``loading.preparation.Ranks``); None: it is all here.

    Raises:
        UsageError: a value is of another kind, or out of range.
    """

    memory: int | float | str | None = None
    resident: int | None = None
    slots: int | None = None
    priority: str = "context"
    profile: str = "balanced"
    placement: str = "even"
    io: str = AUTO
    context: int | None = None
    prompt: int | None = None
    prefill_step_size: int | None = None
    dtype: str | None = None
    cpu_streams: int | None = None
    head_resident: bool | None = None
    experts: int | None = None
    sequences: int | SequenceCount = 1
    batch: int | None = None
    threads: int | None = None
    govern: bool = True
    resumable: bool = False
    prefix_cache: int | str = "off"
    kv_disk: str = AUTO
    kv_dir: str | Path | None = None
    mirror: str | Path | Sequence[str | Path] | None = None
    draft: str = AUTO
    model_config: dict[str, Any] | None = None
    trust_remote_code: bool = False
    adapter_path: str | None = None
    lazy: bool = False
    flags: bool = field(default=False, repr=False, compare=False)
    ranks: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = {
            "resident": 0,
            "slots": 2,
            "context": 1,
            "prompt": 1,
            "prefill_step_size": 1,
            "cpu_streams": 1,
            "experts": 0,
        }
        for name, least in (counts | {"batch": 1, "threads": 1}).items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(self.name(name), value, least))
        if not hasattr(self.sequences, "most"):
            object.__setattr__(self, "sequences", whole(self.name("sequences"), self.sequences))
        if self.dtype is not None:
            choice(self.name("dtype"), self.dtype, DTYPES)
        choice(self.name("io"), self.io, IO_MODES)
        choice(self.name("kv_disk"), self.kv_disk, KV_DISK)
        if self.kv_dir is not None and not (isinstance(self.kv_dir, str | Path) and str(self.kv_dir).strip()):
            raise UsageError(f"{_shown(self.name('kv_dir'), self.kv_dir)}: a folder")
        self._check_mirrors()
        if self.kv_disk == "on" and self.sequences != 1:
            raise UsageError(f"{self.name('kv_disk')} on: only for one text at a time; leave it out")
        choice(self.name("profile"), self.profile, PROFILES)
        choice(self.name("placement"), self.placement, PLACEMENTS)
        reserved_tokens(self.priority, self.name("priority"))
        for name in ("govern", "resumable", "trust_remote_code", "lazy"):
            _truth(self.name(name), getattr(self, name))
        if self.experts and self.resident is not None:
            raise UsageError(
                f"{self.name('experts')} {self.experts} and {self.name('resident')} {self.resident}: give one or the "
                "other; where experts are read one by one, all other layers stay in memory"
            )
        if self.head_resident is not None:
            _truth(self.name("head_resident"), self.head_resident)
        if self.prefix_cache not in ("on", "off"):
            name = self.name("prefix_cache")
            if isinstance(self.prefix_cache, str) and not any(c.isdigit() for c in self.prefix_cache):
                raise UsageError(f"{_shown(name, self.prefix_cache)}: on, off or a size such as 5GB")
            size = self.prefix_cache
            object.__setattr__(
                self, "prefix_cache", parse_size(size, flag=name) if isinstance(size, str) else whole(name, size)
            )
        self._check_memory()

    def name(self, argument: str) -> str:
        """What the user calls an argument."""
        return FLAGS.get(argument, "--" + argument.replace("_", "-")) if self.flags else argument

    @property
    def asked(self) -> bool:
        """Whether a budget was asked for; else it is made of what is free."""
        return not (self.memory is None or (isinstance(self.memory, str) and self.memory.strip().lower() == AUTO))

    @property
    def reserved(self) -> int | None:
        """Tokens of context that memory is reserved for at first; None: all."""
        return reserved_tokens(self.priority)

    @property
    def most_sequences(self) -> int:
        """Sequences that share sweeps at most."""
        return self.sequences if isinstance(self.sequences, int) else self.sequences.most

    @property
    def mirrors(self) -> tuple[Path, ...]:
        """Folders with copies of the model."""
        return tuple(Path(m) for m in self.mirror) if isinstance(self.mirror, tuple) else ()

    def _check_mirrors(self) -> None:
        given: Any = self.mirror
        mirrors = () if given is None else (given,) if isinstance(given, str | Path) else given
        if not (isinstance(mirrors, Sequence) and all(isinstance(m, str | Path) and str(m).strip() for m in mirrors)):
            raise UsageError(f"{_shown(self.name('mirror'), given)}: a folder, or several")
        if len({str(Path(m)) for m in mirrors}) < len(mirrors):
            raise UsageError(f"{self.name('mirror')}: one folder is there twice")
        object.__setattr__(self, "mirror", tuple(mirrors) or None)

    def _check_memory(self) -> None:
        if not self.asked:
            return
        memory, name = self.memory, self.name("memory")
        if not isinstance(memory, str):
            object.__setattr__(self, "memory", whole(name, memory, most=MOST_BYTES))
            return
        share = SHARE.fullmatch(memory.strip()) if len(memory) < 40 else None
        if share is None:
            parse_size(memory, flag=name)
        elif not 0 < float(share[1]) <= 100:
            raise UsageError(f"{_shown(name, memory.strip())}: from 1% to 100% of what may be used now")


def chosen(options: LoadOptions | None, arguments: Mapping[str, Any]) -> LoadOptions:
    """Options as they were given, or of arguments.

    Raises:
        UsageError: both were given, or no options. TypeError: an argument that there is none of.
    """
    refuse_unknown(arguments, LoadOptions.__dataclass_fields__)
    if options is None:
        return LoadOptions(**arguments)
    if not isinstance(options, LoadOptions):
        raise UsageError(f"options={shortened(repr(options))}: give LoadOptions, or arguments by their names")
    if arguments:
        raise UsageError(
            f"options and {', '.join(arguments)}: give one or the other (dataclasses.replace changes them)"
        )
    return options


def _truth(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{_shown(name, value)}: True or False")


@contextmanager
def named_as_arguments(options: LoadOptions) -> Iterator[None]:
    """Errors inside name flags, as commands do; outside of commands they name the arguments."""
    try:
        yield
    except OutcoreError as e:
        if not options.flags:
            e.args = tuple(in_python(a) if isinstance(a, str) else a for a in e.args)
            if isinstance(e, BudgetError) and e.smallest is not None:
                e.args = (f"{e.args[0]}; fewer tokens need less (context, prompt)", *e.args[1:])
            if isinstance(e, BudgetError) and isinstance(memory := options.memory, int) and memory < FEW_BYTES:
                unit = "GB" if memory < 1000 else "MB"
                e.args = (f'{e.args[0]}; memory={memory} is {memory} bytes: write memory="{memory}{unit}"', *e.args[1:])
        raise


def in_python(text: str) -> str:
    """A text with arguments' names in place of flags'."""
    flags = {FLAGS.get(name, "--" + name.replace("_", "-")): name for name in LoadOptions.__dataclass_fields__}
    return re.sub(r"(?<![\w-])--[a-z][a-z-]*[a-z]", lambda m: flags.get(m[0], m[0]), text)


def reserved_tokens(priority: str, name: str = "--priority") -> int | None:
    """Tokens of context that a priority reserves memory for at first; None: all.

    Raises:
        UsageError: there is no such priority.
    """
    known = PUBLISHED_PRIORITIES.get(priority, priority) if isinstance(priority, str) else priority
    return PRIORITIES[choice(name, known, PRIORITIES)]
