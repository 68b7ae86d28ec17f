"""Self-tests: the reader returns the file's bytes on this disk, and the device sees what is written into a slot."""

from __future__ import annotations

import contextlib
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..machine.device import device_kind
from ..sizes import BLOCK
from . import disk_calls
from .layout import Source, place_unit
from .reader import FileReader
from .ring import Slot

# Bytes from the start of the file. Reads at the third and the sixth once returned wrong bytes.
ODD_OFFSETS = (0, 1, 1288, BLOCK - 1, BLOCK, 7936, 16385)

ALIGNMENTS = (1, 8, 256)  # Alignments of parameters in a slot, in bytes: a CPU's, the files' own and a GPU's.

REWRITES = 100


def wrong_reads(path: Path, io: str = "auto") -> tuple[tuple[int, int, str], ...]:
    """Read a file at odd offsets, as a model's files are read, and compare with its bytes. Takes milliseconds.

    Returns:
        Offset, alignment and kind (``direct`` or ``cached``) of every read that returned wrong bytes.
    """
    size, found = path.stat().st_size, []
    with contextlib.closing(FileReader([path], io=io, threads=1)) as reader, path.open("rb") as file:
        for offset in ODD_OFFSETS:
            nbytes = min(3 * BLOCK + 17, size - offset)
            if nbytes <= 0:
                continue
            file.seek(offset)
            expected = file.read(nbytes)
            disk_calls.system().forget(file.fileno(), offset, nbytes)
            for align in ALIGNMENTS:
                source = Source("x", "U8", (nbytes,), path, offset, nbytes)
                unit = place_unit("probe", [source], direct=reader.direct, align=align)
                slot = Slot(unit.slot_bytes)
                reader.submit("probe", unit.extents, slot.payload).wait()
                at = unit.fields[0].at
                if slot.payload[at : at + nbytes] != expected:
                    found.append((offset, align, "direct" if reader.direct else "cached"))
    return tuple(found)


def unseen_rewrites(times: int = REWRITES) -> int:
    """Write new numbers into a slot ``times`` times; each time, the device sums a view made before the first write.

    Returns:
        How many sums differed from NumPy's sum of the numbers written. Streaming works only if there are none.
    """
    nbytes = 16 * BLOCK
    slot = Slot(nbytes, device_kind())
    view = slot.array[slot.base : slot.base + nbytes].view(mx.uint32)
    mx.eval(view)
    rng = np.random.default_rng(0)
    unseen = 0
    for _ in range(times):
        content = rng.integers(0, 2**32, nbytes // 4, dtype=np.uint32)
        slot.payload[:nbytes] = content.tobytes()
        # MLX and NumPy both let sums of 32-bit numbers wrap around.
        unseen += mx.sum(view).item() != int(content.sum(dtype=np.uint32))
    return unseen
