"""Routed experts on demand: the seam to the package that reads them one by one, with a module of the group
``on_demand``. Without it all experts of a layer are streamed with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from ..packages import modules
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from .model_profile import ModelProfile
from .seams import ExpertCaches, ExpertFinder

if TYPE_CHECKING:
    from .session import Session
    from .sweeps import StreamedPasses


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

    def experts_for(self, streaming: StreamedPasses, profile: ModelProfile, plan: Plan) -> ExpertCaches | None:
        """What reads experts one by one, if that is the plan. What the caches of before hold stays, as far as there
        are slots for it."""

    def Pools(self, session: Session, calibration: Calibration) -> ExpertPools: ...


def on_demand() -> OnDemand | None:
    """The module that does; None: no package has one."""
    return next((cast(OnDemand, module) for module in modules("on_demand").values()), None)
