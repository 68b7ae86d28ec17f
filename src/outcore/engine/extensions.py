"""Packages that join the engine: ``outcore_kv`` keeps keys and values on disk, ``outcore_experts`` reads experts alone.

Each is a module of the group ``kv_offload`` or ``on_demand``. Without the second, all experts of a layer are streamed.
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


class ExpertPools(Protocol):
    """Expert caches of a running model, between passes."""

    @property
    def spare(self) -> list[int]:
        """Bytes of each slot that can be given up."""

    @property
    def returning(self) -> list[int]:
        """Bytes of each slot that was given up."""

    def move(self, slots: int) -> int:
        """So many slots fewer, or more where that is negative. Returns how many it were."""

    def fit(self, size: ModelSize, step: int | None, allowed: int) -> None:
        """Caches that leave room for a model of that size; or layers streamed whole, where none do.

        Args:
            step: chunks of a prompt; None: as many tokens as there is room for.
            allowed: bytes of the budget that may be used now.

        Raises:
            BudgetError: there is no room for it.
        """


class OnDemand(ExpertFinder, Protocol):
    """What that module has."""

    def experts_for(self, streaming: Streaming, profile: ModelProfile, plan: Plan) -> ExpertCaches | None:
        """What reads experts one by one, if that is the plan. What the caches of before hold stays, as far as there
        are slots for it."""

    def Pools(self, session: Session, calibration: Calibration) -> ExpertPools: ...


def on_demand() -> OnDemand | None:
    """The module that does; None: no package has one."""
    return next((cast(OnDemand, module) for module in modules("on_demand").values()), None)
