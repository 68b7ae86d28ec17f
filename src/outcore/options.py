"""Options of loading a model, declared once for Python and for the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from .checks import choice, parse_size, refuse_unknown, shown_value, whole
from .errors import UsageError, called
from .sizes import MOST_BYTES
from .text import shortened

AUTO = "auto"
"""Value that leaves the choice to Outcore: of memory, drafts, and how files are read."""

SHARE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")
"""A share of the memory available now, such as ``50%``."""

PRIORITIES = {"speed": 512, "balanced": 1024, "context": None}
"""Tokens of context that memory is reserved for at first; None: the whole expected context. Longer contexts get their
memory as they grow, by streaming layers that were resident."""

IO_MODES = ("auto", "direct", "cached")
DTYPES = ("float32", "bfloat16", "float16")


class SequenceCount(Protocol):
    """Chooses how many sequences answer a set of requests soonest (``plan.workload.Workload``)."""

    @property
    def most(self) -> int:
        """Largest number of sequences that it may choose."""


def _option(
    default: Any, help: str, least: int | None = None, words: Iterable[str] = (), metavar: str | None = None
) -> Any:
    """Declares a field of ``LoadOptions``; ``least`` is the smallest count and ``words`` the only values allowed."""
    return field(default=default, metadata={"help": help, "least": least, "words": tuple(words), "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What memory is used for."""

    memory: int | float | str | None = _option(
        None,
        "Memory for weights, slots, caches, activations and MLX's own cache together: 4GB, 1.5GiB, 50% of what may be "
        "used now, or auto. Default: OUTCORE_MEMORY, the configuration file's, or auto, from what is free.",
        metavar="SIZE",
    )
    resident: int | None = _option(
        None, "Keep exactly N layers in memory. Default: as many as fit.", least=0, metavar="N"
    )
    slots: int | None = _option(
        None, "Slots of the ring that streams layers. Default: the fastest of 2, 3, 4 and 6.", least=2, metavar="N"
    )
    head_resident: bool | None = _option(
        None,
        "Keep the output head in memory. Default: yes, unless layers fit next to it only in parts or in two slots, and "
        "streaming the head too is faster.",
    )
    experts: int | None = _option(
        None,
        "Mixture of experts: cache N experts of each layer, and read others when a token needs them. 0: stream layers "
        "whole. Default: what reads least.",
        least=0,
        metavar="N",
    )
    priority: str = _option(
        "context",
        "Reserve memory for 512, 1024 or all tokens of the context at first; a longer context takes memory from "
        "resident layers, which are then streamed.",
        words=PRIORITIES,
        metavar="WHAT",
    )
    context: int | None = _option(
        None,
        "Tokens of prompt and answer to reserve memory for. Default: 2048, or the model's own maximum.",
        least=1,
        metavar="N",
    )
    prompt: int | None = _option(
        None,
        "Tokens of the longest prompt, if known; a shorter one needs less memory. Default: all of the context.",
        least=1,
        metavar="N",
    )
    prefill_step_size: int | None = _option(
        None, "Prompt tokens computed at once. Default: 2048, or what fits.", least=1, metavar="N"
    )
    sequences: int | SequenceCount = _option(
        1,
        "Sequences that share each forward pass, each with its own context, without drafts; or a Workload, for which "
        "the fastest number is chosen.",
    )
    exact_batch: bool = _option(
        False,
        "Compute each of the sequences that share a reading of the weights in passes of its own, so that it has the "
        "bits that it has alone. Takes longer where computing is the limit.",
    )
    batch: int | None = _option(
        None,
        "Sequences of context tokens evaluated in one call without caches, with logits of every token (mlx-lm's "
        "eval_ppl). Default: no memory is reserved for such calls.",
        least=1,
    )
    govern: bool = _option(True, "Watch memory while the model runs, and stream resident layers when it runs short.")
    resumable: bool = _option(
        False,
        "Reserve memory to restore a prompt cache when a forward pass fails. Otherwise resident layers make room when "
        "a prompt cache is first used.",
    )

    @property
    def asked(self) -> bool:
        """Whether the user gave a budget; otherwise it is derived from free memory."""
        return budget_bytes(self.memory, lambda: 100) is not None

    @property
    def reserved(self) -> int | None:
        """Tokens of context that memory is reserved for at first; None: all."""
        return PRIORITIES[self.priority]

    @property
    def most_sequences(self) -> int:
        """Largest number of sequences that share a forward pass."""
        return self.sequences if isinstance(self.sequences, int) else self.sequences.most


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """How weights are read, and what else is stored on disk."""

    io: str = _option(
        AUTO, "How to read weights: past the page cache (direct) or through it (cached).", words=IO_MODES, metavar="HOW"
    )
    threads: int | None = _option(None, "Reads in flight at once. Default: 4, or 8 with at least 8 cores.", 1)
    mirror: str | Path | Sequence[str | Path] | None = _option(
        None,
        "A copy of the model's folder on another disk, a folder that contains one, or several. Streamed weights are "
        "read from all of them at once; if one fails, from the others. Default: none.",
        metavar="DIR",
    )
    kv_disk: str = _option(
        AUTO,
        "Offload keys and values of streamed layers to disk; every token reads them. auto: if the context does not fit "
        "otherwise. For one text at a time, and not with --draft self.",
        words=(AUTO, "on", "off"),
        metavar="WHEN",
    )
    kv_dir: str | Path | None = _option(
        None,
        "Folder for offloaded keys and values; created if only its last part is missing. Its files are unnamed and end "
        "with the process. Default: the cache folder.",
    )
    prefix_cache: int | str = _option(
        "off",
        "Keep computed prompts on disk and reuse them for prompts that begin the same way, also after a restart. on: "
        "up to 20 GB or a tenth of free space, and nothing below 10 GB free; SIZE: up to that.",
        metavar="on|off|SIZE",
    )

    @property
    def mirrors(self) -> tuple[Path, ...]:
        """Folders with copies of the model."""
        return tuple(Path(m) for m in self.mirror) if isinstance(self.mirror, tuple) else ()


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How the model is opened and computed, and what drafts for it."""

    dtype: str | None = _option(None, "Type to compute in. Default: as the checkpoint says.", words=DTYPES)
    cpu_streams: int | None = _option(
        None, "CPU device: cores that a linear layer uses. Default: all.", least=1, metavar="N"
    )
    draft: str = _option(
        AUTO,
        "What drafts tokens, so that one forward pass yields several: ngram (repetitions in the text), self or "
        "self:BITS (a low-bit copy of the model in memory, made once; for a quantized model, the high bits of its "
        "weights, after which only the low bits are streamed), mtp or mtp:FOLDER (the original model's "
        "multi-token-prediction head, from that folder), a published drafter (EAGLE-3, DFlash, DSpark), none, a model "
        "with the same tokenizer, or auto: the fastest by prediction. Default: auto.",
        metavar="WHAT",
    )
    draft_bits: int | None = _option(
        None,
        "Quantize a published drafter to this many bits as it is loaded: 2, 3, 4, 6 or 8. Default: as it is stored.",
        least=2,
        metavar="N",
    )
    model_config: dict[str, Any] | None = _option(None, "As in mlx_lm.load. Default: none.")
    images: bool = _option(False, "Read images too, if the model does; a package then makes types that mlx-lm knows.")
    trust_remote_code: bool = _option(False, "Run code that comes with the model or its tokenizer.")
    adapter_path: str | None = _option(
        None, "Folder of trained adapter weights and their config. Default: none.", metavar="DIR"
    )
    lazy: bool = _option(
        False,
        "As in mlx_lm.load: if nothing is streamed, the model's first call reads the weights, and refuses files that "
        "changed since. Evaluating parameters before that call skips the check.",
    )
    ranks: Any = field(default=None, repr=False, compare=False)
    """The other machines that hold layers of the model (``decode.preparation.Ranks``); None: this machine holds all of
    it."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ModelOptions, DiskOptions, MemoryOptions):
    """How a model is opened and held in memory. Values are checked on construction, before a model is opened.

    Raises:
        UsageError: a value has the wrong type or is out of range.
    """

    def __post_init__(self) -> None:
        checked = {each.name: self._checked(each) for each in fields(self)}
        checked |= {"mirror": self._mirrors(), "prefix_cache": self._prefix_bytes()}
        if self.asked and not isinstance(self.memory, str):
            checked["memory"] = budget_bytes(self.memory, lambda: 100)
        if not hasattr(self.sequences, "most"):
            checked["sequences"] = whole(called("sequences"), self.sequences)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.kv_dir is not None and not (isinstance(self.kv_dir, str | Path) and str(self.kv_dir).strip()):
            raise UsageError(f"{shown_value(called('kv_dir'), self.kv_dir)}: give the path of a folder")
        if self.kv_disk == "on" and self.sequences != 1:
            raise UsageError(f"{called('kv_disk')} on: works for one text at a time only; leave it out")
        if self.experts and self.resident is not None:
            raise UsageError(
                f"{called('experts')} {self.experts} and {called('resident')} {self.resident}: give one or the other; "
                "where experts are read one by one, layers stay in memory as far as there is room"
            )

    def _checked(self, each: Field[Any]) -> Any:
        name, value, said = called(each.name), getattr(self, each.name), each.metadata
        if not said or (value is None and each.default is None):
            return value
        if said["least"] is not None:
            return whole(name, value, said["least"])
        if said["words"]:
            return choice(name, value, said["words"])
        if str(each.type).startswith("bool") and not isinstance(value, bool):
            raise UsageError(f"{shown_value(name, value)}: give True or False")
        return value

    def _prefix_bytes(self) -> int | str:
        name, size = called("prefix_cache"), self.prefix_cache
        if size in ("on", "off"):
            return size
        if isinstance(size, str) and not any(c.isdigit() for c in size):
            raise UsageError(f"{shown_value(name, size)}: give on, off or a size such as 5GB")
        return parse_size(size, flag=name) if isinstance(size, str) else whole(name, size)

    def _mirrors(self) -> tuple[str | Path, ...] | None:
        given: Any = self.mirror
        mirrors = () if given is None else (given,) if isinstance(given, str | Path) else given
        if not (isinstance(mirrors, Sequence) and all(isinstance(m, str | Path) and str(m).strip() for m in mirrors)):
            raise UsageError(f"{shown_value(called('mirror'), given)}: give a folder, or a list of folders")
        if len({str(Path(m)) for m in mirrors}) < len(mirrors):
            raise UsageError(f"{called('mirror')}: the same folder is given twice; give each once")
        return tuple(mirrors) or None


def said_of(name: str) -> str:
    """Returns an option's help: what it decides, its allowed words, and its default where the help names one."""
    said = LoadOptions.__dataclass_fields__[name].metadata
    text, there, default = said["help"].partition(" Default:")
    return text + (f" {', '.join(said['words'])}." if said["words"] else "") + there + default


LoadOptions.__doc__ = f"{LoadOptions.__doc__}\n    Attributes:\n" + "".join(
    f"        {name}: {said_of(name)}{'' if 'Default' in said_of(name) else f' Default: {each.default}.'}\n"
    for name, each in LoadOptions.__dataclass_fields__.items()
    if each.metadata
)


def chosen(options: LoadOptions | None, arguments: Mapping[str, Any]) -> LoadOptions:
    """Returns ``options``, or ``LoadOptions`` made from keyword arguments.

    Raises:
        UsageError: both were given, or ``options`` is not ``LoadOptions``.
        TypeError: an argument is unknown.
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


def budget_bytes(memory: Any, available: Callable[[], int], name: str | None = None) -> int | None:
    """Parses a memory budget into bytes; None where it is to be derived from free memory.

    Args:
        memory: bytes; a size such as ``"4GB"``; ``"50%"`` of what is available; None or ``"auto"``.
        available: returns the bytes available now.
        name: the argument's name in errors; None: ``memory`` or the command's flag.

    Raises:
        UsageError: not a positive size.
    """
    name = name or called("memory")
    if memory is None or (isinstance(memory, str) and memory.strip().lower() == AUTO):
        return None
    if not isinstance(memory, str):
        return whole(name, memory, most=MOST_BYTES)
    share = SHARE.fullmatch(memory.strip()) if len(memory) < 40 else None
    if share is None:
        return parse_size(memory, flag=name)
    if not 0 < float(share[1]) <= 100:
        raise UsageError(f"{name} {memory.strip()}: give more than 0% and at most 100% of what may be used now")
    return max(1, int(available() * float(share[1]) / 100))
