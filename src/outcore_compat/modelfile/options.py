"""The contents of a Modelfile as one record: each instruction is applied, or refused with its line number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcore.checks import COUNT, LEAST_TEMPERATURE, real, whole
from outcore.errors import UsageError
from outcore.machine.small_files import read_small
from outcore.text import meant, shortened

from .syntax import UNSUPPORTED, Instruction, LineError, decoded, parse

# Most bytes of a Modelfile.
LONGEST = 1 << 20

# Most characters of a stop string; as many characters of an answer may be held back.
LONGEST_STOP = 1000

WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
NUMBER = re.compile(r"[+-]?([0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})([eE][+-]?[0-9]{1,4})?")

# Supported parameters, each with its smallest and largest value; the type of these is the parameter's type.
PARAMETERS: dict[str, tuple[float, float]] = {
    "num_ctx": (1, COUNT),
    "num_predict": (-2, COUNT),
    "temperature": (0.0, math.inf),
    "top_k": (-COUNT, COUNT),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**63 - 1),
    "repeat_penalty": (0.0, 1e6),
    "repeat_last_n": (-1, COUNT),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "draft_num_predict": (0, 1024),
}


@dataclass(frozen=True)
class Modelfile:
    """The contents of a Modelfile; None for each value that it does not give.

    Attributes:
        model, draft: a name on the Hub, or a folder; absolute if it is next to the Modelfile. ``adapter``: a folder.
        messages: in the form of chat templates (``role`` and ``content``), before the user's first message.
        values: parameters by name (``num_predict`` -1: no limit; ``top_k`` 0: all tokens; a negative ``seed``: a new
            one each time).
        lines: the line number at which each of these is first given.
    """

    path: Path
    model: str
    adapter: str | None = None
    draft: str | None = None
    system: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    stop: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)

    def get(self, name: str) -> Any:
        return self.values.get(name, getattr(self, name, None))

    def line(self, attribute: str) -> str:
        """Returns the place of a value, for errors."""
        return f"{self.path}: line {self.lines[attribute]}"

    def penalties(self) -> dict[str, float | int]:
        """Returns arguments of ``mlx_lm.sample_utils.make_logits_processors``, which are also fields of
        ``serve.events.Sampling``; empty if there are no penalties."""
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
    """Reads a Modelfile. Raises ``UsageError``, which names the line, if it cannot be read, understood or applied."""
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
    """Parses a Modelfile's text; relative folders in it are next to ``path``. Raises ``LineError``."""
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    last = 1
    for instruction in parse(text):
        last = instruction.line
        attribute, value = _meaning(instruction, path.parent)
        if isinstance(value, tuple):
            found[attribute] = (*found.get(attribute, ()), *value)
        elif attribute in lines:
            raise instruction.refused(f"line {lines[attribute]} has this instruction already; keep one")
        else:
            found[attribute] = value
        lines.setdefault(attribute, instruction.line)
    if "model" not in found:
        raise LineError(last, "there is no FROM: add FROM with a model's folder or its name on the Hub")
    own = {name: found.pop(name) for name in list(found) if name in Modelfile.__dataclass_fields__}
    return Modelfile(path=path, values=found, lines=lines, **own)


def _meaning(instruction: Instruction, folder: Path) -> tuple[str, Any]:
    """Returns the attribute that an instruction sets, and its value. Tuples of several instructions are joined."""
    name, value = instruction.name, instruction.value
    if name in UNSUPPORTED:
        raise instruction.refused(UNSUPPORTED[name])
    if name == "parameter":
        return _parameter(instruction)
    if name in ("from", "draft", "adapter"):
        return "model" if name == "from" else name, _place(instruction, folder)
    if name == "message":
        return "messages", ({"role": instruction.argument, "content": value},)
    return (name, (value,)) if name == "license" else (name, value)


def _place(instruction: Instruction, folder: Path) -> str:
    """Returns a folder, relative to the Modelfile's, or a name as it is given."""
    given = instruction.value.strip()
    if not given:
        raise instruction.refused("give a folder, or a model's name on the Hugging Face Hub")
    try:
        path = folder / Path(given).expanduser()
        there = path.exists()
    except (OSError, ValueError, RuntimeError) as e:
        raise instruction.refused(f"{shortened(given)}: {getattr(e, 'strerror', None) or e}") from e
    if instruction.name == "adapter" and not path.is_dir():
        raise instruction.refused(
            f"{shortened(given)}: no such folder next to the Modelfile; give that of an mlx-lm adapter, with "
            "adapters.safetensors and adapter_config.json"
        )
    return str(path.absolute()) if there or given.startswith((".", "/", "~")) else given


def _parameter(instruction: Instruction) -> tuple[str, Any]:
    name, value = instruction.argument, instruction.value
    if name == "stop":
        if not 0 < len(value) <= LONGEST_STOP:
            raise instruction.refused(f"give the text that ends an answer, of 1 to {LONGEST_STOP} characters")
        return name, (value,)
    if name not in PARAMETERS:
        known = ("stop", *PARAMETERS)
        others = meant(name, known) or "; supported are " + ", ".join(known)
        raise LineError(instruction.line, f"PARAMETER {shortened(name)}: not supported; leave it out{others}")
    number = _number(instruction, *PARAMETERS[name])
    if name == "temperature" and 0 < number < LEAST_TEMPERATURE:
        raise instruction.refused(f"{number}: 0, or at least {LEAST_TEMPERATURE:g}")
    if name == "num_predict" and number == 0:
        raise instruction.refused("0: ask for at least one token, or -1 for no limit")
    # num_predict -2 (until the context is full) is what -1 does here; a negative top_k means all tokens, as 0 does.
    return name, max(number, {"num_predict": -1, "top_k": 0}.get(name, number))


def _number(instruction: Instruction, least: float, most: float) -> Any:
    text = instruction.value.strip()
    kind = int if isinstance(least, int) else float
    if not (WHOLE if kind is int else NUMBER).fullmatch(text):
        raise instruction.refused(f"{shortened(text)}: {'a whole number' if kind is int else 'a number'} is needed")
    try:
        return whole("it", int(text), int(least), int(most)) if kind is int else real("it", float(text), least, most)
    except UsageError as e:
        raise instruction.refused(str(e).partition("=")[2]) from None
