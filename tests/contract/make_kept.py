"""Makes tests/contract/kept: files of each format that Outcore writes, by the version that is installed. Run once for a
format, and never again for one that is there: what lies there is what users have on their disks.

    python tests/contract/make_kept.py FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.qwen3 as qwen3
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1000.0,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip

PROMPT = " ".join(f"w{n % 60}" for n in range(1, 40))
LONG = " ".join(f"w{(7 * n * n + n) % 60}" for n in range(600))
TEMPLATE = "{% for m in messages %}<u> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<a> {% endif %}"


def model(folder: Path) -> None:
    """Two layers of bfloat16 random weights, and words for tokens."""
    folder.mkdir(parents=True)
    mx.random.seed(1)
    made = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    weights = {k: v.astype(mx.bfloat16) for k, v in tree_flatten(made.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    words = {"<unk>": 0, "<u>": 61, "<a>": 62, "<end>": 63} | {f"w{n}": n + 1 for n in range(60)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def outcore(folder: Path, *words: str, say: str | None = None) -> str:
    own = {"OUTCORE_CACHE": str(folder / "cache"), "OUTCORE_CONFIG": os.devnull, "OUTCORE_MONITOR": "off"}
    command = [sys.executable, "-m", "outcore", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ | own, input=say, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    model(folder / "model")
    few = ["--model", "model", "--memory", "1GB", "--resident", "0"]
    engine = [*few, "--draft", "none"]
    outcore(folder, "pack", "model", "--output", "packed")
    outcore(folder, "pack", "model", "--output", "compact", "--coding", "compact")
    outcore(folder, "cache-prompt", *few, "-p", PROMPT, "--prompt-cache-file", "prompt.safetensors")
    outcore(folder, "chat", *engine, "-m", "6", say="w1 w2 w3\nw4 w5\n/save conversation.json\nq\n")
    outcore(folder, "generate", *engine, "-p", LONG, "-m", "6", "--prefix-cache", "on")
    # What is kept of prompts is named by the times of the model's files, too.
    times = {p.name: p.stat().st_mtime_ns for p in (folder / "model").iterdir()}
    told = {"prompt": PROMPT, "long": LONG, "mtime_ns": times}
    (folder / "texts.json").write_text(json.dumps(told, indent=1) + "\n")
    for path in sorted(folder.rglob("*"), reverse=True):
        within = path.relative_to(folder).parts
        if path.is_file() and (path.name in (".lock", "lock") or (within[0] == "cache" and within[1] != "prefix")):
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    print(*(f"{p.relative_to(folder)} {p.stat().st_size}" for p in sorted(folder.rglob("*")) if p.is_file()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
