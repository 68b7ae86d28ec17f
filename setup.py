"""README for the package index, which has no repository beside it: relative links get an address, or are words only."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
RELATIVE = re.compile(r"(?P<image>!?)\[(?P<words>[^\[\]]*)\]\((?!https?://|mailto:|#)(?P<path>[^()\s]+)\)")
CODE = re.compile(r"(```.*?```|^    .*?$)", re.DOTALL | re.MULTILINE)


def for_index(text: str, base: str) -> str:
    """``text`` with its relative links behind ``base``; where that is empty, without them."""

    def link(match: re.Match[str]) -> str:
        if not base:
            return "" if match["image"] else match["words"]
        return f"{match['image']}[{match['words']}]({base}{match['path']}{'?raw=true' if match['image'] else ''})"

    # Odd parts are code.
    parts = CODE.split(text)
    return "".join(part if i % 2 else RELATIVE.sub(link, part) for i, part in enumerate(parts))


def description() -> str:
    """README.md with the address that pyproject.toml names."""
    base: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["outcore"]["links"]
    return for_index((ROOT / "README.md").read_text(encoding="utf-8"), base)


if __name__ == "__main__":
    setup(long_description=description(), long_description_content_type="text/markdown")
