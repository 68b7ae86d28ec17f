"""Whether what is written into a slot is what the device sees: everything that is streamed relies on it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..machine.device import device_kind
from .layout import BLOCK
from .ring import Slot

REWRITES = 100


def unseen_rewrites(times: int = REWRITES, nbytes: int = 16 * BLOCK) -> int:
    """Write ``times`` random contents into one slot and have the device add up the first view that was made of it.

    Returns:
        How often its sum was not NumPy's: 0 where slots work.
    """
    slot = Slot(nbytes, device_kind())
    view = slot.array[slot.base : slot.base + nbytes].view(mx.uint32)
    mx.eval(view)
    rng = np.random.default_rng(0)
    unseen = 0
    for _ in range(times):
        content = rng.integers(0, 2**32, nbytes // 4, dtype=np.uint32)
        slot.payload[:nbytes] = content.tobytes()
        # Sums of 32-bit numbers wrap around in both.
        unseen += mx.sum(view).item() != int(content.sum(dtype=np.uint32))
    return unseen
