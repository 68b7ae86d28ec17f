"""``outcore plan --device``: plans for a published device or another disk instead of this machine's.

A model with a ``config.json`` only gets files as ``mlx_lm.convert`` writes them, but no weights.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from outcore.checkpoint.checkpoint import CONFIG, read_object
from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.lazy_model import one_line_of
from outcore.checks import choice
from outcore.cli import plan
from outcore.cli.commands import parser_of
from outcore.cli.console import console, table
from outcore.cli.flags import loading_options
from outcore.decode.budget import given_budget
from outcore.decode.preparation import prepare
from outcore.errors import UnsupportedModelError, UsageError
from outcore.machine.memory import last_resort
from outcore.machine.random_state import random_state_kept
from outcore.machine.small_files import CONFIG_BYTES
from outcore.modules.mlx_lm_compat import classes_of
from outcore.plan.joint_plan import AUTO, NONE
from outcore.plan.machine_profile import Calibration
from outcore.plan.planner import ASSUMED
from outcore.sizes import format_size
from outcore.text import shortened
from outcore_convert.convert import shards_of
from outcore_convert.recipe import Tensor


def run(args: argparse.Namespace) -> None:
    if args.device is None:
        plan.run(args)
        return
    defaults = parser_of("plan")
    where = disk(args.device) or device(args.device)
    for name in ("io", "cpu_streams", "mirror"):
        if getattr(args, name) != defaults.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is about this machine, --device {args.device} about another; leave one out")
    args.result.record = {"device": where.name}
    if args.model is not None:
        with with_files(resolve_model(args.model, args.revision, fetch=only_config)) as folder:
            args.result.record = _planned(args, folder, where)
    if isinstance(where, Disk):
        if args.model is None:
            raise UsageError(f"--device {args.device}: give a model, too")
        return
    rows = where.published()
    if args.model is not None:
        name = Path(args.model).name.lower().replace("_", "-")
        rows = [r for r in rows if r.model.lower().replace("_", "-") in name]
    if rows:
        _show(where, rows)
    args.result.record["published"] = [asdict(r) | {"tps": r.tps[where.name]} for r in rows]


def _planned(args: argparse.Namespace, folder: Path, where: Device | Disk) -> dict[str, Any]:
    options = loading_options(args)
    # Without the budget: one for that device may be too large for this machine.
    options["memory"] = None
    prepared = prepare(folder, **options, least=True)
    calibration = where.calibration(prepared.calibration)
    budget = given_budget(args.memory, of=where.usable_bytes)
    best = prepared.planning.at(budget, calibration).plan
    prepared = replace(prepared, choices=())  # compared for this machine
    if prepared.draft is not None and prepared.planning.kind != AUTO:
        plain = prepare(folder, **(options | {"draft": NONE, "draft_bits": None}), least=True)
        prepared = plan.compared(prepared, plain, budget, calibration)
    most = max(budget, where.usable_bytes)
    return plan.show(prepared, calibration, best, most, device=where.name, quiet=args.quiet)


def _show(where: Device, rows: Sequence[PublishedRow]) -> None:
    title = f"Published results on {where.name}, by the paper's own system"
    lines = []
    for r in rows:
        swaps = "thrashes" if where.name in r.swaps else ""
        lines.append([str(r.table), r.model, f"{r.resident} of {r.layers}", f"{r.tps[where.name]:.2f}", swaps])
    out = console()
    out.print(table([">table", "model", ">resident", ">tokens/s", ""], lines, title))
    out.print(f"A process may use {format_size(where.usable_bytes)} there ({where.usable_source}).")


# By kind of device: the fraction of its memory that a process may use, and where that comes from.
#
# Working sets: llama.cpp's logs, 21845 MB of 32 GB (issue 1870), 73728 of 96 (3213). Phones: killed at half of 8 GB
# (cardona/SwiftMistralCoreML issue 15); 3.12 of 6 GB to start with (a-ghorbani/pocketpal-ai pull request 651). The
# paper's own rows only say that its phone's cliff lies between 4.28 and 5.28 GB, and its tablet's between 5.62 and
# 5.96.
USABLE = {
    "mac": (3 / 4, "three quarters of memory: Metal's recommended working set on large Macs"),
    "ipad": (2 / 3, "two thirds of memory: Metal's recommended working set on Apple silicon with up to 32 GB"),
    "iphone": (1 / 2, "half of memory: what iOS, which does not swap, leaves an app by common reports"),
}

WHOLE = (2, 5)
BY_RESIDENCY = (4, 7, 8, 9)


@dataclass(frozen=True)
class PublishedRow:
    """A row of one of the paper's tables.

    Attributes:
        tps: tokens per second by device.
        memory_mb: memory in units of 1e6 bytes. ``whole_mb``: the same with everything resident.
        label: the row's remark in the table.
        swaps: names of the devices that swapped.
    """

    table: int
    model: str
    resident: int
    layers: int
    tps: Mapping[str, float] = field(default_factory=dict)
    memory_mb: int | None = None
    whole_mb: int | None = None
    ppl: float | None = None
    io_share: float | None = None
    label: str = ""
    note: str = ""
    swaps: tuple[str, ...] = ()


@cache
def published_data() -> dict[str, Any]:
    text = (resources.files("outcore_bench") / "published_tables.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def published_rows() -> list[PublishedRow]:
    return [PublishedRow(table["number"], **row) for table in published_data()["tables"] for row in table["rows"]]


@dataclass(frozen=True)
class Device:
    """One of the paper's devices, with the paper's SSD rate in GB/s of 1e9 bytes."""

    name: str
    memory_bytes: int
    ssd_gbps: float

    @property
    def usable_bytes(self) -> int:
        """Memory that one process may use before the system swaps."""
        return int(self.memory_bytes * USABLE[self.name.split("-")[0]][0])

    @property
    def usable_source(self) -> str:
        return USABLE[self.name.split("-")[0]][1]

    def calibration(self, here: Calibration = ASSUMED) -> Calibration:
        """Estimates a calibration: the paper's SSD rate, and the memory bandwidth that its resident models show.

        All other values are assumed, as for any machine that was not measured.
        """
        rows = [r for r in published_rows() if r.table in WHOLE and r.memory_mb and self.name in r.tps]
        seconds = sum(1 / r.tps[self.name] for r in rows)
        weight_gbps = sum(r.memory_mb or 0 for r in rows) / 1000 / seconds
        return Calibration(read_gbps=self.ssd_gbps, weight_gbps=weight_gbps)

    def published(self) -> list[PublishedRow]:
        rows = [r for r in published_rows() if r.table in BY_RESIDENCY and self.name in r.tps]
        return sorted(rows, key=lambda row: (row.table, row.resident))


DEVICES = tuple(Device(d["name"], d["memory_gb"] * 2**30, d["ssd_gbps"]) for d in published_data()["devices"])


@dataclass(frozen=True)
class Disk:
    """A disk of a given rate, and the rate at which memory is read while computing, in GB/s of 1e9 bytes; None: this
    machine's."""

    read_gbps: float
    weight_gbps: float | None

    @property
    def name(self) -> str:
        computing = f" and memory of {self.weight_gbps:g} GB/s" if self.weight_gbps else ""
        return f"a disk of {self.read_gbps:g} GB/s{computing}"

    @property
    def usable_bytes(self) -> int:
        return last_resort()

    def calibration(self, here: Calibration) -> Calibration:
        if self.weight_gbps is None:
            return replace(here, read_gbps=self.read_gbps)
        return Calibration(read_gbps=self.read_gbps, weight_gbps=self.weight_gbps)


def disk(given: str) -> Disk | None:
    """Returns the disk of ``--device GB/s`` or ``--device GB/s,GB/s``; None if a device is named."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:,(\d+(?:\.\d+)?))?", given.strip())
    if found is None:
        return None
    rates = [float(rate) for rate in found.groups() if rate is not None]
    if not all(0.001 <= rate <= 100_000 for rate in rates):
        raise UsageError(
            f"--device {shortened(given)}: give GB/s of a disk, such as 2.4, or of it and of memory: 2.4,100"
        )
    return Disk(rates[0], rates[1] if len(rates) > 1 else None)


def device(name: str) -> Device:
    devices = {d.name: d for d in DEVICES}
    return devices[choice("--device", name, devices)]


def only_config(repo: str, revision: str | None) -> Path:
    """Downloads the small files of a model of the Hub. Raises as ``huggingface_hub`` does."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, revision=revision, allow_patterns=["*.json", "*.py"]))


@contextlib.contextmanager
def with_files(folder: Path) -> Iterator[Path]:
    """Gives the folder itself if it has weights, or one in which files say where weights would be; they take no room.

    Raises:
        UnsupportedModelError: mlx-lm cannot make a model of the config.
    """
    if any(folder.glob("model*.safetensors")):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="outcore-plan-") as parent:
        made = Path(parent) / folder.name
        made.mkdir()
        for file in (folder / CONFIG, *folder.glob("*.py")):
            shutil.copy(file, made)
        for shard in shards_of([Tensor(name, a.dtype, tuple(a.shape)) for name, a in _parameters(folder)]):
            with (made / shard.name).open("wb") as out:
                out.write(shard.head)
                out.truncate(shard.nbytes)
        yield made


def _parameters(folder: Path) -> list[tuple[str, mx.array]]:
    _, config = read_object(folder / CONFIG, CONFIG_BYTES)
    text = config.get("text_config") or config
    named = next((str(text[key]) for key in ("dtype", "torch_dtype") if key in text), "")
    dtype = {"float32": mx.float32, "float16": mx.float16}.get(named, mx.bfloat16)
    stored = config.get("quantization")
    if stored is None and "quantization_config" in config:
        raise UnsupportedModelError(f"{folder}: weights in another program's form; give its MLX version's config.json")
    try:
        with random_state_kept():
            return _built(copy.deepcopy(config), dtype, stored)
    except Exception as e:  # a model's code may raise anything on an unexpected configuration
        raise UnsupportedModelError(f"{folder}: mlx-lm makes no model of its config.json: {one_line_of(e)}") from e


def _built(config: dict[str, Any], dtype: mx.Dtype, stored: dict[str, Any] | None) -> list[tuple[str, mx.array]]:
    model_class, args_class = classes_of(config)
    arguments: Any = args_class
    model = model_class(arguments.from_dict(config))
    keeps = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if keeps(path) and mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    if stored is not None:
        usual = getattr(model, "quant_predicate", None) or (lambda path, module: True)

        def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if path in stored:
                found: bool | dict[str, Any] = stored[path]
                return found
            if not hasattr(module, "to_quantized") or module.weight.shape[-1] % stored["group_size"]:
                return False
            chosen: bool | dict[str, Any] = usual(path, module)
            return chosen

        mode = stored.get("mode", "affine")
        nn.quantize(model, stored["group_size"], stored["bits"], mode=mode, class_predicate=how)
    return list(tree_flatten(model.parameters()))
