"""What a user asks for: how a model is opened and held in memory. Declared once, for Python and for commands."""

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
"""What is chosen for the user: memory, drafts, the way of reading."""

SHARE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")
"""Of what may be used now, as in ``50%``."""

PRIORITIES = {"speed": 512, "balanced": 1024, "context": None}
"""Tokens of context that memory is reserved for at first; None: as many as are expected. More is made room for as it
comes, by streaming layers that were resident."""

IO_MODES = ("auto", "direct", "cached")
DTYPES = ("float32", "bfloat16", "float16")


class SequenceCount(Protocol):
    """As many sequences as answer a number of requests soonest (``plan.workload``)."""

    @property
    def most(self) -> int: ...


def _option(
    default: Any, help: str, least: int | None = None, words: Iterable[str] = (), metavar: str | None = None
) -> Any:
    """A field of ``LoadOptions``.

    Args:
        default: of the argument; a flag may have another one for a command.
        help: what it decides; ends with the default where that is None.
        least: the smallest number, of those that are counts.
        words: what it may be, where these are all.
        metavar: what the help of a command calls its value.
    """
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
        None, "Slots of the ring that layers are streamed through. Default: 3, or 2.", least=2, metavar="N"
    )
    head_resident: bool | None = _option(
        None,
        "Whether the head stays in memory. Default: it does, unless layers would fit in parts alone beside it, and it "
        "is faster to stream it too.",
    )
    experts: int | None = _option(
        None,
        "Mixture of experts: keep all but the experts in memory, and N of those of each layer; others are read when a "
        "token needs them. 0: stream layers whole. Default: what is fastest.",
        least=0,
        metavar="N",
    )
    priority: str = _option(
        "context",
        "Reserve memory for 512, 1024 or all tokens of the context at first; room for more is made as they come, by "
        "streaming layers that were resident.",
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
        "Tokens of the longest prompt, if known: less memory is set aside for computing it. Default: all of the "
        "context.",
        least=1,
        metavar="N",
    )
    prefill_step_size: int | None = _option(
        None, "Prompt tokens computed at a time. Default: 2048, or what fits.", least=1, metavar="N"
    )
    sequences: int | SequenceCount = _option(
        1,
        "Sequences that share each sweep, each with its own context, without drafts; or a Workload: as many as answer "
        "it soonest.",
    )
    batch: int | None = _option(
        None,
        "Sequences of context tokens that are evaluated in one call, without caches and with the logits of every token "
        "(mlx-lm's eval_ppl). Default: memory for such calls is not set aside.",
        least=1,
    )
    govern: bool = _option(True, "Watch memory while the model runs, and stream resident layers where it gets short.")
    resumable: bool = _option(
        False,
        "One prompt cache will serve several texts: set memory aside for taking it back where a sweep fails. Otherwise "
        "that is found when such a cache is used, in place of resident layers.",
    )

    @property
    def asked(self) -> bool:
        """Whether a budget was asked for; else it is made of what is free."""
        return budget_bytes(self.memory, lambda: 100) is not None

    @property
    def reserved(self) -> int | None:
        """Tokens of context that memory is reserved for at first; None: all."""
        return PRIORITIES[self.priority]

    @property
    def most_sequences(self) -> int:
        """Sequences that share sweeps at most."""
        return self.sequences if isinstance(self.sequences, int) else self.sequences.most


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """How weights are read, and what else lies on disk."""

    io: str = _option(
        AUTO, "How to read weights, around (direct) or through the page cache.", words=IO_MODES, metavar="HOW"
    )
    threads: int | None = _option(None, "Reads in flight at once. Default: 4, or 8 where there are as many cores.", 1)
    mirror: str | Path | Sequence[str | Path] | None = _option(
        None,
        "A copy of the model's folder on another disk, or a folder that has one, or several: what is streamed is read "
        "from all at once, and from the others where one fails. Default: none.",
        metavar="DIR",
    )
    kv_disk: str = _option(
        AUTO,
        "Keys and values of streamed layers on disk, which every token reads; auto: where the context does not fit "
        "otherwise. Of one text at a time, and not with a draft of the model itself.",
        words=(AUTO, "on", "off"),
        metavar="WHEN",
    )
    kv_dir: str | Path | None = _option(
        None,
        "Folder for them, made if it alone is missing; files there have no name and go with the process. Default: the "
        "cache folder.",
    )
    prefix_cache: int | str = _option(
        "off",
        "Keep what was computed of prompts on disk, for those that begin in the same way, after a restart too. on: up "
        "to 20 GB, or a tenth of what is free, and nothing below 10 GB free; a size: up to that.",
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
        "What drafts tokens, so that a sweep over the weights makes several: ngram (the text's own repetitions), self "
        "or self:BITS (a low-bit copy of the model, in memory, made once; of a quantized model the high bits of its "
        "weights, of which only the low ones are read then), mtp or mtp:FOLDER (the multi-token-prediction head of the "
        "original model, there), none, a model with the same tokenizer, or auto: what is predicted to be fastest. "
        "Default: auto.",
        metavar="WHAT",
    )
    model_config: dict[str, Any] | None = _option(None, "As in mlx_lm.load. Default: none.")
    trust_remote_code: bool = _option(False, "Run code that comes with the model or its tokenizer.")
    adapter_path: str | None = _option(
        None, "Folder of trained adapter weights and their config. Default: none.", metavar="DIR"
    )
    lazy: bool = _option(
        False,
        "As in mlx_lm.load: where nothing is streamed, weights are read by the model's first call. It refuses files "
        "that were written to since; whoever evaluates parameters before is not told.",
    )
    ranks: Any = field(default=None, repr=False, compare=False)
    """Other machines that have layers of the model (``decode.preparation.Ranks``); None: it is all here."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ModelOptions, DiskOptions, MemoryOptions):
    """How a model is opened and held in memory. Checked when it is made, before a model is opened.

    Raises:
        UsageError: a value is of another kind, or out of range.
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
            raise UsageError(f"{shown_value(called('kv_dir'), self.kv_dir)}: a folder")
        if self.kv_disk == "on" and self.sequences != 1:
            raise UsageError(f"{called('kv_disk')} on: only for one text at a time; leave it out")
        if self.experts and self.resident is not None:
            raise UsageError(
                f"{called('experts')} {self.experts} and {called('resident')} {self.resident}: give one or the other; "
                "where experts are read one by one, all other layers stay in memory"
            )

    def _checked(self, each: Field[Any]) -> Any:
        """A field's value, as its declaration has it: a count from ``least``, one of ``words``, or a truth."""
        name, value, said = called(each.name), getattr(self, each.name), each.metadata
        if not said or (value is None and each.default is None):
            return value
        if said["least"] is not None:
            return whole(name, value, said["least"])
        if said["words"]:
            return choice(name, value, said["words"])
        if str(each.type).startswith("bool") and not isinstance(value, bool):
            raise UsageError(f"{shown_value(name, value)}: True or False")
        return value

    def _prefix_bytes(self) -> int | str:
        name, size = called("prefix_cache"), self.prefix_cache
        if size in ("on", "off"):
            return size
        if isinstance(size, str) and not any(c.isdigit() for c in size):
            raise UsageError(f"{shown_value(name, size)}: on, off or a size such as 5GB")
        return parse_size(size, flag=name) if isinstance(size, str) else whole(name, size)

    def _mirrors(self) -> tuple[str | Path, ...] | None:
        given: Any = self.mirror
        mirrors = () if given is None else (given,) if isinstance(given, str | Path) else given
        if not (isinstance(mirrors, Sequence) and all(isinstance(m, str | Path) and str(m).strip() for m in mirrors)):
            raise UsageError(f"{shown_value(called('mirror'), given)}: a folder, or several")
        if len({str(Path(m)) for m in mirrors}) < len(mirrors):
            raise UsageError(f"{called('mirror')}: one folder is there twice")
        return tuple(mirrors) or None


def said_of(name: str) -> str:
    """What a field decides, the words that it may be, and its default where that needs words."""
    said = LoadOptions.__dataclass_fields__[name].metadata
    text, there, default = said["help"].partition(" Default:")
    return text + (f" {', '.join(said['words'])}." if said["words"] else "") + there + default


LoadOptions.__doc__ = f"{LoadOptions.__doc__}\n    Attributes:\n" + "".join(
    f"        {name}: {said_of(name)}{'' if 'Default' in said_of(name) else f' Default: {each.default}.'}\n"
    for name, each in LoadOptions.__dataclass_fields__.items()
    if each.metadata
)


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


def budget_bytes(memory: Any, available: Callable[[], int], name: str | None = None) -> int | None:
    """Bytes of a budget as it was given, whether or not there is so much; None: it is to be made of what is free.

    Args:
        memory: bytes; a size such as ``"4GB"``; ``"50%"`` of what is available; None or ``"auto"``.
        available: bytes that may be used now.
        name: what an error calls it; None: as the user does.

    Raises:
        UsageError: it is not positive, or no size.
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
        raise UsageError(f"{name} {memory.strip()}: from 1% to 100% of what may be used now")
    return max(1, int(available() * float(share[1]) / 100))
