"""What stands behind a loaded model, as ``model.outcore``."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from ..checkpoint.lazy_model import position_limit
from ..modules.module_tree import modules
from ..plan.machine_profile import Calibration
from ..plan.plan import Plan
from ..sizes import format_size
from .binding import ReadSettings
from .engine import Engine, State
from .model_profile import ModelProfile


class Session(Engine):
    """A running model, and what decoding knows of it from text to text. Arguments as of ``Engine``.

    Attributes:
        cpu_streams: MLX streams that linear layers are split over.
        forms: what its caches look like; none where that is not known.
        positions: tokens that the model has positions for at all; None: for any number.
        max_context: tokens that the model itself was made for; None if it does not say. Beyond them it errs.
        prefill_step_size: tokens of a prompt at a time, if they were asked for.
        vocabulary: tokens that the model has embeddings for; None where that is not known.
        prefix: keeps what was computed of prompts (``decode.prefix``); None: nothing does.
        experience: what drafting has taught (``decode.speculative.acceptance``); None: it has not begun.
        random_after: the state in which mlx-lm's ``load`` would have left MLX's random numbers; ours left them as they
            were.
        found: tokens of the last prompt that were computed before, and found (``prefix``).
        in_cache: tokens of the last text, its prompt and then its answer, that went into the ``prompt_cache`` given.
    """

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        calibration: Calibration,
        reading: ReadSettings,
        *,
        prefix: Any = None,
        experience: Any = None,
        random_after: int = 0,
        cpu_streams: int = 1,
        prefill_step_size: int | None = None,
        **more: Any,
    ) -> None:
        embeddings = [m for m in modules(profile.lazy.model) if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
        self.vocabulary = max((m.weight.shape[0] for m in embeddings), default=None)
        self.prefix, self.experience, self.random_after = prefix, experience, random_after
        self.forms, self.positions = profile.forms, position_limit(profile.lazy.config)
        self.max_context, self.cpu_streams, self.prefill_step_size = profile.max_context, cpu_streams, prefill_step_size
        self.found = self.in_cache = 0
        super().__init__(
            plan,
            profile,
            calibration,
            reading,
            cpu_streams=cpu_streams,
            prefill_step_size=prefill_step_size,
            **more,
        )

    def __repr__(self) -> str:
        plan = self.plan
        layers = f"{plan.held} in memory"
        ring = f", the others through {plan.slots} slots of {format_size(plan.slot_bytes)}" if plan.streams else ""
        peak, budget = format_size(plan.peak_bytes), format_size(plan.budget_bytes)
        closed = ", closed" * (self.state is State.CLOSED)
        return f"<Session{closed}: {layers}{ring}; {peak} planned of {budget}; reads {self.io}>"

    def close(self) -> None:
        super().close()
        with self.exclusive:
            drafts = getattr(self.drafting, "model", None)
            if (own := getattr(drafts, "outcore", None)) is not None:
                own.close()  # another model, which was loaded for this one

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
