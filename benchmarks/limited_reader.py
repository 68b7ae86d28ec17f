"""A reader that is limited to a rate: the shape of streaming from a slow disk, on a machine whose disk is fast."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from outcore.disk.layout import Extent, SlotCopy
from outcore.disk.reader import FileReader, Read
from outcore.engine import binding


class LimitedRead(Read):
    """A read that is not there before ``due``, on ``time.perf_counter``."""

    due = 0.0

    @property
    def ready(self) -> bool:
        return time.perf_counter() >= self.due and super().ready

    def wait_quietly(self) -> None:
        if not self.cancelled:
            time.sleep(max(0.0, self.due - time.perf_counter()))
        super().wait_quietly()

    def wait(self) -> None:
        self.wait_quietly()
        super().wait()


class LimitedReader(FileReader):
    """A reader whose units come one after the other at ``rate`` bytes a second, or later."""

    rate = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = 0.0
        self._order = threading.Lock()

    def submit(
        self,
        name: str,
        extents: Sequence[Extent],
        target: memoryview,
        copies: Sequence[SlotCopy] = (),
        read: Read | None = None,
    ) -> Read:
        read = super().submit(name, extents, target, copies, read)
        with self._order:
            self._free = max(self._free, time.perf_counter()) + sum(e.nbytes for e in extents) / self.rate
            read.__class__ = LimitedRead
            assert isinstance(read, LimitedRead)
            read.due = self._free
        return read


def limit_reads(rate: float) -> None:
    """Let every model that is loaded from now on read at most ``rate`` bytes a second."""
    LimitedReader.rate = rate
    vars(binding)["FileReader"] = LimitedReader
