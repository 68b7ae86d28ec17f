"""How long what a link waits for may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkLimits:
    """Seconds. Without faults none of them matters; with one, all ranks have ended ``silence_s + verdict_s + grace_s``
    after it, and a second of the heartbeat.

    Attributes:
        beat: from one heartbeat to the next.
        silence: without a byte of a rank, until it counts as gone.
        stall: in which a rank that others wait for, and that waits for nobody, shows no sign of work, until it counts
            as stuck. Its processor time counts as work, so this is about what neither computes nor reads.
        computing: that one evaluation may take on a device whose work is no thread's time (a GPU), and counts as work.
        start: from the first rank's begin until all are there.
        handshake: that one connection may take to prove who it is.
        verdict: that a rank waits for rank 0 to say whose fault it was.
        report: that rank 0 waits for a better explanation, when a connection for data broke.
        parting: that a rank that is done waits until the others know.
        grace: that the main thread has for ending by itself, once the run has failed.
    """

    beat: float = 1.0
    silence: float = 5.0
    stall: float = 5.0
    computing: float = 60.0
    start: float = 60.0
    handshake: float = 2.0
    verdict: float = 0.75
    report: float = 0.25
    parting: float = 1.0
    grace: float = 2.0
