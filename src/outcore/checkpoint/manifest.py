"""The manifest of a packed copy: the model it was made from, and size, time and checksum of each file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import StoreError
from ..machine.small_files import INDEX_BYTES, parse_json, read_small

MANIFEST = "manifest.json"
PARTIAL_MANIFEST = "manifest.partial.json"
FORMAT = "outcore-store"
SCHEMA, PLAIN_SCHEMA = 2, 1  # copies without codings keep schema 1, which earlier versions of Outcore read
PLAIN, COMPACT = "plain", "compact"
PLANES: Final = "planes"  # as a copy's coding with the number of high bits: ``planes:2`` (``stored_planes.py``)
CODING = re.compile(r"plain|compact|planes:[1-7]")
SPLIT: Final = "split16"
OVERLAY: Final = "overlay"
FULL: Final = "full"
DRAFT: Final = "draft"
FILE_NAME = re.compile(r"(layer_[0-9]{4,6}|non_layer)\.safetensors")

AGAIN = "pack again (outcore pack --force)"

_Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
_Text = Annotated[str, Field(max_length=1000)]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Checked(BaseModel):
    """Base of manifest models: types are strict, and fields of other Outcore versions are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", populate_by_name=True)


class Record(_Checked):
    """A file of a packed copy: size in bytes, modification time and the xxh3_128 of its bytes."""

    nbytes: Annotated[_Int64, Field(alias="bytes", ge=0)]
    mtime_ns: _Int64
    checksum: Annotated[_Digest, Field(alias="xxh3_128")]


class Coded(_Checked):
    """How an encoded tensor is stored, and the xxh3_128 of its decoded bytes.

    Attributes:
        coding: ``split16`` (``outcore_packs/codings.py``), which has a side table that stays in memory, or ``planes``
            (``outcore_packs/stored_planes.py``).
        bits, high: for ``planes``, the bits of a quantized weight, and how many of them the high plane has; else 0.
    """

    coding: Literal["split16", "planes"]
    checksum: Annotated[_Digest, Field(alias="xxh3_128")]
    bits: Annotated[int, Field(ge=0, le=8)] = 0
    high: Annotated[int, Field(ge=0, le=7)] = 0

    def name(self, path: str) -> str:
        return f"{path}.{self.coding}"

    def side_table(self, path: str) -> str:
        return f"{path}.{self.coding}.beside"


class PackedFrom(_Checked):
    """The model that was packed.

    Attributes:
        folder: name of its folder.
        identity: ``identity_of`` the model.
        mlx_lm, mlx: the versions that loaded it; empty in old copies for MLX.
    """

    folder: _Text
    identity: _Digest
    mlx_lm: _Text
    mlx: _Text = ""

    def same(self, other: PackedFrom) -> bool:
        return self.model_copy(update={"folder": ""}) == other.model_copy(update={"folder": ""})


class Manifest(_Checked):
    """A manifest whose values have the right types. ``open_packed`` checks that the files match it.

    Attributes:
        coding: the coding that the user chose with ``outcore pack --coding``.
        codings: by parameter path, the tensors that are stored encoded.
    """

    kind: Literal["overlay", "full", "draft"]
    source: PackedFrom
    files: dict[str, Record]
    coding: Annotated[str, Field(pattern=rf"\A({CODING.pattern})\z")] = "plain"
    codings: dict[_Text, Coded] = Field(default_factory=dict)


def is_packed(folder: Path, manifest: str = MANIFEST) -> bool:
    """Whether the folder has a file named ``manifest`` that Outcore wrote. Does not check the other files.

    ``PARTIAL_MANIFEST`` is the manifest of a pack that was cut off or still runs.
    """
    try:
        found = parse_json(read_small(folder / manifest, INDEX_BYTES), twins=False)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        StoreError: it is missing, not Outcore's, of an unknown schema, or garbled.
    """
    try:
        found = parse_json(read_small(path, INDEX_BYTES), twins=False)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    except ValueError as error:
        raise StoreError(f"{path}: not JSON ({' '.join(str(error).split())[:200]}); {AGAIN}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StoreError(f"{path}: not the manifest of a packed copy; give a folder that outcore pack wrote")
    if type(found.get("schema")) is not int or not PLAIN_SCHEMA <= found["schema"] <= SCHEMA:
        known = f"{PLAIN_SCHEMA} to {SCHEMA}"
        raise StoreError(f"{path}: schema {str(found.get('schema'))[:20]!a}, this Outcore reads {known}; {AGAIN}")
    try:
        manifest = Manifest.model_validate(found)
    except ValidationError as error:
        raise StoreError(f"{path}: garbled: {first_fault(error)}; {AGAIN}") from error
    for name in manifest.files:
        if not FILE_NAME.fullmatch(name):
            raise StoreError(f"{path}: names {name[:80]!a}, which is no file of a packed copy; do not use this folder")
    return manifest


def first_fault(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:80] for part in found["loc"])
    return f"{ascii(where)[1:-1]}: {found['msg'][:120]}"
