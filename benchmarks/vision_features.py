"""Features on mlx-vlm's types: each gives the tokens of mlx-vlm's own resident model, or is refused by name.

    python benchmarks/vision_features.py [FOLDER ...] [--case "..."] [--json FILE]

The cases are those of ``combinations.py``, on tiny random checkpoints of mlx-vlm's types: drafts, keys and values on
disk, computed prompts on disk (found by the same process, and after a restart), quantized and bounded caches, batches,
clients, disturbances in mid-answer, sampling with a seed. The reference is mlx-vlm's loader, its language model and its
caches. Each row is written to FILE at once; a run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx_lm.utils
import transformers
from mlx_lm.generate import stream_generate as their_stream_generate

import _support  # noqa: F401
import combined_models
import combined_runs
import vision_zoo
from combined_cases import Case
from combined_faces import Place
from combined_models import WEIGHTS, Shelf
from combined_reference import SEED, How, Reference, Text
from outcore_vision.names import FOLDERS
from result_file import write_result

TYPES = {
    "klear": "experts",
    "qwen4_exp": "sparse attention (QSAKVCache), recurrent layers, experts",
    "deepseek_v4": "compressed attention, hash routing, experts",
    "dots_ocr": "dense",
    "lfm2_vl": "convolutions",
    "minicpmv4_6": "gated delta net",
    "glm5_next": "sparse and linear attention, experts",
    "minimax_m3": "sparse attention (MiniMaxM3KVCache), experts",
    "hy_v4": "sparse attention (HyV4KVCache), experts",
    "mistral_large3": "latent attention, experts",
    "aya_vision": "sliding windows",
    "unlimited_ocr": "sliding windows (RingSlidingKVCache), experts",
    "nemotron_h_nano_omni": "Mamba 2, an expert layer",
    "longcat_flash_sparse": "latent sparse attention, experts",
    "inkling": "convolutions beside attention, experts",
    "z1t": "own cache (Z1TCache); evaluates within a pass",
}
"""Types of different kinds, and what is special about each."""

CASES = {
    "smallest budget": {"memory": "smallest"},
    "draft ngram": {"draft": "ngram"},
    "draft model": {"draft": "model"},
    "draft self:4": {"draft": "copy"},
    "draft self:2 of 4 bit": {"draft": "self", "weights": "4bit"},
    "KV offload": {"context": "kv_disk"},
    "prefix cache": {"context": "prefix_warm"},
    "prefix cache, restarted": {"context": "prefix_restart"},
    "kv_bits": {"context": "kv_bits"},
    "max_kv_size": {"context": "rotating"},
    "batch of three lengths": {"face": "batch"},
    "server, two clients": {"face": "server"},
    "sampled, seed": {"sampling": "ours"},
    "repetition penalty": {"sampling": "processors"},
    "Ctrl-C, then again": {"disturbance": "interrupt"},
    "failed read, conversation goes on": {"disturbance": "read", "face": "session"},
    "draft model, exception, conversation": {"draft": "model", "disturbance": "callback", "face": "session"},
    "experts one by one": {"memory": "pools"},
}


class VisionShelf(Shelf):
    """Checkpoints of mlx-vlm's types."""

    def model(self, kind: str, weights: str) -> Path:
        def make(folder: Path) -> None:
            quantize = WEIGHTS[weights]
            vision_zoo.save_checkpoint(kind, folder, quantize=quantize)
            config = json.loads((folder / "config.json").read_text())
            config.pop("eos_token_id", None)  # texts go on
            (folder / "config.json").write_text(json.dumps(config))
            with patch.object(combined_models, "VOCABULARY", 128):
                combined_models.save_tokenizer(folder)

        return self._made(f"{kind}-{weights}", make)


class Called:
    """mlx-vlm's language model in the form that mlx-lm's ``stream_generate`` calls."""

    def __init__(self, model: Any) -> None:
        self.language = model.language_model
        self.layers = self.language.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.language(tokens, cache=cache).logits
        return logits

    def make_cache(self) -> list[Any]:
        from mlx_vlm.models.cache import make_prompt_cache

        self.begin()
        found: list[Any] = make_prompt_cache(self.language)
        return found

    def begin(self) -> None:
        """Forgets positions of the text before, as a new process would."""
        for name in ("_position_ids", "_rope_deltas"):
            if hasattr(self.language, name):
                setattr(self.language, name, None)


class Theirs(Reference):
    """mlx-vlm's own model and caches."""

    def __init__(self, folder: Path, adapter: Path | None, cast: str | None = None) -> None:
        import mlx_vlm.utils

        mx.random.seed(SEED)
        self.model: Any = Called(mlx_vlm.utils.load_model(folder))
        self.tokenizer = mlx_lm.utils.load_tokenizer(folder)

    def answers(self, texts: Sequence[Text], how: How) -> list[list[int]]:
        from mlx_vlm.models.cache import make_prompt_cache

        settings = {k: v for k, v in how.settings.items() if k != "max_kv_size"}
        found, cache = list[list[int]](), None
        for text in texts:
            if cache is None or not text.in_cache:
                cache = make_prompt_cache(self.model.language, how.settings.get("max_kv_size"))
                self.model.begin()
            given = {"prefill_step_size": how.step, "prompt_cache": cache} | settings | how.drawing()
            made = their_stream_generate(self.model, self.tokenizer, list(text.prompt), max_tokens=text.tokens, **given)
            found.append([r.token for r in made])
        return found


def tokenizer(folder: Any, **_: Any) -> Any:
    """A folder's tokenizer. ``AutoTokenizer`` looks at the configuration first, whose widths are too small for some."""
    config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    file = str(Path(folder) / "tokenizer.json")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=file, unk_token=config["unk_token"], chat_template=config["chat_template"]
    )


def row_of(kind: str, name: str, shelf: Shelf) -> dict[str, Any]:
    case = Case(kind=kind, **CASES[name])
    result = combined_runs.run(case, shelf)
    end = result.end
    if end == "failed" and "Error: " in result.why and " | " not in result.why:
        end = "refused"  # by name, but no list has the name: people read it
    elif end == "failed":
        place = Place(case, shelf)
        try:
            Theirs(place.folder, None).answers(place.texts()[:1], place.how)
        except Exception as e:
            if result.why.startswith(f"{type(e).__name__}: {e}"[:200]):
                end = "mlx-vlm fails, too"
    return {
        "type": kind,
        "case": name,
        "end": end,
        "why": result.why.replace(sysconfig.get_path("purelib") + "/", "")[:300],
        "idle": result.idle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())["cases"]
    there = {(row["type"], row["case"]) for row in rows}
    tokens = patch.object(transformers.AutoTokenizer, "from_pretrained", tokenizer)
    with tempfile.TemporaryDirectory() as folder, patch.object(combined_runs, "Reference", Theirs), tokens:
        os.environ.setdefault("OUTCORE_HOME", str(Path(folder) / "home"))
        shelf = VisionShelf(Path(folder))
        for kind in arguments.folders or TYPES:
            assert kind in FOLDERS
            for name in [arguments.case] if arguments.case else CASES:
                if (kind, name) in there:
                    continue
                row = row_of(kind, name, shelf)
                rows.append(row)
                said = f" ({row['why'][:160]})" if row["why"] else f" (idle: {row['idle']})" if row["idle"] else ""
                print(f"{kind:22} {name:36} {row['end']}{said}", flush=True)
                write_result(arguments.json, "vision_features", Path(folder), kinds=TYPES, cases=rows)
    print(dict(Counter(row["end"] for row in rows)))


if __name__ == "__main__":
    main()
