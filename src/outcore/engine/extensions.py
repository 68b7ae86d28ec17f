"""Packages that join the engine: ``outcore_kv`` stores keys and values on disk, ``outcore_experts`` reads single
experts, ``outcore_rows`` knows rows of tables before a pass.

Each has a module of the group ``kv_offload``, ``on_demand`` or ``row_prefetch``. Without the second, all experts of a
layer are streamed; without the last, rows are read when they are looked up.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ..errors import UsageError
from ..packages import modules
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from .model_profile import ModelProfile
from .seams import ExpertCaches, ExpertFinder, KVOffloader

if TYPE_CHECKING:
    from .session import Session
    from .streaming import Streaming


class KVOffload(Protocol):
    def offloader(self, streaming: Streaming, session: Session, plan: Plan) -> KVOffloader | None:
        """Returns the KV offload that the plan asks for; None if it asks for none. Raises StoreError if the disk is too
        full."""

    def check_room(self, size: ModelSize, plan: Plan, kv_dir: str | Path | None, io: str) -> None:
        """Raises StoreError if the disk has no room for a plan's keys and values; ``kv_dir`` None: in the
        cache folder."""

    def try_folder(self, folder: Path) -> None:
        """Raises StoreError if keys and values cannot be stored in the folder."""


def kv_offload() -> KVOffload | None:
    return next((cast(KVOffload, module) for module in modules("kv_offload").values()), None)


def kv_disk(asked: str, name: str) -> str:
    """Returns the setting ``asked``, or ``off`` if no package offers KV offload. ``name`` names the option in errors.

    Raises:
        UsageError: ``asked`` is ``on`` and no package offers it.
    """
    if kv_offload() is not None:
        return asked
    if asked == "on":
        raise UsageError(f"{name} on: the package outcore_kv is missing; install it to store keys and values on disk")
    return "off"


class ExpertCacheSizes(Protocol):
    """Resizes the expert caches of a running model between passes."""

    @property
    def spare(self) -> list[int]: ...

    @property
    def returning(self) -> list[int]:
        """Bytes of each expert slot that was removed and could be added again."""

    def move(self, slots: int) -> int:
        """Removes ``slots`` slots, or adds them if negative. Returns how many changed."""

    def fit(self, size: ModelSize, step: int | None, allowed: int) -> None:
        """Makes room for a model of this size with smaller expert caches, or by streaming whole layers if none fit.

        Args:
            step: tokens of a prompt chunk; None: as many as there is room for.
            allowed: bytes that may be used now; at most the budget.
        """


class OnDemand(ExpertFinder, Protocol):
    def experts_for(self, streaming: Streaming, profile: ModelProfile, plan: Plan) -> ExpertCaches | None:
        """Returns the expert caches that the plan asks for, keeping the cached experts that fit; None if it asks for
        none."""

    def CacheSizes(self, session: Session, calibration: Calibration) -> ExpertCacheSizes: ...


def on_demand() -> OnDemand | None:
    return next((cast(OnDemand, module) for module in modules("on_demand").values()), None)
