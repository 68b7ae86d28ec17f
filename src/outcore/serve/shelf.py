"""The models that a server offers: their names, folders and cards. Read from headers and configurations alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.find_model import resolve_model
from ..checkpoint.positions import config_of, longest_context
from ..errors import OutcoreError, RequestError, UsageError
from ..machine.small_files import TOKENIZER_BYTES, parse_json, read_small
from ..text import shortened
from .events import ModelCard


@dataclass(frozen=True)
class Offered:
    """A model that can be asked for.

    Attributes:
        name: as it was given to the server, or of its folder in a folder of models.
    """

    name: str
    folder: Path
    template: str | None = field(default=None, compare=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        return config_of(self.folder)

    @cached_property
    def card(self) -> ModelCard:
        """What is known of it without loading it."""
        checkpoint = open_checkpoint(self.folder)
        template = self.template if self.template is not None else _template(self.folder)
        files = [path.stat() for path in checkpoint.files]
        said = json.dumps([str(self.folder), [[f.st_size, f.st_mtime_ns] for f in files]])
        bits = (self.config.get("quantization") or {}).get("bits")
        bits = bits if isinstance(bits, int) and bits > 0 else None
        nbytes: Counter[str] = Counter()
        for tensor in checkpoint.tensors.values():
            nbytes[tensor.dtype] += tensor.nbytes
        dtype = max(nbytes, key=lambda dtype: nbytes[dtype], default="").lower()
        return ModelCard(
            self.name,
            created=int(max((f.st_mtime for f in files), default=0)),
            nbytes=checkpoint.nbytes,
            family=str(self.config.get("model_type", "")),
            parameters=_parameters(checkpoint, bits),
            quantization=f"{bits}-bit" if bits is not None else dtype,
            context=longest_context(self.config),
            template=template,
            tools="tools" in template,
            thinking="think" in template,
            config=self.config,
            digest=hashlib.sha256(said.encode()).hexdigest(),
        )


class Shelf:
    """All of them.

    Args:
        names: of models, or of folders that hold folders of models.
        template: a chat template in place of their own.

    Raises:
        UsageError: none, or two of one name. CheckpointError: one that cannot be opened.
    """

    def __init__(self, names: Sequence[str], *, revision: str | None = None, template: str | None = None) -> None:
        named, inside = list[Offered](), list[Offered]()
        for name in dict.fromkeys(names):
            folder = Path(name).expanduser()
            configs = [] if (folder / "config.json").exists() else sorted(folder.glob("*/config.json"))
            inside += [Offered(path.parent.name, path.parent, template) for path in configs]
            if not configs:
                path = resolve_model(name, revision)
                # A folder is called by its own name, since where it lies is nobody's business.
                named.append(Offered(path.resolve().name if folder.is_dir() else name, path, template))
        same = Counter(model.name for model in named)
        # Two folders of one name are told apart by where they lie.
        named = [replace(m, name=str(m.folder)) if same[m.name] > 1 else m for m in named]
        self.models = {model.name: model for model in [*named, *inside]}
        if len(self.models) < len(named) + len(inside):
            raise UsageError("two models of one name: give each once")
        for model in [*named, *inside]:
            # What is wrong with a model is told when the server starts; in a folder others may be served.
            try:
                assert model.card
            except OutcoreError:
                if model in named:
                    raise
                del self.models[model.name]
        if not self.models:
            raise UsageError("no model to serve: give --model NAME, or a folder that holds model folders")

    @property
    def default(self) -> Offered:
        return next(iter(self.models.values()))

    def named(self, name: str) -> Offered:
        """The model that a request means. Where there is one model, it is meant whatever it is called: programs name
        models that they know.

        Raises:
            RequestError: there are several, and none of that name (404).
        """
        if not name or len(self.models) == 1:
            return self.default
        if name in self.models:
            return self.models[name]
        meant = [m for m in self.models.values() if name in (str(m.folder), m.folder.name, m.name.rpartition("/")[2])]
        if len(meant) == 1:
            return meant[0]
        what = "no model of the name" if not meant else "several models of the name"
        why = f"{what} {shortened(name)!r} here; there are {shortened(', '.join(self.models), 300)}"
        raise RequestError(why, "model_not_found", param="model", status=404)


def _parameters(checkpoint: Checkpoint, bits: int | None) -> int:
    """Numbers that its tensors stand for; of quantized ones by the bits that most of them have."""
    count = 0
    for name, tensor in checkpoint.tensors.items():
        if bits is None or not name.endswith((".scales", ".biases")):
            packed = bits is not None and tensor.dtype == "U32"
            count += math.prod(tensor.shape) * 32 // bits if packed and bits else math.prod(tensor.shape)
    return count


def _template(folder: Path) -> str:
    """The chat template's text; empty: none that can be read without its tokenizer."""
    try:
        if (path := folder / "chat_template.jinja").is_file():
            return read_small(path, TOKENIZER_BYTES).decode("utf-8", "replace")
        for name in ("chat_template.json", "tokenizer_config.json"):
            if (path := folder / name).is_file():
                found = parse_json(read_small(path, TOKENIZER_BYTES)).get("chat_template")
                if isinstance(found, list) and found:
                    named = {t["name"]: t["template"] for t in found}
                    found = named.get("default", next(iter(named.values())))
                if isinstance(found, str):
                    return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return ""
