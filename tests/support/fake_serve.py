"""``outcore serve`` with a service that has no model: python tests/support/fake_serve.py FLAGS."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Sequence

from fake_service import FakeService
from outcore.cli import main, serve
from outcore.serve.events import Begun, Ended, Event, Finished, GenerationRequest, TextPart


async def counted(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
    """As many words as were asked for, 50 a second."""
    most = ask.max_tokens or 16
    yield Begun("fake", 3)
    for n in range(most):
        yield TextPart(0, f"{n} ")
        await asyncio.sleep(0.02)
    yield Ended(0, "length", most)
    yield Finished(3, most)


class Closing(FakeService):
    """One that can be closed, which takes FAKE_CLOSE_S seconds, and says so."""

    failure = None
    forecast = None

    def close(self) -> None:
        """Say so."""
        time.sleep(float(os.environ.get("FAKE_CLOSE_S", "0")))
        print(f"closed, {self.under_way} under way", file=sys.stderr)


def open_service(args: argparse.Namespace, names: Sequence[str]) -> Closing:
    """In place of the command's own."""
    return Closing(counted)


if __name__ == "__main__":
    serve.open_service = open_service  # type: ignore[assignment]
    sys.exit(main.main(["serve", "--model", "fake", *sys.argv[1:]]))
