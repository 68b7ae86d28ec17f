"""Models that lie in the Hub's cache. No network is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

TOKENIZER = "tokenizer.json"


def with_same_tokens(folder: Path, most_bytes: int) -> list[Path]:
    """Models in the Hub's cache whose tokenizer is the very file of this one's, smallest first.

    Args:
        folder: of a model.
        most_bytes: of their weights.
    """
    ours = folder / TOKENIZER
    try:
        size, tokens = ours.stat().st_size, b""
        found = []
        for other in _snapshots():
            theirs = other / TOKENIZER
            if not theirs.is_file() or theirs.stat().st_size != size or other.resolve() == folder.resolve():
                continue
            nbytes = sum(file.stat().st_size for file in other.glob("*.safetensors"))
            if 0 < nbytes <= most_bytes and theirs.read_bytes() == (tokens := tokens or ours.read_bytes()):
                found.append((nbytes, other))
    except OSError:
        return []
    return [other for _, other in sorted(found)]


def name_of(folder: Path) -> str:
    """A model as people call it: as the Hub does, where it lies in its cache."""
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/")


def _snapshots() -> Iterator[Path]:
    """Of each model the folder that its name stands for: the main branch, or what was fetched last."""
    for repo in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        try:
            main = repo / "snapshots" / (repo / "refs" / "main").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            main = repo
        if main != repo and main.is_dir():
            yield main
            continue
        newest = sorted((repo / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
        yield from newest[-1:]
