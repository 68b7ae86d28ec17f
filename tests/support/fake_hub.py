"""A Hub that is a folder, and a cache of it: what of `huggingface_hub` a download calls."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import huggingface_hub
import mlx_lm.utils
from huggingface_hub.errors import LocalEntryNotFoundError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """One model.

    Args:
        source: its files. ``cache``: the cache folder of this machine.
        tells: whether it tells of headers.

    Attributes:
        fetched: files that were downloaded, in order.
    """

    def __init__(self, source: Path, cache: Path, *, tells: bool = True) -> None:
        self.source, self.tells = source, tells
        self.folder = cache / "models--owner--name" / "snapshots" / COMMIT
        self.fetched: list[str] = []

    def snapshot_download(
        self, repo: str, revision: str | None = None, allow_patterns: Sequence[str] | None = None, **more: Any
    ) -> str:
        if more.get("local_files_only"):
            if not self.folder.exists():
                raise LocalEntryNotFoundError("not there")
            return str(self.folder)
        assert revision in (None, COMMIT)
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.source.iterdir()):
            wanted = any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns or ["*"])
            if wanted and not (self.folder / file.name).exists():
                shutil.copy(file, self.folder / file.name)
                self.fetched.append(file.name)
        return str(self.folder)

    def headers(self, repo: str, *, revision: str) -> Any:
        if not self.tells:
            raise OSError("no network")
        files = {}
        for file in sorted(self.source.glob("*.safetensors")):
            with file.open("rb") as f:
                header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
            header.pop("__metadata__", None)
            tensors = {
                name: SimpleNamespace(dtype=t["dtype"], shape=t["shape"], data_offsets=tuple(t["data_offsets"]))
                for name, t in header.items()
            }
            files[file.name] = SimpleNamespace(tensors=tensors)
        return SimpleNamespace(sharded=len(files) > 1, files_metadata=files)

    @contextmanager
    def asked(self) -> Iterator[FakeHub]:
        """In the place of the real one."""
        with ExitStack() as stack:
            for where, name, what in (
                (mlx_lm.utils, "snapshot_download", self.snapshot_download),
                (huggingface_hub, "snapshot_download", self.snapshot_download),
                (huggingface_hub, "get_safetensors_metadata", self.headers),
            ):
                stack.enter_context(patch.object(where, name, what))
            yield self
