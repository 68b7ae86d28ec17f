"""A multi-token-prediction head for a small Qwen3.5 model that has none, trained on what the model itself says.

    python benchmarks/train_mtp.py MODEL OUT --held-out FILES.json --held-text PROSE.txt --seconds 600

The model stays as it is; from its hidden states the head learns the model's own distribution of the token after the
next one, and of those behind it by its own states, as it is used. Text is the standard library of the interpreter that
runs this, without the files that FILES.json (``held_out``) names, and its language reference without the paragraphs of
PROSE. OUT is a copy of the model with the head's tensors as originals name them (``mtp.``), norms less one.

On a GPU 32 sequences at a time and some minutes; on a CPU ``--batch 4 --tokens 128`` and patience: MLX computes there
about 1 % of what a GPU does.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.decode.speculative.mtp_head import MtpHead, text_model
from outcore.decode.speculative.mtp_layouts import OWN, QWEN, HeadLayer
from result_file import write_result

FILE = "model-mtp.safetensors"
WEIGHTS = (1.0, 0.7, 0.5, 0.35)
"""Of the losses of the first guess, the second, and so on."""


def corpus(held_out: set[str], held_text: str) -> list[str]:
    """Files of the standard library and paragraphs of its language reference, without those that are held out."""
    from pydoc_data.topics import topics

    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "-packages" in name or name in held_out or name.startswith(("encodings/", "pydoc_data/")):
            continue
        try:
            found.append(path.read_text("utf-8"))
        except UnicodeDecodeError:
            continue
    seen = {paragraph.strip() for paragraph in held_text.split("\n\n")}
    kept = ("\n\n".join(p for p in text.split("\n\n") if p.strip() not in seen) for text in topics.values())
    return [*found, *kept]


def tokens_of(tokenizer: Any, texts: list[str], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """All texts in another order, with an end of text after each."""
    ids: list[int] = []
    for i in rng.permutation(len(texts)):
        ids += [*tokenizer.encode(texts[i]), tokenizer.eos_token_id]
    return np.array(ids, np.int32)


def new_head(text: Any) -> MtpHead:
    """A head that begins with the model's last layer of full attention and its final norm."""
    at = max(i for i, layer in enumerate(text.model.layers) if not layer.is_linear)
    layer = HeadLayer(type(text.model.layers[at])(text.args, at))
    head = MtpHead(text.args.hidden_size, layer, text.args.rms_norm_eps)
    width = text.args.hidden_size
    weights = {f"layer.{path}": a for path, a in tree_flatten(text.model.layers[at].parameters())}
    weights |= {"norm.weight": text.model.norm.weight, "embedding_norm.weight": mx.ones(width)}
    both = mx.concatenate([0.3 * mx.eye(width), 0.5 * mx.eye(width)], axis=1)
    weights |= {"hidden_norm.weight": mx.ones(width), "project.weight": both + 0.02 * mx.random.normal(both.shape)}
    head.load_weights([(path, a.astype(mx.float32)) for path, a in weights.items()])
    return head


def losses(head: MtpHead, text: Any, ids: mx.array, states: mx.array, ahead: int) -> tuple[mx.array, list[mx.array]]:
    """The weighted loss, and for each guess how often it is the model's own first choice.

    Args:
        ids: (sequences, tokens). ``states``: of the model, of those tokens.
    """
    count = ids.shape[1] - 2
    logits_of = text.lm_head if "lm_head" in text else text.model.embed_tokens.as_linear
    said = mx.stop_gradient(logits_of(states[:, 1 : count + 1]))
    chances, best = mx.softmax(said, axis=-1), mx.argmax(said, axis=-1)
    embedded = text.model.embed_tokens(ids[:, 1 : count + 1])
    total, right, given = mx.array(0.0), [], states[:, :count]
    for n in range(ahead):
        # A guess's own state takes the place of the model's one token later.
        given = head(embedded[:, n:], given)
        logits = logits_of(given)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        total = total - WEIGHTS[n] * (chances[:, n:] * logprobs).sum(axis=-1).mean()
        right.append((mx.argmax(logits, axis=-1) == best[:, n:]).mean())
        given = given[:, :-1]
    return total, right


def train(model: Any, ids: np.ndarray[Any, Any], args: argparse.Namespace) -> tuple[MtpHead, dict[str, Any]]:
    """A trained head, and how it went."""
    text, rng = text_model(model), np.random.default_rng(1)
    head, began, steps = new_head(text), time.perf_counter(), 0
    recent: list[list[Any]] = []
    optimizer = optim.AdamW(learning_rate=args.lr, betas=[0.9, 0.95], weight_decay=0.05)

    def of(batch: mx.array, states: mx.array) -> tuple[mx.array, list[mx.array]]:
        return losses(head, text, batch, states, args.ahead)

    gradient = nn.value_and_grad(head, of)
    while (part := (time.perf_counter() - began) / args.seconds) < 1:
        rows = rng.integers(0, len(ids) - args.tokens, args.batch)
        batch = mx.array(np.stack([ids[at : at + args.tokens] for at in rows]))
        states = mx.stop_gradient(text.model(batch)).astype(mx.float32)
        steps += 1
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * part))
        optimizer.learning_rate = args.lr * min(1.0, steps / 30) * cosine
        (loss, right), gradients = gradient(batch, states)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(head, gradients)
        mx.eval(head.parameters(), optimizer.state, loss, right)
        recent = [*recent, [loss.item(), *(r.item() for r in right)]][-20:]
        if steps % 20 == 0:
            print(steps, *(round(float(x), 3) for x in np.mean(recent, axis=0)), file=sys.stderr, flush=True)
    mean = [round(float(x), 4) for x in np.mean(recent, axis=0)]
    seen = steps * args.batch * args.tokens
    return head, {"steps": steps, "tokens": seen, "loss": mean[0], "right": mean[1:], "corpus_tokens": len(ids)}


def originals(head: MtpHead, zero_centred: bool) -> dict[str, mx.array]:
    """The head's weights in bf16, named as Qwen's originals name them."""
    names = dict(zip(OWN, QWEN.own, strict=True))
    found = {}
    for path, array in tree_flatten(head.parameters()):
        module, _, key = path.rpartition(".")
        inside = path.startswith("layer.")
        name = f"mtp.layers.0.{path.removeprefix('layer.')}" if inside else f"mtp.{names[module]}.{key}"
        found[name] = (array - 1.0 if zero_centred and array.ndim == 1 else array).astype(mx.bfloat16)
    return found


def save(model: Path, out: Path, weights: dict[str, mx.array]) -> None:
    """A copy of the model with a head beside it."""
    shutil.copytree(model, out, copy_function=shutil.copyfile)
    out.chmod(0o755)
    mx.save_safetensors(str(out / FILE), weights, {"format": "pt"})
    index = out / "model.safetensors.index.json"
    if index.exists():
        found = json.loads(index.read_text())
        found["weight_map"] |= dict.fromkeys(weights, FILE)
        index.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="JSON; held_out: files not to train on")
    parser.add_argument("--held-text", type=Path, metavar="FILE", help="text whose paragraphs are not trained on")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--ahead", type=int, default=3, choices=range(1, len(WEIGHTS) + 1), help="guesses (%(default)s)"
    )
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already")
    mx.random.seed(0)
    model, tokenizer = mlx_lm.load(str(args.model))[:2]
    model.set_dtype(mx.float32)
    held = set(json.loads(args.held_out.read_text())["held_out"]) if args.held_out else set()
    texts = corpus(held, args.held_text.read_text() if args.held_text else "")
    head, how = train(model, tokens_of(tokenizer, texts, np.random.default_rng(0)), args)
    kernels = [t.shape for name, t in open_checkpoint(args.model).tensors.items() if "conv1d.weight" in name]
    save(args.model, args.out, originals(head, all(shape[-1] != 1 for shape in kernels)))
    print(json.dumps(how))
    write_result(args.json, "train_mtp", args.model, **how)
    return 0


if __name__ == "__main__":
    sys.exit(main())
