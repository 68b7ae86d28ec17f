"""Texts that share sweeps, with drafts and without: what clients get of one server behind a slow disk.

    python benchmarks/drafted_texts.py MODEL --text FILE --memory 110MB --disk 20MB --clients 1,2,4,8 \
        --drafts none,ngram,self:3 --json FILE [-- FLAGS of outcore serve]

For each way to draft a server, calibrated behind that disk first (OUTCORE_CACHE: a folder of its own for each rate).
Pieces of the text are its prompts; each is asked for alone first, which teaches what drafts are worth, then as many
clients at once, and again. Every answer is compared with the one that its prompt gets without drafts, alone. The disk
is limited by a control group of version 1 (`blkio`), which needs root; with ``--reader`` by the reader, which does not.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.machine.cache_folder import cache_dir
from outcore.sizes import parse_size
from rank_hosts import set_rate
from result_file import write_result
from serving import OUTCORE, Clients, command, server
from slow_disk import slow_disk


def pieces(text: str, count: int, characters: int = 400) -> list[str]:
    """Prompts that lie evenly in a text, and begin with a line."""
    found = []
    for n in range(count):
        at = text.find("\n", n * len(text) // count) + 1
        found.append(text[at : at + characters])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--disk", type=parse_size, help="bytes a second")
    parser.add_argument("--reader", action="store_true", help="the reader is held to it, not the disk")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--drafts", default="none,ngram,self:3")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    own = sys.argv[1:]
    at = own.index("--") if "--" in own else len(own)
    args = parser.parse_args(own[:at])
    more = own[at + 1 :]
    counts = [int(n) for n in args.clients.split(",")]
    prompts = pieces(args.text.read_text(), max(counts))
    model = str(args.model.resolve())
    computed = [w for a, b in itertools.pairwise(more) if a in ("--dtype", "--cpu-streams") for w in (a, b)]
    rows: list[dict[str, Any]] = []
    expected: list[str] = []
    outcore: Sequence[str] = OUTCORE
    if args.reader:
        limited = Path(__file__).with_name("limited_outcore.py")
        outcore = sys.executable, str(limited), f"{args.disk}B"
    with slow_disk(args.model, None if args.reader else args.disk) as group:
        calibrate = command(group, "calibrate", model, *computed, outcore=outcore)
        subprocess.run(calibrate, check=True, stdout=sys.stderr)
        if args.reader:  # which a calibration does not read through
            set_rate(cache_dir(), args.disk / 1e6)
        for draft in args.drafts.split(","):
            words = [model, "--memory", args.memory, "--draft", draft, "--prefix-cache", "off", *more]
            with server(group, words, outcore) as address:
                clients = Clients(address, args.tokens)
                alone = [clients.ask([p])["texts"][0] for p in prompts]
                expected = expected or alone
                for count in counts:
                    for _ in range(2):
                        row = clients.ask(prompts[:count])
                        equal = sum(a == b for a, b in zip(row.pop("texts"), expected, strict=False))
                        rows.append({"draft": draft, **row, "equal": equal})
                        print(rows[-1], flush=True)
                rows[-1]["alone_equal"] = sum(a == b for a, b in zip(alone, expected, strict=True))
            kept = {"memory": args.memory, "disk": args.disk, "tokens": args.tokens, "more": more}
            write_result(args.json, "drafted_texts", args.model, **kept, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
