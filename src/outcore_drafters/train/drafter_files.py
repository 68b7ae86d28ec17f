"""A trained drafter's folder, in the form in which EAGLE-3 drafters are published (as in the library speculators)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .network import Network, Shape

WEIGHTS = "model.safetensors"


def config_of(shape: Shape, model_type: str, layers: int, positions: int, depth: int) -> dict[str, Any]:
    """Returns the config.

    Args:
        model_type, layers: of the model.
        positions: the model's longest text.
        depth: guesses of a draft.
    """
    made = shape.config | {
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": {"model_type": model_type, "num_hidden_layers": layers},
        }
    }
    made["transformer_layer_config"]["max_position_embeddings"] = positions
    return made


def save(folder: Path, net: Network, config: dict[str, Any], card: str) -> None:
    """Writes weights (bfloat16), config and card; the config last, since a folder with one is a drafter."""
    weights = {key: a.astype(mx.bfloat16) for key, a in tree_flatten(net.parameters())}
    partial = folder / "model.partial.safetensors"
    mx.save_safetensors(str(partial), weights, {"format": "mlx"})
    partial.replace(folder / WEIGHTS)
    (folder / "README.md").write_text(card, encoding="utf-8")
    partial = folder / "config.partial.json"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


def card(of: str, inputs: list[str], facts: dict[str, Any]) -> str:
    """Returns the model card: what the drafter was made of, and what it may be used for."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    texts = "\n".join(f"- `{each}`" for each in inputs)
    return f"""# A drafter for {of}

Trained by `outcore draft train` on the model's own continuations of the texts below. It proposes tokens; the model
decides, so the text is the model's own.

    outcore generate --model {of} --draft THIS_FOLDER

| | |
| --- | --- |
{rows}

## Trained on

Continuations, by the model, of pieces of

{texts}

## Licence

The drafter is derived from the model and from these texts: their licences hold for it, too.
"""
