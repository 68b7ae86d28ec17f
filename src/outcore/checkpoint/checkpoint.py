"""Checks a model's folder, and finds every tensor on disk by reading the shards' safetensors headers.

Everything a file says is checked first: a truncated download or a hostile header is refused with the file and the byte
before MLX sees it, and configuration files before mlx-lm or transformers open them. The format of weights: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, HeaderError, MissingFileError
from ..machine.small_files import (
    CONFIG_BYTES,
    INDEX_BYTES,
    TOKENIZER_BYTES,
    check_small,
    parse_json,
    read_small,
    state_of,
)
from ..sizes import format_size
from ..text import one_line, quoted

# The dtypes that mx.load of MLX 0.32.4 reads, each tried. It refuses F64, F8_E5M2 and types smaller than a byte.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "C64"), 8),
}
_MAX_DIMENSION = 2**31 - 1  # an MLX shape is int32
_SHARD = re.compile(r"(model.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")
_WEIGHTS = "model*.safetensors"  # what mlx_lm.utils.load_model globs for
_INDEX = "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"
_AGAIN = "download it again"
GGUF = "GGUF, another program's format; get the model's MLX version, such as from mlx-community on the Hub"
_OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.npz", "*.safetensors")  # named in an error, never read


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place on disk.

    Attributes:
        name: as in the file, before ``sanitize``.
        dtype: safetensors name, a key of ``ITEM_BYTES``: ``BF16``, ``U32``, ``F8_E4M3``.
        shape: in elements of ``dtype``; empty for a scalar.
        offset: first byte, from the start of the file.
        nbytes: bytes on disk; the product of ``shape`` and the item size unless ``stored`` is set.
        stored: dtype and shape of the encoded form on disk; None: the tensor is stored as it is used.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stored: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose files are complete and whose headers are consistent.

    Attributes:
        files: the weight files that mlx-lm would load, sorted by name.
        tensors: every tensor of every file, by name.
        notes: results that are computed once and kept here by name, such as ``identity``.
    """

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    _were: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    notes: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def check(self) -> None:
        """Raise ``CheckpointError`` if a file has changed since its header was read; for open files see ``Reader``."""
        for file, was in zip(self.files, self._were, strict=False):
            if state_of(file) != was:
                raise CheckpointError(f"{file}: was written to while the model was opened; load it again")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check a local model folder and find every tensor in the weight files that ``mlx_lm.load`` would load.

    Raises:
        MissingFileError: the folder, config.json, a shard or a tensor that the index names is missing, or all weights.
        HeaderError: a weight file is damaged.
        CheckpointError: config.json or the index is invalid, or two files hold a tensor of the same name.
    """
    if not folder.is_dir():
        if folder.exists():
            raise CheckpointError(not_a_folder(folder))
        raise MissingFileError(f"{folder}: no such folder; check the path")
    require_config(folder)
    read_object(folder / "config.json", CONFIG_BYTES)
    files = tuple(sorted(folder.glob(_WEIGHTS)))
    index = _read_index(folder / _INDEX)
    if index is not None:
        missing = {name for name in index.values() if not (folder / name).exists()}
        of = f"that {_INDEX} names (delete that index if it is a left-over)"
    else:
        missing, of = _missing_shards(files), "of its numbered shards"
    if missing:
        many, names = f"{len(missing)} file{'s' * (len(missing) > 1)}", _list(sorted(missing))
        raise MissingFileError(f"{folder}: looks half-downloaded: {many} missing {of}: {names}; {_AGAIN}")
    if stray := sorted(set((index or {}).values()) - {file.name for file in files}):
        raise CheckpointError(f"{folder / _INDEX}: names {_list(stray)}, but mlx-lm only loads {_WEIGHTS}; rename them")
    if not files:
        others = sorted({file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern)})
        what = f"but {_list(others)}; get its MLX version, or convert it with mlx_lm.convert" if others else _AGAIN
        raise MissingFileError(f"{folder}: no {_WEIGHTS} here; {what}")
    tensors: dict[str, TensorInfo] = {}
    were = tuple(state_of(file) for file in files)  # taken first, so that a change while headers are read is noticed
    for file in files:
        found = read_header(file)
        for twin in tensors.keys() & found.keys():
            raise CheckpointError(
                f"{file}: tensor {quoted(twin)} is also in {tensors[twin].file.name};"
                " two versions of the model lie in one folder, move one away"
            )
        tensors.update(found)
    for name, file_name in (index or {}).items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise MissingFileError(
                f"{folder / file_name}: has no tensor {quoted(name)}, which {_INDEX} places there;"
                " the files are of different versions, download the model again"
            )
    return Checkpoint(folder, files, tensors, were)


def require_config(folder: Path) -> None:
    """Raise ``MissingFileError`` if the folder has no config.json; the message says what a model folder is."""
    if os.path.lexists(folder / "config.json"):
        return
    inside = sorted(folder.glob("*/config.json")) or sorted(folder.glob("snapshots/*/config.json"))
    which = f"give {inside[0].parent}" if inside else "give the folder that has them, or a Hub model owner/name"
    raise MissingFileError(
        f"{folder}: no config.json here; a model folder holds config.json, {_WEIGHTS} and a tokenizer's files: {which}"
    )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors that a safetensors file's header lists, by name and in its order. Reads only the header.

    Raises:
        MissingFileError: no such file, or a dangling link.
        HeaderError: the header or the length of the file violates the format.
        CheckpointError: the file cannot be read.
    """
    raw, status = header_bytes(path)
    return _parse_header(path, raw, status.st_size)


def header_bytes(path: Path) -> tuple[bytes, os.stat_result]:
    """Return a safetensors file's JSON header and the file's status; raises as ``read_header``."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: a FIFO would block
            raise HeaderError(f"{path}: not a regular file; put the safetensors file itself there")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            _check_length(path, prefix, length, status.st_size)
            raw = file.read(length)
    except FileNotFoundError as error:
        what = f"links to {path.readlink()}, which is not there" if path.is_symlink() else "missing"
        raise MissingFileError(f"{path}: {what}; download the model again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if len(raw) != length:
        raise HeaderError(f"{path}: got {len(raw)} of {length} header bytes: the file was cut off meanwhile; {_AGAIN}")
    return raw, status


def _check_length(path: Path, prefix: bytes, length: int, size: int) -> None:
    if prefix == b"version ":
        raise HeaderError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    if prefix.startswith(b"GGUF"):
        raise HeaderError(f"{path}: a GGUF file under the name of a safetensors file; get the model's MLX version")
    if len(prefix) < 8:
        raise HeaderError(f"{path}: {size} bytes, too short for any safetensors file; {_AGAIN}")
    if length > INDEX_BYTES:
        raise HeaderError(f"{path}: byte 0: claims a header of {length} bytes, more than {INDEX_BYTES}; {_AGAIN}")
    if length > size - 8:
        raise HeaderError(f"{path}: looks half-downloaded: {size} bytes, the header alone needs {8 + length}; {_AGAIN}")


def _parse_header(path: Path, raw: bytes, size: int) -> dict[str, TensorInfo]:
    if not raw.startswith(b"{"):
        raise HeaderError(f"{path}: byte 8: the header is not a JSON object; this is not a safetensors file")
    try:
        header = parse_json(raw, twins=False)
    except ValueError as error:
        raise HeaderError(f"{path}: the header is not JSON ({one_line(error)}); {_AGAIN}") from error
    metadata = header.pop("__metadata__", None)
    if metadata is None:  # mx.save_safetensors writes null where it was given none
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(f"{path}: __metadata__ must map strings to strings; {_AGAIN}")
    data = 8 + len(raw)
    tensors = {name: _parse_tensor(path, name, entry, data) for name, entry in header.items()}
    # The format allows neither holes nor overlaps, so the last tensor must end where the file ends.
    end = data
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else f"leaves a hole from byte {end}"
            raise HeaderError(f"{path}: tensor {quoted(tensor.name)} at byte {tensor.offset} {what}")
        end += tensor.nbytes
    if end > size:
        raise HeaderError(
            f"{path}: looks half-downloaded: {size} bytes where the header says {end}"
            f" ({format_size(end - size)} missing); {_AGAIN}"
        )
    if end < size:
        raise HeaderError(f"{path}: {size} bytes where the header says {end}: it cannot be trusted; {_AGAIN}")
    return tensors


def _parse_tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{where}: needs an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise HeaderError(f"{where}: dtype {quoted(str(dtype))} cannot be loaded by MLX ({', '.join(ITEM_BYTES)})")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= _MAX_DIMENSION for n in shape):
        raise HeaderError(f"{where}: shape must be a list of integers from 0 to {_MAX_DIMENSION}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise HeaderError(f"{where}: data_offsets must be two integers, none negative")
    begin, end = offsets
    if begin > end or end >= 2**63:
        raise HeaderError(f"{where}: data_offsets {quoted(f'{begin}, {end}')} are not a range of bytes")
    nbytes = 0 if 0 in shape else ITEM_BYTES[dtype]
    for n in shape:
        nbytes *= n
        if nbytes > end - begin:  # stop early: the product of a hostile shape has millions of digits
            break
    if nbytes != end - begin:
        raise HeaderError(f"{where}: shape {quoted(str(shape[:8]))} of {dtype} does not fill its {end - begin} bytes")
    return TensorInfo(name, path, dtype, tuple(shape), data + begin, nbytes)


def _read_index(path: Path) -> dict[str, str] | None:
    if not path.exists() and not path.is_symlink():
        return None
    index = read_object(path, INDEX_BYTES, twins=False)[1].get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{path}: no weight_map from tensor names to file names; {_AGAIN}")
    for name in set(index.values()):
        # Judged by name, not by link target: the Hub's cache links every file to a blob outside of the folder.
        if name in {"", ".", ".."} or re.search(r"[/\\\0:]", name) or len(name) > 200:
            raise CheckpointError(f"{path}: {quoted(name)} may lead out of the folder; do not use this model")
    return index


def read_object(path: Path, most: int, *, twins: bool = True) -> tuple[bytes, dict[str, Any]]:
    """Read a file of at most ``most`` bytes; return its bytes and its JSON object. ``twins`` as in ``parse_json``."""
    try:
        raw = read_small(path, most)
        found = parse_json(raw, twins=twins)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: missing; every model needs this file: download it again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({one_line(error)}); {_AGAIN}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds no JSON object; {_AGAIN}")
    return raw, found


def _missing_shards(files: Iterable[Path]) -> set[str]:
    """Return the file names that are missing from numbered series such as model-00002-of-00004.safetensors."""
    names = {file.name for file in files}
    series = {(m[1], m[3]) for m in map(_SHARD.fullmatch, names) if m}
    return {f"{stem}-{n:05}-of-{last}.safetensors" for stem, last in series for n in range(1, int(last) + 1)} - names


def not_a_folder(path: Path) -> str:
    if path.suffix.lower() == ".gguf":
        return f"{path}: {GGUF}"
    if path.suffix in {".safetensors", ".json"}:
        return f"{path}: a file; give its folder instead: {path.parent}"
    return f"{path}: a file; give a folder with config.json and {_WEIGHTS}, or a Hub model owner/name"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(quoted(name) if not name.isprintable() else name for name in names[:5]) + more


CONFIG = "config.json"

_LAYERS = re.compile(r"(num|n)_([a-z_]+_)?(layers?|blocks?)|depth")
_COUNT = re.compile(r"(num|n)_[a-z_]+")
_MOST = 1 << 20  # Largest count in a configuration that is accepted for anything but layers: experts, heads, groups.

# A configuration may have so many more layers than there are tensors, since a layer can be used more than once.
_SLACK = 64

# Files that mlx-lm and transformers open by themselves. Other files in the folder do not matter.
_READ = re.compile(
    r"(.*config|.*\.index|tokenizer|special_tokens_map|added_tokens|vocab|chat_template|merges)\.(json|txt|jinja)"
    r"|.*\.(model|tiktoken|jinja|py)"
)

_MOST_BYTES = {CONFIG: CONFIG_BYTES, "generation_config.json": CONFIG_BYTES, "hf_quant_config.json": CONFIG_BYTES}


class LiteralFolder(type(Path())):  # type: ignore[misc]  # ``Path()`` makes an object of its subclass PosixPath
    """A folder in which mlx-lm can glob even if the folder's own name has special characters, such as ``[``."""

    def __truediv__(self, name: Any) -> Path:
        return Path(glob.escape(str(self)) if "*" in str(name) else str(self)) / name


def read_config(folder: Path, tensors: int) -> dict[str, Any]:
    """Read a model's config.json. Refuses one with far more layers than tensors: mlx-lm would build each of them.

    Args:
        tensors: number of tensors in the model's files.
    """
    check_files(folder)
    _, config = read_object(folder / CONFIG, CONFIG_BYTES)
    for name, value in _integers(config):
        most = tensors + _SLACK if _LAYERS.fullmatch(name) else _MOST if _COUNT.fullmatch(name) else None
        if most is not None and value > most:
            what = f"the model's files hold {tensors} tensors" if most != _MOST else f"the limit is {_MOST}"
            raise CheckpointError(f"{folder / CONFIG}: {name} is {str(value)[:20]}, but {what}; download it again")
    return config


def config_files(folder: Path) -> list[Path]:
    """Return the files of a model folder, other than weights, that mlx-lm and transformers open by themselves."""
    try:
        return sorted(path for path in folder.iterdir() if _READ.fullmatch(path.name))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error


def check_files(folder: Path) -> None:
    """Check that every file that mlx-lm or transformers opens is a regular file of plausible size."""
    for path in config_files(folder):
        most = INDEX_BYTES if path.name.endswith(".index.json") else _MOST_BYTES.get(path.name, TOKENIZER_BYTES)
        try:
            if not stat.S_ISDIR(path.stat().st_mode):
                check_small(path, most)
        except FileNotFoundError:  # a dangling link counts as missing
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _integers(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    todo: list[Any] = [config]
    while todo:
        at = todo.pop()
        if isinstance(at, dict):
            yield from ((key, value) for key, value in at.items() if isinstance(value, int))
            todo += at.values()
        elif isinstance(at, list):
            todo += at
