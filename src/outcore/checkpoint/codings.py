"""The interface to ``outcore_packs``: packed copies and the forms in which they store matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from ..errors import StoreError
from ..packages import modules
from .checkpoint import TensorInfo
from .lazy_model import Decoder
from .manifest import Coded, Manifest


class Codings(Protocol):
    def as_used(
        self, folder: Path, tensors: Mapping[str, TensorInfo], codings: Mapping[str, Coded]
    ) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
        """Return a copy's tensors as they are used, and the decoders of those that have a coding, both by name.

        Raises:
            StoreError: a coding's tensor is missing or not of its form.
        """


def codings() -> Codings | None:
    return cast(Codings | None, modules("codings").get("packs"))


def as_used(
    folder: Path, tensors: dict[str, TensorInfo], manifest: Manifest
) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
    """Like ``Codings.as_used``; also raises ``StoreError`` if the package is missing."""
    if not manifest.codings:
        return tensors, {}
    if (known := codings()) is None:
        what = "needs the package outcore_packs, which is not there"
        raise StoreError(f"{folder}: packed with --coding {manifest.coding}, which {what}; install outcore whole")
    return known.as_used(folder, tensors, manifest.codings)
