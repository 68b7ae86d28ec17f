"""``outcore pull``: downloads a model from the Hub, if the disk has room for it."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.find_model import no_text, require_tokenizer, resolve_model
from outcore.cli.output import tell
from outcore.errors import StoreSpaceError
from outcore.modules.mlx_lm_tokenizer import download
from outcore.sizes import format_size
from outcore.text import printable

# Bytes of the disk that a download leaves free.
SPARE = 1 << 30


def run(args: argparse.Namespace) -> None:
    missing = 0

    def fetch(repo: str, revision: str | None) -> Path:
        nonlocal missing
        try:
            files = snapshot_download(repo, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS, dry_run=True)
        except (LocalEntryNotFoundError, OfflineModeIsEnabled):
            files = []  # the Hub cannot be reached; the model may be there
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        cache = Path(constants.HF_HUB_CACHE)
        free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
        if missing and missing + SPARE > free:
            raise StoreSpaceError(
                f"{repo}: {format_size(missing)} to download, and {format_size(free)} free in {cache}; free "
                f"{format_size(missing + SPARE - free)}, or set HF_HOME to a folder on another disk"
            )
        if missing:
            tell(f"downloading {format_size(missing)} into {cache}")
        return download(repo, revision)

    folder = resolve_model(args.model, args.revision, fetch)
    if not no_text(folder):  # a drafter has no tokenizer
        require_tokenizer(folder)
    nbytes = open_checkpoint(folder).nbytes
    print(f"{printable(str(folder))}: {format_size(nbytes)}, {'downloaded' if missing else 'already there'}")
    args.result.record = {"folder": str(folder), "bytes": nbytes, "downloaded_bytes": missing}
