"""What a Modelfile asks for, as one record: every instruction is honoured, or refused with its line's number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcore.checks import COUNT, LEAST_TEMPERATURE, real, whole
from outcore.errors import UsageError
from outcore.machine.small_files import read_small
from outcore.sizes import MOST_BYTES
from outcore.text import meant, shortened

from .syntax import FLASH, Instruction, LineError, decoded, parse
from .template import GoTemplate, parse_template

LONGEST = 1 << 20
"""Bytes of a Modelfile, as of other small files that users write."""

LONGEST_STOP = 1000
"""Characters of a stop string, so many of which may be held back."""

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Modelfile:
    """What a Modelfile says; None: nothing of that.

    Attributes:
        path: its own.
        model: a folder, absolute if the Modelfile means one beside it, or a name on the Hub. ``adapter``: a folder.
            ``draft``: as ``model``.
        messages: as chat templates take them: ``role`` and ``content``, said before the first message of the user.
        values: parameters by their names (``num_predict`` -1: as many as there is room for; ``top_k`` 0: of all;
            ``seed`` negative: another one each time), and of mlx-flash's instructions ``memory``, ``threads``,
            ``slots``, ``io`` and ``warn_below_bits``.
        lines: of each of these that the Modelfile says something of: the number of its (first) line.
    """

    path: Path
    model: str
    adapter: str | None = None
    draft: str | None = None
    system: str | None = None
    template: GoTemplate | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    licenses: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)

    def get(self, name: str) -> Any:
        """An attribute, or one of ``values``; None: it is not said."""
        return self.values.get(name, getattr(self, name, None))

    def line(self, attribute: str) -> str:
        """Where it says something, for errors."""
        return f"{self.path}: line {self.lines[attribute]}"

    def penalties(self) -> dict[str, float | int]:
        """Arguments of ``mlx_lm.sample_utils.make_logits_processors``, and fields of ``serve.events.Sampling``;
        none where nothing is punished."""
        last = self.values.get("repeat_last_n", 64)
        last = COUNT if last < 0 else last
        found: dict[str, float | int] = {}
        for kind, name, nothing in (("repetition", "repeat", 1.0), ("presence", "presence", 0.0),
                                    ("frequency", "frequency", 0.0)):  # fmt: skip
            penalty = self.values.get(f"{name}_penalty") or nothing
            if last and penalty != nothing:
                found |= {f"{kind}_penalty": penalty, f"{kind}_context_size": last}
        return found


def read_modelfile(path: str | Path) -> Modelfile:
    """A Modelfile.

    Raises:
        UsageError: it cannot be read, or says what is not understood or cannot be honoured; names the line.
    """
    try:
        file = Path(path).expanduser()
        return parse_modelfile(decoded(read_small(file, LONGEST)), file)
    except LineError as e:
        raise UsageError(f"{shortened(path, 120)}: {e}") from e
    except (OSError, ValueError, RuntimeError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"--modelfile {shortened(path, 120)}: {getattr(e, 'strerror', None) or e}") from e


def parse_modelfile(text: str, path: Path = Path("Modelfile")) -> Modelfile:
    """What the text of a Modelfile says.

    Args:
        path: where it lies; relative folders in it are beside it.

    Raises:
        LineError: as in ``read_modelfile``.
    """
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    last = 1
    for instruction in parse(text):
        last = instruction.line
        attribute, value = _meaning(instruction, path.parent)
        if isinstance(value, tuple):
            found[attribute] = (*found.get(attribute, ()), *value)
        elif attribute in lines:
            raise instruction.refused(f"line {lines[attribute]} says that already; keep one")
        else:
            found[attribute] = value
        lines.setdefault(attribute, instruction.line)
    if "model" not in found:
        raise LineError(last, "there is no FROM in all of it: add FROM with a model's folder or its name on the Hub")
    own = {name: found.pop(name) for name in list(found) if name in Modelfile.__dataclass_fields__}
    return Modelfile(path=path, values=found, lines=lines, **own)


def _meaning(instruction: Instruction, folder: Path) -> tuple[str, Any]:
    """The attribute that an instruction sets, and its value; of several instructions, tuples are joined."""
    name, value = instruction.name, instruction.value
    if name in UNSUPPORTED:
        raise instruction.refused(UNSUPPORTED[name])
    if name == "parameter":
        return _parameter(instruction)
    if name in FLASH:
        return _flash(instruction)
    if name in ("from", "draft", "adapter"):
        attribute = "model" if name == "from" else name
        return attribute, _place(instruction, folder)
    if name == "template":
        return name, parse_template(instruction)
    if name == "message":
        return "messages", ({"role": instruction.argument, "content": value},)
    return ("licenses", (value,)) if name == "license" else (name, value)


UNSUPPORTED = {
    "renderer": "code that is built into Ollama; leave it out, and the model's own chat template is used",
    "parser": "code that is built into Ollama; leave it out",
    "requires": "a version of Ollama, which this is not; leave it out",
}
"""Instructions that cannot be honoured, and why."""


def _place(instruction: Instruction, folder: Path) -> str:
    """A folder, beside the Modelfile unless it is absolute; or a name, as it is given."""
    given = instruction.value.strip()
    if not given:
        raise instruction.refused("give a folder, or a model's name on the Hugging Face Hub")
    adapter = instruction.name == "adapter"
    try:
        path = folder / Path(given).expanduser()
        there = path.exists()
        if adapter and there and not path.is_dir():
            raise instruction.refused(
                f"{shortened(given)}: give the folder of an adapter of mlx-lm's, with adapters.safetensors and "
                "adapter_config.json"
            )
    except (OSError, ValueError, RuntimeError) as e:
        if isinstance(e, UsageError):
            raise
        raise instruction.refused(f"{shortened(given)}: {getattr(e, 'strerror', None) or e}") from e
    if adapter and not there:
        raise instruction.refused(f"{shortened(given)}: no such folder beside the Modelfile")
    return str(path.absolute()) if there or given.startswith((".", "/", "~")) else given


Check = Callable[[str, Any], Any]


def _whole(least: int, most: int = COUNT) -> tuple[re.Pattern[str], type, Check]:
    return re.compile(r"[+-]?[0-9]{1,20}"), int, lambda name, value: whole(name, value, least, most)


def _real(least: float, most: float) -> tuple[re.Pattern[str], type, Check]:
    number = re.compile(r"[+-]?([0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})([eE][+-]?[0-9]{1,4})?")
    return number, float, lambda name, value: real(name, value, least, most)


def _temperature(name: str, value: float) -> float:
    if real(name, value, 0.0) and value < LEAST_TEMPERATURE:
        raise UsageError(f"{name}={value}: 0, or at least {LEAST_TEMPERATURE:g}")
    return value


def _predicted(name: str, value: int) -> int:
    if whole(name, value, -2) == 0:
        raise UsageError(f"{name}=0: ask for at least one token, or -1 for no limit")
    return max(value, -1)  # -2, until the context is full, is what -1 does here


PARAMETERS: dict[str, tuple[re.Pattern[str], type, Check]] = {
    "num_ctx": _whole(1),
    "num_predict": (*_whole(-2)[:2], _predicted),
    "temperature": (*_real(0, 0)[:2], _temperature),
    "top_k": (*_whole(0)[:2], lambda name, value: max(0, whole(name, value, -COUNT))),
    "top_p": _real(0.0, 1.0),
    "min_p": _real(0.0, 1.0),
    "seed": _whole(-(2**63), 2**63 - 1),
    "repeat_penalty": _real(0.0, 1e6),
    "repeat_last_n": _whole(-1),
    "presence_penalty": _real(-1e6, 1e6),
    "frequency_penalty": _real(-1e6, 1e6),
    "draft_num_predict": _whole(0, 1024),
}
"""Ollama's parameters that are honoured: how a value is written, its type, and what refuses one."""

OTHER_PARAMETERS = (
    "num_thread", "num_gpu", "num_batch", "num_keep", "typical_p", "mirostat", "mirostat_tau", "mirostat_eta", "tfs_z",
    "use_mmap", "use_mlock", "low_vram", "main_gpu", "numa", "f16_kv", "penalize_newline", "num_gqa", "logits_all",
    "vocab_only",
)  # fmt: skip
"""Those that are not."""


def _parameter(instruction: Instruction) -> tuple[str, Any]:
    name, value = instruction.argument, instruction.value
    if name == "stop":
        if not 0 < len(value) <= LONGEST_STOP:
            raise instruction.refused(f"give the text that ends an answer, of 1 to {LONGEST_STOP} characters")
        return name, (value,)
    if name in PARAMETERS:
        return name, _number(instruction, *PARAMETERS[name])
    if name in OTHER_PARAMETERS:
        raise instruction.refused("not supported: Outcore's plan, or a flag, decides it; leave it out")
    known = ("stop", *PARAMETERS)
    raise LineError(
        instruction.line,
        f"PARAMETER {shortened(name)}: there is none{meant(name, known) or '; there are ' + ', '.join(known)}",
    )


def _number(instruction: Instruction, written: re.Pattern[str], kind: type, check: Check) -> Any:
    text = instruction.value.strip()
    if not written.fullmatch(text):
        what = "a whole number" if kind is int else "a number"
        raise instruction.refused(f"{shortened(text)}: {what} is needed")
    try:
        return check(instruction.argument or instruction.name, kind(text))
    except UsageError as e:
        raise instruction.refused(str(e).partition("=")[2] or str(e)) from None


def _flash(instruction: Instruction) -> tuple[str, Any]:
    """mlx-flash's instructions, in terms of ours."""
    name, word = instruction.name, instruction.value.strip().lower()
    if name == "flash":
        if word in FALSE:
            raise instruction.refused(
                "off: Outcore streams what does not fit into memory and nothing else; leave it out, or run mlx-lm"
            )
        if word not in TRUE:
            raise instruction.refused(f"{shortened(word)}: true or false")
        return "flash", True
    if name == "flash_eviction":
        if word not in ("free", "dontneed", "none"):
            raise instruction.refused(f"{shortened(word)}: free, dontneed or none")
        return "io", "cached" if word == "none" else "auto"
    if name == "flash_ram_gb":
        gigabytes = _number(instruction, *_real(1e-9, MOST_BYTES / 1e9))
        return "memory", f"{gigabytes:.9f}".rstrip("0").rstrip(".") + "GB"
    if name == "flash_threads":
        return "threads", _number(instruction, *_whole(1, 256))
    if name == "flash_prefetch_layers":
        # One is computed while so many are read.
        return "slots", 1 + _number(instruction, *_whole(1, 1024))
    if name == "flash_quant_warn_below":
        return "warn_below_bits", _number(instruction, *_whole(0, 64))
    if _number(instruction, *_whole(0)):
        raise instruction.refused(
            "another number of experts than the model was trained with changes its answers, which Outcore never does; "
            "leave it out, or set 0 for the model's own number"
        )
    return "flash_top_k", 0
