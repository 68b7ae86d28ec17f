"""The models that a server offers; their cards are made from file headers and configurations alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.find_model import require_tokenizer, resolve_model
from ..checkpoint.positions import config_of, longest_context
from ..decode.passes import generating
from ..decode.scheduler import Scheduler
from ..engine.session import Session
from ..engine.transport import Leader
from ..errors import OutcoreError, RequestError, UsageError
from ..machine.allocator import clear_cache
from ..machine.small_files import TOKENIZER_BYTES, parse_json, read_small
from ..packages import modules
from ..text import shortened
from .events import ModelCard


@dataclass(frozen=True)
class Offered:
    name: str
    folder: Path
    template: str | None = field(default=None, compare=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        return config_of(self.folder)

    @cached_property
    def card(self) -> ModelCard:
        checkpoint = open_checkpoint(self.folder)
        template = self.template if self.template is not None else _template(self.folder)
        files = [path.stat() for path in checkpoint.files]
        identity = json.dumps([str(self.folder), [[f.st_size, f.st_mtime_ns] for f in files]])
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
            tools=bool(template),
            thinking="think" in template,
            config=self.config,
            digest=hashlib.sha256(identity.encode()).hexdigest(),
            images=next((dict(p.takes(self.folder, self.config)) for p in modules("parts").values()), {}),
        )


class Shelf:
    """All models of a server.

    Args:
        names: of models, or of folders that contain model folders.
        template: a chat template that replaces the models' own.

    Raises:
        UsageError: there is no model, or two have the same name.
        CheckpointError: a model that was named cannot be opened.
    """

    def __init__(self, names: Sequence[str], *, revision: str | None = None, template: str | None = None) -> None:
        named, inside = list[Offered](), list[Offered]()
        for name in dict.fromkeys(names):
            folder = Path(name).expanduser()
            configs = [] if (folder / "config.json").exists() else sorted(folder.glob("*/config.json"))
            inside += [Offered(path.parent.name, path.parent, template) for path in configs]
            if not configs:
                path = resolve_model(name, revision)
                # Clients need not learn where the folder is, unless two have the same name.
                named.append(Offered(path.resolve().name if folder.is_dir() else name, path, template))
        same = Counter(model.name for model in named)
        named = [replace(m, name=str(m.folder)) if same[m.name] > 1 else m for m in named]
        self.models = {model.name: model for model in [*named, *inside]}
        if len(self.models) < len(named) + len(inside):
            raise UsageError("two models have the same name: give each once")
        for model in [*named, *inside]:
            # A model that cannot be opened fails the start, or is skipped if it was found in a folder of models.
            try:
                require_tokenizer(model.folder)
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
        """The model of this name; a single model answers to any name, since programs send names that they know.

        Raises:
            RequestError: no model, or more than one, fits the name (404).
        """
        if not name or len(self.models) == 1:
            return self.default
        if name in self.models:
            return self.models[name]
        meant = [m for m in self.models.values() if name in (str(m.folder), m.folder.name, m.name.rpartition("/")[2])]
        if len(meant) == 1:
            return meant[0]
        what = "no model is" if not meant else "several models are"
        why = f"{what} named {shortened(name)!r}; choose one of {shortened(', '.join(self.models), 300)}"
        raise RequestError(why, "model_not_found", param="model", status=404)


def _parameters(checkpoint: Checkpoint, bits: int | None) -> int:
    """Number of parameters; quantized tensors are assumed to have ``bits`` for each."""
    count = 0
    for name, tensor in checkpoint.tensors.items():
        if bits is None or not name.endswith((".scales", ".biases")):
            packed = bits is not None and tensor.dtype == "U32"
            count += math.prod(tensor.shape) * 32 // bits if packed and bits else math.prod(tensor.shape)
    return count


def _template(folder: Path) -> str:
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


@dataclass
class Loaded:
    """The model that is in memory.

    Attributes:
        sequences: the scheduler, or a ``Leader`` if other ranks have layers of the model.
        keep_s: seconds that it stays loaded without requests; None or negative: for ever, as with other ranks.
        load_s: seconds that loading took; 0 once an answer has reported them.
        idle_at: time at which its last answer ended, by ``time.monotonic``; None while it answers.
        busy: context managers that are entered while the model answers.
    """

    name: str
    model: nn.Module
    sequences: Scheduler | Leader
    keep_s: float | None
    load_s: float = 0.0
    idle_at: float | None = field(default_factory=time.monotonic)
    tokens: int = 0
    busy: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def session(self) -> Session:
        session: Session = self.model.outcore
        return session

    @property
    def leader(self) -> Leader | None:
        return None if isinstance(self.sequences, Scheduler) else self.sequences

    @property
    def counters(self) -> dict[str, int]:
        m, plan = self.session.metrics, self.session.plan
        return {"sweeps": m.sweeps, "bytes_read": m.bytes_read, "tokens": self.tokens, "drafted": m.drafted,
                "accepted": m.accepted, "memory_bytes": plan.peak_bytes, "budget_bytes": plan.budget_bytes}  # fmt: skip

    @property
    def left_s(self) -> float | None:
        """Seconds until it is unloaded unless a request comes; None: it stays, or it answers now."""
        if self.leader is not None or self.keep_s is None or self.keep_s < 0 or self.idle_at is None:
            return None
        return max(0.0, self.idle_at + self.keep_s - time.monotonic())

    def wake(self) -> None:
        if self.idle_at is not None:
            self.idle_at = None
            self.busy.enter_context(generating(self.model))

    def rest(self) -> None:
        self.busy.close()
        self.idle_at = self.idle_at or time.monotonic()
        if self.leader is not None:
            self.leader.rest()
        clear_cache()
