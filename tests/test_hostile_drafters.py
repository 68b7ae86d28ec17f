"""Drafters whose files say what cannot be: refused by name when they are opened, before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import drafter_files
import outcore
import test_block_drafters as blocks
import zoo
from outcore.errors import CheckpointError, OutcoreError, UnsupportedModelError
from outcore_drafters import source
from outcore_drafters.config import config_of, kind_of, open_drafter
from outcore_drafters.drafter import BlockDrafter, DraftedModel
from outcore_drafters.source import Drafters
from outcore_drafts.draft_model import check_tokenizers

KNOWN = [4, 9, 11]


def opened(folder: Path, model: tuple[int, int, int]) -> BlockDrafter:
    config = config_of(folder)
    return open_drafter(folder, config, kind_of(folder, config), DraftedModel(*model), None, lambda _, __: None)


def eagle(folder: Path, inside: dict[str, Any], **changes: Any) -> BlockDrafter:
    """Opens an EAGLE-3 drafter with a head of its own; ``inside``: changes of its layer's config."""
    made = drafter_files.save_eagle3("llama", folder, KNOWN, **changes)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["transformer_layer_config"] |= inside
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return opened(made, drafter_files.size_of("llama"))


TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("inside", "changes", "why"),
    [
        ({}, {TAPS: [2, 2, 3]}, r"names the layers \[1, 1, 2\], which have no meaning"),
        ({"num_hidden_layers": 10**9}, {}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, {}, "tensor|cannot be made"),
        ({"num_attention_heads": 64, "head_dim": 1, "num_key_value_heads": 3}, {}, "tensor|cannot be made"),
        ({"rms_norm_eps": "small"}, {}, "cannot be made"),
        ({}, {"quantization": "yes"}, "cannot be made"),
        ({}, {"quantization": {"bits": 4}}, "cannot be made"),
    ],
)
def test_an_eagle_s_config(inside: dict[str, Any], changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedModelError, CheckpointError), match=why):
        eagle(tmp_path / "drafter", inside, **changes)


def halved(a: mx.array) -> mx.array:
    return a[:, : a.shape[1] // 2 + 1]


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("d2t", lambda _: mx.array([0, 10**9, 0]), "d2t names tokens that are not among the model's"),
        ("d2t", lambda _: mx.array([0, -2, 0]), "d2t names tokens"),
        ("fc.weight", lambda a: a.astype(mx.int32), "tensor fc.weight has numbers of another kind, mlx.core.int32"),
        ("norm.weight", lambda a: a.astype(mx.complex64), "tensor norm.weight has numbers of another kind"),
        ("fc.weight", halved, "tensor fc.weight has the shape|no meaning"),
        ("layers.0.self_attn.o_proj.weight", lambda a: a[None], "o_proj.weight has the shape"),
    ],
)
def test_an_eagle_s_tensors(name: str, change: Callable[[mx.array], mx.array], why: str, tmp_path: Path) -> None:
    eagle(tmp_path / "drafter", {})
    file = tmp_path / "drafter" / "model.safetensors"
    weights: Any = mx.load(str(file))
    mx.eval(changed := {**weights, name: change(weights[name])})
    file.unlink()
    mx.save_safetensors(str(file), changed)
    with pytest.raises(OutcoreError, match=why):
        opened(file.parent, drafter_files.size_of("llama"))


@pytest.mark.parametrize(
    ("case", "changes", "why"),
    [
        ("dflash", {"mask_token_id": 10**7}, "mask_token_id is 10000000, of 128 tokens"),
        ("dflash", {"mask_token_id": -1}, "mask_token_id is -1"),
        ("dflash", {"block_size": 10**9}, "block_size or target_layer_ids have no meaning"),
        ("dflash", {"target_layer_ids": [-2, 0, 3]}, r"\[-2, 0, 3\], which have no meaning"),
        ("dflash", {"target_layer_ids": ["0", "2", "3"]}, "which have no meaning"),
        ("dflash", {"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000"),
        ("dflash-windows", {"sliding_window": 2}, "sliding_window of at least 3"),
        ("dflash-windows", {"sliding_window": 8.5}, "sliding_window of at least 3"),
        ("dflash", {"draft_window_size": 2.5}, "draft_window_size is 2.5"),
        ("dflash", {"final_logit_softcapping": "thirty"}, "cannot be made"),
        ("dflash2", {"output_multiplier": "one"}, "cannot be made"),
    ],
)
def test_a_block_drafter_s_config(case: str, changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    blocks.save(tmp_path / "drafter", config := blocks.config_of(case))
    config["dflash_config"] |= {key: value for key, value in changes.items() if key in config["dflash_config"]}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=why):
        opened(tmp_path / "drafter", (blocks.HIDDEN, blocks.VOCABULARY, blocks.LAYERS))


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[[", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        check_tokenizers(tmp_path, tmp_path)


def test_a_file_that_becomes_shorter_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_files.save_eagle3("llama", tmp_path / "drafter")
    model, file = zoo.save_checkpoint("llama", tmp_path / "model"), drafter / "model.safetensors"
    whole = Drafters.load

    def load(*args: Any) -> Any:
        opened = source.opened

        def cut(*args: Any) -> BlockDrafter:
            made = opened(*args)
            file.write_bytes(file.read_bytes()[:-200])
            return made

        with monkeypatch.context() as patched:
            patched.setattr(source, "opened", cut)
            return whole(*args)

    monkeypatch.setattr(Drafters, "load", load)
    with pytest.raises(CheckpointError, match=r"cannot be read: .* download the drafter again"):
        outcore.load_model(model, draft=str(drafter), context=32)
