"""Keys and values on disk: the seam to the package that keeps them there, with a module of the group ``kv_offload``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ..errors import UsageError
from ..packages import modules
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from .seams import KVOffloader

if TYPE_CHECKING:
    from .session import Session
    from .streaming import Streaming


class KVOffload(Protocol):
    """What that module has."""

    def offloader(self, streaming: Streaming, session: Session, plan: Plan) -> KVOffloader | None:
        """What keeps keys and values of streamed layers elsewhere, if that is the plan: the one that is there, or
        another.

        Raises:
            StoreError: the disk has no room for them.
        """

    def check_room(self, size: ModelSize, plan: Plan, kv_dir: str | Path | None, io: str) -> None:
        """Raise a StoreError where the disk has no room for a plan's keys and values.

        Args:
            kv_dir: where they may lie; None: the cache folder.
            io: as in ``FileReader``.
        """

    def try_folder(self, folder: Path) -> None:
        """Raise a StoreError where they cannot lie in a folder."""


def kv_offload() -> KVOffload | None:
    """The module that does; None: no package has one."""
    return next((cast(KVOffload, module) for module in modules("kv_offload").values()), None)


def kv_disk(asked: str, name: str) -> str:
    """Whether keys and values may lie on disk, as ``ModelSize.kv_disk``; ``name``: of the option that asks for it.

    Raises:
        UsageError: they shall, and no package keeps them there.
    """
    if kv_offload() is not None:
        return asked
    if asked == "on":
        raise UsageError(f"{name} on: nothing here keeps them there: the package outcore_kv is missing; install it")
    return "off"
