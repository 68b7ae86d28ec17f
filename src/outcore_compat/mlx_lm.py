"""Streams the models of mlx-lm's own programs: replaces mlx-lm's functions wherever they have been imported.

    from outcore_compat.mlx_lm import apply_patch, remove_patch

    apply_patch(memory="4GB")
    import mlx_lm
    model, tokenizer = mlx_lm.load("mlx-community/Qwen3.5-9B-MLX-6bit")  # any program, unchanged
    remove_patch()

Or, without a changed line: ``python -m outcore.integrations.mlx_lm --memory 4GB -m mlx_lm.chat ...``.
"""

from __future__ import annotations

from typing import Any

from outcore.options import LoadOptions

from .patched_calls import PAIRS
from .settings import PatchSettings, applied, applied_lock
from .swapped_names import SwappedNames

__all__ = ["Patch", "apply_patch", "remove_patch"]

_names = SwappedNames(PAIRS, except_in="outcore")


class Patch:
    """An applied patch. ``remove``, or the end of its ``with`` block, ends it."""

    def __init__(self, settings: PatchSettings) -> None:
        self._settings = settings
        with applied_lock:
            applied.append(settings)
            _names.put()

    def remove(self) -> None:
        """Ends this patch. Restores mlx-lm if there is no other. Safe to call twice."""
        with applied_lock:
            if self._settings in applied:
                applied.remove(self._settings)
                _give_back()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply_patch(**options: Any) -> Patch:
    """Has ``mlx_lm.load`` stream models that are larger than memory, and mlx-lm's functions run them.

    Every name in a loaded module that is mlx-lm's ``load``, ``generate``, ``stream_generate``, ``batch_generate`` or
    ``BatchGenerator`` becomes Outcore's; programs that are imported later get these, too. Models
    that are already loaded stay as they are; those loaded under the patch stay streamed after it ends.

    Patches nest: the last one counts until it is removed.

    Args:
        options: fields of ``outcore.LoadOptions`` for every model that is loaded; all models share ``memory``.

    Returns:
        The patch, whose ``remove`` ends this patch alone; it is also a context manager.

    Raises:
        UsageError: an option is invalid.
    """
    return Patch(PatchSettings(LoadOptions(**options)))


def remove_patch() -> None:
    """Ends all patches: restores every name, also in modules that were imported meanwhile. Safe to call twice."""
    with applied_lock:
        if applied:
            applied.clear()
            _give_back()


def _give_back() -> None:
    if not applied:
        _names.give_back()
