"""The seam to ``outcore_packs``: whole packed copies, and the forms in which they store matrices."""

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
    """Reads matrices that are stored in other forms than they are used in."""

    def as_used(
        self, folder: Path, tensors: Mapping[str, TensorInfo], codings: Mapping[str, Coded]
    ) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
        """A copy's tensors as they are used, and what decodes those that have a coding, both by their names.

        Raises:
            StoreError: a coding's tensor is not there or not of its form.
        """


def codings() -> Codings | None:
    """The package that knows forms; None: it is not there."""
    return cast(Codings | None, modules("codings").get("packs"))


def as_used(
    folder: Path, tensors: dict[str, TensorInfo], manifest: Manifest
) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
    """A copy's tensors as they are used, and what decodes them, by their names.

    Raises:
        StoreError: its forms are not known here, or a tensor is not of its form.
    """
    if not manifest.codings:
        return tensors, {}
    if (known := codings()) is None:
        what = "needs the package outcore_packs, which is not there"
        raise StoreError(f"{folder}: packed with --coding {manifest.coding}, which {what}; install outcore whole")
    return known.as_used(folder, tensors, manifest.codings)
