"""Finds a model's folder by its path or by its name on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError, MissingFileError, UsageError
from ..machine.settings import short_names
from ..packages import modules
from ..text import one_line, quoted
from .checkpoint import GGUF, not_a_folder, require_config

_HUB_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface|hf)\.co/(?:models/)?([\w.-]+/[\w.-]+)", re.IGNORECASE)

_NOWHERE = (
    "is neither a folder here nor found on the Hub; Hub names are OWNER/NAME, such as mlx-community/Qwen3-8B-4bit; "
    "outcore list shows what is here"
)

# Downloads a model of the Hub by its name and revision, and returns its folder.
Fetch = Callable[[str, str | None], Path]


def resolve_model(
    path_or_repo: str | os.PathLike[str], revision: str | None = None, fetch: Fetch | None = None
) -> Path:
    """Return the local folder of a model, downloading it from the Hugging Face Hub with mlx-lm if necessary.

    Args:
        path_or_repo: a folder, a name such as ``mlx-community/Qwen3.5-9B-MLX-6bit``, or a short name for one.
        revision: branch, tag or commit on the Hub; ignored for local folders.
        fetch: downloads it; None: as mlx-lm does.

    Raises:
        UsageError: an empty name, or no name at all.
        MissingFileError: no such folder, or the Hub has no such model.
        CheckpointError: the path is a file.
    """
    if not isinstance(path_or_repo, str | os.PathLike):
        raise UsageError(f"a model is a folder's path or a name, not {type(path_or_repo).__name__}")
    name = os.fspath(path_or_repo)
    name = short_names().get(name, name)
    return local_folder(name) or download(name, revision, fetch)


def local_folder(path_or_repo: str) -> Path | None:
    """Return the model's folder, or None if the name could be the Hub's. Raises as ``resolve_model`` does."""
    if not path_or_repo.strip():
        raise UsageError("no model given; name a folder, or a model of the Hugging Face Hub such as owner/name")
    try:
        path = Path(path_or_repo).expanduser()
        if path.is_dir():
            require_config(path)
            return path
        found = path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder behind closed permissions, ~nobody
        raise MissingFileError(f"{quoted(path_or_repo)}: cannot be opened ({one_line(error)}); check it") from error
    if found:
        raise CheckpointError(not_a_folder(path))
    if web := _HUB_URL.match(path_or_repo):
        raise MissingFileError(f"{quoted(path_or_repo)}: a web address; give the model's name: {web[1]}")
    if path_or_repo.lower().endswith((".gguf", "-gguf")):
        raise MissingFileError(f"{quoted(path_or_repo)}: {GGUF}")
    looks_local = path_or_repo.startswith((os.sep, ".", "~")) or path_or_repo.count("/") > 1 or path.is_symlink()
    if looks_local or path.suffix in {".gguf", ".safetensors", ".json", ".bin"}:
        raise MissingFileError(f"{quoted(path_or_repo)}: no such folder; check the path, or name a Hub model")
    if ":" in path_or_repo:
        raise MissingFileError(f"{quoted(path_or_repo)}: {_NOWHERE}")
    return None


def download(repo: str, revision: str | None, fetch: Fetch | None = None) -> Path:
    # Imported here because together they take a second, and reading headers needs neither.
    from huggingface_hub import errors as hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    from ..modules.mlx_lm_tokenizer import download as by_mlx_lm

    # The Hub's errors share no base, and its HTTP library (re-exported there) changed twice.
    # hf_xet, which moves the bytes, raises RuntimeError; a revision or a name of the wrong form ValueError.
    known: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)
    known += tuple(e for e in vars(hub).values() if isinstance(e, type) and issubclass(e, Exception))
    away = "is not a folder here, not whole in the local cache, and the Hugging Face Hub could not be reached;"
    offline = f"{away} unset HF_HUB_OFFLINE, or give a folder"
    explanations: dict[type[Exception], str] = {
        hub.RepositoryNotFoundError: "is neither a folder here nor a model on the Hugging Face Hub; check the name or "
        "`hf auth login`",
        hub.HFValidationError: "is neither a folder here nor a name that the Hugging Face Hub could have; check it",
        hub.OfflineModeIsEnabled: offline,
        hub.LocalEntryNotFoundError: offline
        if HF_HUB_OFFLINE
        else f"{away} check the network and HF_ENDPOINT, or give a folder",
    }
    if "/" not in repo:  # some old models of the Hub have no owner, such as gpt2; most such names are other programs'
        explanations = dict.fromkeys(explanations, _NOWHERE)
    explanations = {
        hub.GatedRepoError: f"is gated; accept its terms at https://huggingface.co/{repo}, then run `hf auth login`",
        hub.RevisionNotFoundError: f"has no revision {quoted(str(revision))} on the Hugging Face Hub; check --revision",
        **explanations,
    }
    try:
        return (fetch or by_mlx_lm)(repo, revision)
    except known as error:
        what = next((text for kind, text in explanations.items() if isinstance(error, kind)), None)
        what = what or f"could not be downloaded ({one_line(error)}); try again, what has arrived is kept"
        raise MissingFileError(f"{quoted(repo)}: {what}") from error


# Files of which every tokenizer has one: its vocabulary, or the code that makes it.
_VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "*tokeniz*.py")


def no_text(folder: Path) -> str:
    """Returns what a model does instead of writing text, as packages say (``no_text``); empty if it writes text."""
    found = (getattr(package, "no_text", lambda _: "")(folder) for package in modules("model_types").values())
    return next(filter(None, found), "")


def require_tokenizer(folder: Path) -> None:
    """Refuse a folder without a vocabulary, of which transformers makes a tokenizer that knows no words."""
    if not any(path.exists() for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise MissingFileError(f"{folder}: {no_text(folder) or 'no tokenizer.json here; download it again'}")


def name_of(folder: Path) -> str:
    """Return a model's display name: its Hub name if the folder lies in the Hub's cache, else the folder's name."""
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
