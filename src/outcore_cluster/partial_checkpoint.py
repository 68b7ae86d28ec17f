"""A model of the Hub of which one rank has downloaded what it needs: shards that are not there, told by their headers.

Headers of shards can be had without their bytes, so a model is built, cut and shared out before any of it is
downloaded. Which shards a rank did without is kept in the cache folder, since a model's own folder is only read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
from pydantic import BaseModel, Field, ValidationError

from outcore.checkpoint.checkpoint import ITEM_BYTES, Checkpoint, TensorInfo, code_print, read_header, read_object
from outcore.checkpoint.lazy_model import DTYPES, LazyModel, open_lazily
from outcore.checkpoint.packed_store import openers
from outcore.errors import CheckpointError, MissingFileError, StoreError
from outcore.machine.cache_folder import cache_dir, make_cache
from outcore.machine.small_files import CONFIG_BYTES, INDEX_BYTES, parse_json, read_small

SHARES = "rank-shards"


class Absent(BaseModel, strict=True):
    """A tensor that is not there, because no call of this rank needs it."""

    name: Annotated[str, Field(max_length=4096)]
    dtype: Annotated[str, Field(max_length=10)]
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=16)]


class RankLayers(BaseModel, strict=True):
    """What one rank of several holds of a model.

    Attributes:
        rank: whose folder it is, of ``ranks``. ``owners``: the rank of each layer, by its number.
        absent: what other ranks hold, by the file that would have it in a whole copy.
    """

    rank: Annotated[int, Field(ge=0)]
    ranks: Annotated[int, Field(ge=2, le=10_000)]
    owners: list[Annotated[int, Field(ge=0)]]
    absent: dict[str, list[Absent]] = Field(default_factory=dict)

    @property
    def who(self) -> str:
        """As errors name it."""
        return f"rank {self.rank} of {self.ranks}"


def name_in_hub(folder: Path) -> str | None:
    """What tells a folder of the Hub's cache from others on every machine: repository and commit."""
    folder = folder.absolute()
    return f"{folder.parent.parent.name}@{folder.name}" if folder.parent.name == "snapshots" else None


def _record(folder: Path) -> Path | None:
    name = name_in_hub(folder)
    return None if name is None else cache_dir() / SHARES / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def keep_share(folder: Path, share: RankLayers) -> None:
    """Note which shards of a model of the Hub this rank does without."""
    path = _record(folder)
    if path is None:
        return
    make_cache()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(share.model_dump()))
    temporary.rename(path)


def kept_share(folder: Path) -> RankLayers | None:
    """What was noted of a folder, if shards are missing and these are all; None: nothing, or it is whole by now."""
    path = _record(folder)
    if path is None or not path.exists():
        return None
    try:
        share = RankLayers.model_validate(parse_json(read_small(path, INDEX_BYTES), twins=False))
    except (OSError, ValueError, ValidationError):
        return None
    plain = all(Path(name).name == name and name.endswith(".safetensors") for name in share.absent)
    return share if plain and any(not (folder / name).exists() for name in share.absent) else None


def tensors_told(folder: Path, files: Mapping[str, list[Absent]]) -> dict[str, TensorInfo]:
    """Tensors of shards that are not there, by name.

    Raises:
        CheckpointError: of a dtype that MLX does not load, or two of one name.
    """
    found: dict[str, TensorInfo] = {}
    for file, tensors in files.items():
        offset = 8
        for each in tensors:
            if each.dtype not in ITEM_BYTES or each.name in found:
                raise CheckpointError(f"{folder / file}: tensor {each.name[:120]!a} cannot be loaded; download it all")
            nbytes = ITEM_BYTES[each.dtype]
            for n in each.shape:
                nbytes *= n
            found[each.name] = TensorInfo(each.name, folder / file, each.dtype, tuple(each.shape), offset, nbytes)
            offset += nbytes
    return found


def open_partial(folder: Path, share: RankLayers, **arguments: Any) -> LazyModel:
    """Open a model lazily of which some shards are not there.

    Raises:
        CheckpointError: a shard that should be there is not, or the model cannot be made.
    """
    absent = tensors_told(folder, share.absent)
    files = tuple(sorted(path for path in folder.glob("model*.safetensors") if path.name not in share.absent))
    tensors = dict(absent)
    weights: dict[str, mx.array] = {}
    for file in files:
        tensors |= read_header(file)
        found: Any = mx.load(str(file))
        weights |= found
    names = {info.file.name for info in tensors.values()}
    if missing := sorted(_named(folder) - names):
        raise MissingFileError(f"{folder}: has no {', '.join(missing[:3])}; download the model again")
    for info in absent.values():
        weights[info.name] = mx.broadcast_to(mx.zeros((1,) * len(info.shape), dtype=DTYPES[info.dtype]), info.shape)
    _, config = read_object(folder / "config.json", CONFIG_BYTES)
    known = f"{name_in_hub(folder)}".encode() + code_print(folder, config)
    identity = hashlib.sha256(known).hexdigest()[:32]
    checkpoint = Checkpoint(folder, files, tensors, identity)
    lazy = open_lazily(checkpoint, **arguments, weights=weights)
    return replace(lazy, share=share, again=partial(open_partial, folder, share, **arguments))


def _open_kept(folder: Path, arguments: dict[str, Any]) -> LazyModel | None:
    share = kept_share(folder)
    return None if share is None else open_partial(folder, share, **arguments)


openers.append(_open_kept)


def _named(folder: Path) -> set[str]:
    """Shards that the index names."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return set()
    try:
        index = parse_json(read_small(path, INDEX_BYTES), twins=False)
        return {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: cannot be read; download the model again") from error


def headers_in_hub(repo: str, revision: str) -> dict[str, list[Absent]] | None:
    """What each shard of a model of the Hub holds, without downloading any; None: the Hub does not tell, or there is
    one file only."""
    import huggingface_hub

    try:
        found = huggingface_hub.get_safetensors_metadata(repo, revision=revision)
        if not found.sharded:
            return None
        return {
            file: [
                Absent(name=name, dtype=str(info.dtype), shape=list(info.shape))
                for name, info in sorted(told.tensors.items(), key=lambda item: tuple(item[1].data_offsets))
            ]
            for file, told in found.files_metadata.items()
        }
    except Exception:  # the Hub's errors share no base; without headers all is downloaded, and that tells what is wrong
        return None
