"""Writes a converted model in bounded memory; a conversion that was cut off is continued.

The files are written in a folder beside the output (``.partial``), which gets the output's name when all are there. A
file of weights has the suffix ``.partial`` until all its tensors are in it. ``STATE`` counts the jobs whose bytes are
on the disk, in the recipe's order. The output has it, too, until its name is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import numpy as np
from filelock import lock_descriptor

from outcore.checkpoint.checkpoint import CONFIG, Checkpoint, open_checkpoint
from outcore.checkpoint.identity import identity_of
from outcore.checkpoint.lazy_model import DTYPES
from outcore.checkpoint.manifest import is_packed
from outcore.checkpoint.pack import write_small
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.disk import disk_calls
from outcore.errors import BudgetError, StoreError, StoreSpaceError
from outcore.machine.allocator import clear_cache
from outcore.machine.device import device_kind
from outcore.machine.hardware import version
from outcore.machine.memory import free_heap, peak_rss, rss
from outcore.machine.small_files import CONFIG_BYTES, parse_json, read_small
from outcore.machine.written import wrote
from outcore.sizes import format_size

from .recipe import Job, Recipe, Settings, Tensor, recipe_of

PARTIAL, STATE = ".partial", "outcore-convert.json"

# Bytes of a source's rows that are computed at a time.
LEAST_PART, MOST_PART = 1 << 20, 32 << 20

# Most seconds after which finished jobs are put on the disk and counted, and seconds until that is first done.
SYNC_S, FIRST_S = 10.0, 1.0

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Converted:
    """What was written; ``kept_bytes``: what an earlier run had written of it."""

    files: int
    bytes: int
    kept_bytes: int
    bits_per_weight: float


def convert(
    folder: Path, output: Path, settings: Settings, budget: int, *, hub_name: str | None = None, progress: Progress
) -> Converted:
    """Writes what ``mlx_lm.convert`` would write, within ``budget`` bytes of memory of the whole process.

    Args:
        output: a folder that does not exist.
        hub_name: the model's name on the Hub, for README.md.

    Raises:
        UsageError: mlx-lm cannot convert this model like this.
        BudgetError, StoreSpaceError: too little memory for the largest tensor, or room on the disk for the files.
        StoreError: the output is there already, or cannot be written.
        CheckpointError: the model or its tokenizer cannot be loaded.
    """
    if is_packed(folder):
        raise StoreError(f"{folder}: a packed copy; give the folder of the original model")
    checkpoint = open_checkpoint(folder)
    try:
        with _begun(checkpoint, output, settings) as work:
            recipe = recipe_of(checkpoint, output, settings)
            writer = Writer(work, recipe, shards_of(recipe.tensors), progress)
            part = part_bytes(recipe.jobs, budget)
            writer.require_space()
            writer.run(part)
            _write_others(work, writer, checkpoint, settings, hub_name)
            if identity_of(open_checkpoint(folder)) != identity_of(checkpoint):
                raise StoreError(f"{folder}: the model changed meanwhile; delete {work} and convert it again")
            _sync(work)
            work.rename(output)
            _sync(output.parent)
            (output / STATE).unlink()
    except OSError as error:
        raise _cannot_write(output, error) from error
    size = sum(tensor.nbytes for tensor in recipe.tensors)
    return Converted(len(writer.shards), size, writer.kept, round(8 * size / recipe.parameters, 4))


@contextlib.contextmanager
def _begun(checkpoint: Checkpoint, output: Path, settings: Settings) -> Iterator[Path]:
    """Makes and locks the folder to write in, or finds the one that was begun."""
    by = [version("mlx"), mlx_lm.__version__, device_kind()]
    key = hashlib.sha256(json.dumps([identity_of(checkpoint), asdict(settings), *by]).encode()).hexdigest()
    work, other = output.with_name(output.name + PARTIAL), "delete it, or give another folder with --output"
    begun, mine = output if _state(output).get("key") == key else work, False
    if begun is work:
        _check_new(output, other)
        work.mkdir(parents=True, exist_ok=True)
    fd = os.open(begun, os.O_RDONLY)
    try:
        if not (mine := lock_descriptor(fd, blocking=False)):
            raise StoreError(f"{work}: another process converts into it; wait for it, or give another --output")
        if begun is output and _state(output):
            output.rename(work)
        _check_new(output, other)  # another process may have finished it
        (work / (STATE + PARTIAL)).unlink(missing_ok=True)
        if not (found := _state(work)):
            if any(work.iterdir()):
                raise StoreError(f"{work}: holds other files; {other}")
            _write_state(work, key, 0)
        elif found["key"] != key:
            raise StoreError(f"{work}: begun for another model, with other flags or by other versions; {other}")
        yield work
    finally:
        if mine and work.exists() and {path.name for path in work.iterdir()} == {STATE}:  # refused
            (work / STATE).unlink()
            work.rmdir()
        os.close(fd)


def _check_new(output: Path, other: str) -> None:
    if output.exists() or output.is_symlink():
        raise StoreError(f"{output}: is there already; {other}")


def _state(work: Path) -> dict[str, Any]:
    """Returns ``key`` and ``jobs``; empty if there are none."""
    try:
        found = parse_json(read_small(work / STATE, CONFIG_BYTES))
    except (OSError, ValueError):
        return {}
    whole = isinstance(found, dict) and isinstance(found.get("key"), str) and type(found.get("jobs")) is int
    return found if whole else {}


def _write_state(work: Path, key: str, jobs: int) -> None:
    write_small(work / STATE, json.dumps({"key": key, "jobs": jobs}).encode())


def part_bytes(jobs: list[Job], budget: int) -> int:
    """Returns the bytes of rows to compute at a time, the most that fit. Raises BudgetError if none do."""
    free_heap()
    clear_cache()
    base, largest = rss(), max(jobs, key=lambda job: job.needs(LEAST_PART))
    needs = largest.needs(LEAST_PART)
    if (smallest := max(base + needs, peak_rss())) > budget:  # the tokenizer, which is loaded again, was in the peak
        of = f"{largest.names[0]} needs {format_size(needs, round_up=True)}, the process {format_size(base)}"
        least = format_size(smallest + smallest // 20, round_up=True)
        what = f"{format_size(budget)} are too little for this model: {of}"
        raise BudgetError(f"{what}; give --memory {least} or more", smallest)
    part = MOST_PART
    while part > LEAST_PART and base + max(job.needs(part) for job in jobs) > budget:
        part //= 2
    return part


# Without the fp8 names, which MLX loads as uint8 and never writes.
_NAMES = {dtype: name for name, dtype in DTYPES.items() if not name.startswith("F8")}


@dataclass(frozen=True, eq=False)
class Shard:
    """One file. ``head``: its bytes before the first tensor; ``places``: the first byte of each tensor."""

    name: str
    head: bytes = field(repr=False)
    places: Mapping[str, int]
    nbytes: int


def shards_of(tensors: Sequence[Tensor]) -> list[Shard]:
    parts = mlx_lm.utils.make_shards({tensor.name: tensor for tensor in tensors})
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    return [_shard(*pair) for pair in zip(names if len(parts) > 1 else ["model.safetensors"], parts, strict=True)]


def _shard(name: str, tensors: Mapping[str, Tensor]) -> Shard:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    places: dict[str, int] = {}
    end = 0
    for each in _order(list(tensors)):
        tensor = tensors[each]
        places[each], end = end, end + tensor.nbytes
        offsets = [places[each], end]
        header[each] = {"data_offsets": offsets, "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
    text = json.dumps(dict(sorted(header.items())), separators=(",", ":"), ensure_ascii=False).encode()
    head = len(text).to_bytes(8, "little") + text
    return Shard(name, head, {each: len(head) + place for each, place in places.items()}, len(head) + end)


def _order(names: Sequence[str]) -> list[str]:
    """MLX saves tensors in the order of a hash table, which depends on their names alone: saves others to see it."""
    mx.save_safetensors(saved := io.BytesIO(), {name: mx.zeros(1, mx.uint8) for name in names})
    data = saved.getvalue()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return sorted(names, key=lambda name: header[name]["data_offsets"][0])


@dataclass
class Writer:
    """Writes the files of weights. ``kept``: bytes that an earlier run had written."""

    work: Path
    recipe: Recipe
    shards: list[Shard]
    progress: Progress
    kept: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._files: dict[str, int] = {}  # descriptors of files that are being written
        self._of = {name: shard for shard in self.shards for name in shard.places}
        # By file that is not finished: how many tensors are still to come.
        self._left = {shard.name: len(shard.places) for shard in self.shards if not (self.work / shard.name).exists()}

    def require_space(self) -> None:
        there = sum(path.stat().st_blocks * 512 for path in self.work.iterdir())
        needed = sum(shard.nbytes for shard in self.shards)
        needed += needed // 100 + (64 << 20) - there  # for the file system, the tokenizer and the index
        if needed > (free := shutil.disk_usage(self.work).free):
            what = f"the converted model needs {format_size(needed)} more, but only {format_size(free)} are free"
            raise StoreSpaceError(f"{self.work}: {what}; free some, or give a folder on another disk with --output")

    def run(self, part: int) -> None:
        """Does the jobs whose results are not in the files yet, with ``part`` bytes of rows at a time."""
        nbytes = {tensor.name: tensor.nbytes for tensor in self.recipe.tensors}
        key, counted = self._counted()
        synced, wait, done, jobs = time.monotonic(), min(FIRST_S, SYNC_S), 0, self.recipe.jobs
        try:
            for i in range(len(jobs)):
                job, jobs[i] = jobs[i], Job(jobs[i].names, (), jobs[i].make)  # each frees its sources
                size = sum(nbytes[name] for name in job.names)
                todo = [name for name in job.names if self._of[name].name in self._left]
                if todo and i >= counted:
                    self._do(job, todo, part)
                else:
                    self.kept += size
                for name in todo:
                    self._landed(self._of[name])
                if time.monotonic() - synced >= wait:
                    for fd in self._files.values():
                        os.fsync(fd)
                    _write_state(self.work, key, max(i + 1, counted))
                    synced, wait = time.monotonic(), min(2 * wait, SYNC_S)
                self.progress("converting", done := done + size, sum(nbytes.values()))
        finally:
            for fd in self._files.values():
                os.close(fd)
            clear_cache()

    def _counted(self) -> tuple[str, int]:
        """Returns the conversion's key, and the number of jobs whose bytes are on the disk."""
        state = _state(self.work)
        files = {self._of[name] for job in self.recipe.jobs[: state["jobs"]] for name in job.names}
        paths = {self.work / (shard.name + PARTIAL): shard for shard in files if shard.name in self._left}
        if all(path.exists() and path.stat().st_size == shard.nbytes for path, shard in paths.items()):
            return state["key"], state["jobs"]
        _write_state(self.work, state["key"], 0)  # someone removed a file
        return state["key"], 0

    def _do(self, job: Job, todo: list[str], part: int) -> None:
        ends = {name: self._of[name].places[name] for name in todo}
        for arrays in job.parts(part):
            mx.eval(*arrays)
            for name, array in zip(job.names, arrays, strict=True):
                if name in ends:
                    data = np.array(mx.contiguous(array).reshape(-1).view(mx.uint8), copy=False).data
                    ends[name] = self._write(self._file(self._of[name]), data, ends[name])
        if any(source.held for source in job.sources):
            clear_cache()

    def _file(self, shard: Shard) -> int:
        if shard.name not in self._files:
            path = self.work / (shard.name + PARTIAL)
            fd = self._files[shard.name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            disk_calls.system().around_cache(fd)
            os.ftruncate(fd, shard.nbytes)
            self._write(fd, memoryview(shard.head), 0)
        return self._files[shard.name]

    @staticmethod
    def _write(fd: int, data: memoryview, at: int) -> int:
        os.lseek(fd, at, os.SEEK_SET)
        while data:
            written = disk_calls.system().write(fd, data)
            data, at = data[written:], at + written
            wrote("conversions", written)
        return at

    def _landed(self, shard: Shard) -> None:
        """Counts a tensor that is in its file, and gives the file its name at the last one."""
        self._left[shard.name] -= 1
        if not self._left[shard.name]:
            os.fsync(self._file(shard))
            (self.work / (shard.name + PARTIAL)).rename(self.work / shard.name)
            os.close(self._files.pop(shard.name))
            del self._left[shard.name]


def _write_others(work: Path, writer: Writer, checkpoint: Checkpoint, settings: Settings, hub_name: str | None) -> None:
    """Writes all other files, as ``mlx_lm.utils.save`` does."""
    recipe, trust = writer.recipe, {"trust_remote_code": settings.trust_remote_code}
    where = sorted((name, shard.name) for shard in writer.shards for name in shard.places)
    size = {"total_size": sum(tensor.nbytes for tensor in recipe.tensors), "total_parameters": recipe.parameters}
    index = json.dumps({"metadata": size, "weight_map": dict(where)}, indent=4)
    write_small(work / "model.safetensors.index.json", index.encode())
    tokenizer = load_tokenizer(checkpoint.folder, trust, eos=recipe.config.get("eos_token_id"))
    with _errors_of_tokenizers(work):
        tokenizer.save_pretrained(work)
    for pattern in ("*.py", "generation_config.json"):
        for path in checkpoint.folder.glob(pattern):
            if path.is_file() and not path.name.startswith("."):
                shutil.copy(path, work)
    mlx_lm.utils.create_model_card(work, hub_name)
    mlx_lm.utils.save_config(recipe.config, work / CONFIG, keep_vision_config=recipe.keep_vision)


@contextlib.contextmanager
def _errors_of_tokenizers(work: Path) -> Iterator[None]:
    """Raises ``OSError`` where tokenizers, written in Rust, has an ``Exception`` for it."""
    try:
        yield
    except Exception as error:
        if not (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(work)) from error


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cannot_write(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kept = "free some and run the same command again: what is finished is kept"
        return StoreSpaceError(f"{path}: the disk is full ({error.strerror}); {kept}")
    return StoreError(f"{error.filename or path}: cannot be written ({error.strerror}); give another --output")
