"""Seconds by the clock, and those in which this process's threads worked: what others take of a processor is not in
the second.

The kernel counts each thread's time on a processor (Linux: /proc/self/task/*/schedstat, in nanoseconds). A graph is
built by one thread and computed by others, side by side: it takes what the first takes and then what the busiest of the
others does. Beside seven processes on two cores, a product of 12 ms took 35 to 150 ms by the clock, and 11.2 to 11.8 by
this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TASKS = Path("/proc/self/task")


def other_threads(tasks: Path = TASKS) -> dict[str, float] | None:
    """Seconds that each other thread of this process was on a processor; None where the system does not say."""
    own = str(threading.get_native_id())
    found: dict[str, float] = {}
    try:
        for task in tasks.iterdir():
            if task.name != own:
                try:
                    found[task.name] = int((task / "schedstat").read_bytes().split()[0]) / 1e9
                except (ProcessLookupError, FileNotFoundError):  # it has ended
                    continue
    except (OSError, ValueError, IndexError):
        return None
    return found or None


@dataclass(frozen=True)
class Mark:
    """A moment: the clock and this thread's own time before and after the others were looked at."""

    ended: float
    own_ended: float
    others: Mapping[str, float] | None
    own_began: float
    began: float


class Stopwatch:
    """Times what lies between two marks.

    Args:
        others: seconds that other threads have worked; None, or a function that returns it: nobody knows.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        others: Callable[[], Mapping[str, float] | None] | None = other_threads,
        own: Callable[[], float] = time.thread_time,
    ) -> None:
        self.clock, self._others, self._own = clock, others, own

    def mark(self) -> Mark:
        """This moment: what came before has ended, what comes next begins."""
        ended, own_ended = self.clock(), self._own()
        others = self._others() if self._others is not None else None
        return Mark(ended, own_ended, others, self._own(), self.clock())

    @staticmethod
    def between(a: Mark, b: Mark, *, ahead: bool = False) -> tuple[float, float | None]:
        """Seconds by the clock, and those in which threads worked, or None where that is not known.

        Args:
            ahead: the graph that comes next is built while one is computed.
        """
        seconds = b.ended - a.began
        if a.others is None or b.others is None:
            return seconds, None
        own = b.own_ended - a.own_began
        busiest = max(s - a.others.get(name, 0.0) for name, s in b.others.items())
        return seconds, min(seconds, max(own, busiest) if ahead else own + busiest)
