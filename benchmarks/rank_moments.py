"""At which moments ``rank_kills`` strikes: phases of a run on several machines, and what begins each of them."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

PLANNED = "machines share the layers"
"""What ``generate`` says once everything is loaded, and before it computes the prompt."""
GIVE_UP_S = 30.0
WAIT_S = 90.0
"""Seconds in which a run must have come to its answer, beside whatever else this machine does."""
POLL_S = 0.02
TOKENS_S = 3.0
"""Seconds of the answer in which something may happen."""


class Output:
    """What a launcher writes, and when."""

    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stdout is not None and launcher.stderr is not None
        self.began = time.monotonic()
        self.launcher, self.errors = launcher, ""
        self.planned_at: float | None = None
        self.text_at: float | None = None
        self._reads = [
            threading.Thread(target=self._read, args=(stream, take), daemon=True)
            for stream, take in ((launcher.stdout, self._text), (launcher.stderr, self._told))
        ]
        for thread in self._reads:
            thread.start()

    def end(self) -> str:
        """Once nobody writes any more: the last of what was told."""
        for thread in self._reads:
            thread.join(1.0)
        return self.errors[-1000:]

    def _read(self, stream: IO[bytes], take: Callable[[str], None]) -> None:
        while data := os.read(stream.fileno(), 1 << 16):
            take(data.decode(errors="replace"))

    def _text(self, _: str) -> None:
        self.text_at = self.text_at or time.monotonic()

    def _told(self, text: str) -> None:
        self.errors += text
        if PLANNED in self.errors:
            self.planned_at = self.planned_at or time.monotonic()


@dataclass(frozen=True)
class Phase:
    """A stretch of a run.

    Attributes:
        event: what it begins at: ``begun`` (the launcher), ``there`` (all ranks are), ``planned``, ``text``.
        first, last: seconds after that between which something happens.
    """

    name: str
    event: str
    first: float
    last: float


PROGRAM = (
    Phase("start-up", "there", 0.0, 0.4),
    Phase("running", "there", 0.4, 4.0),
    Phase("running", "there", 0.4, 4.0),
)
"""Phases of a program that is not ``generate``, each as probable."""


def phases_of_generate(at: Mapping[str, float]) -> tuple[Phase, ...]:
    """Phases by one run that nothing happened to.

    Args:
        at: seconds after its begin at which each event was.
    """
    return (
        Phase("start-up", "begun", 0.0, at["there"]),
        Phase("loading", "there", 0.0, at["planned"] - at["there"]),
        Phase("prompt", "planned", 0.0, at["text"] - at["planned"]),
        Phase("tokens", "text", 0.0, TOKENS_S),
    )


def when(event: str, output: Output, there: Callable[[], bool]) -> float:
    """Wait for an event; when it was, by ``time.monotonic``.

    Args:
        there: whether all ranks are.

    Raises:
        RuntimeError: it did not come.
    """
    while (now := time.monotonic()) < output.began + WAIT_S and output.launcher.poll() is None:
        at = {"begun": output.began, "planned": output.planned_at, "text": output.text_at}
        if event != "there" and (found := at[event]) is not None:
            return found
        if event == "there" and there():
            return now
        time.sleep(POLL_S)
    raise RuntimeError(f"never {event}: {output.end()}")


def drawn(phases: tuple[Phase, ...], rng: random.Random) -> tuple[Phase, float]:
    """A phase, and seconds after its event."""
    phase = rng.choice(phases)
    return phase, rng.uniform(phase.first, phase.last)
