"""``outcore`` with reads that are held to a rate: ``limited_outcore.py 500MB generate --model ...``; 0: as they are."""

from __future__ import annotations

import sys

from limited_reader import limit_reads
from outcore.checks import parse_size
from outcore.cli.main import main

if __name__ == "__main__":
    rate, *words = sys.argv[1:]
    if rate != "0":
        limit_reads(parse_size(rate, flag="the rate"))
    sys.exit(main(words))
