"""Block drafters of every published kind, tiny and random, and the logits that mlx-vlm's implementations give for them.

    python benchmarks/drafter_parity.py [--write FILE]

needs mlx-vlm (the extra ``parity``). Each case is a checkpoint as it would be published, and a text of several rounds:
a prompt's hidden states, a draft, as many of its tokens as were accepted, and so on. tests/test_drafter_parity.py
compares Outcore's drafters with it, bit for bit where mlx-vlm is installed, and with FILE, which has some of the
numbers, always.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

HIDDEN, VOCABULARY, LAYERS, KNOWN = 32, 96, 6, 40
GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "support" / "drafters.json"
# Of each draft, the logits of these tokens are in GOLDEN, and the best token.
SHOWN = range(5, VOCABULARY, 23)

_TEXT = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_INSIDE: dict[str, Any] = {"mask_token_id": 95, "target_layer_ids": [1, 3, 4]}
_WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_CONVOLUTIONS: dict[str, Any] = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}


def _flash(inside: Mapping[str, Any] | None = None, /, **more: Any) -> dict[str, Any]:
    base = {**_TEXT, "model_type": "qwen3", "num_target_layers": LAYERS, "architectures": ["DFlashDraftModel"]}
    return {**base, "block_size": 6, "dflash_config": {**_INSIDE, **(inside or {})}, **more}


def _flash2(inside: Mapping[str, Any] | None = None, /, **more: Any) -> dict[str, Any]:
    return _flash({**_CONVOLUTIONS, "block_size": 6, **(inside or {})}, architectures=["DFlash2DraftModel"], **more)


def _spark(inside: Mapping[str, Any] | None = None, /, **more: Any) -> dict[str, Any]:
    return _flash({"projector_type": "dspark", "markov_rank": 4, **(inside or {})}, architectures=[], **more)


def _eagle(**more: Any) -> dict[str, Any]:
    inner = {**_TEXT, "model_type": "llama", "num_hidden_layers": more.pop("layers", 1)}
    base = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "block_size": 5}
    return {**base, "transformer_layer_config": inner, "draft_vocab_size": VOCABULARY, **more}


@dataclass(frozen=True)
class Case:
    """A drafter and a text: its config, the tokens of the prompt, how many tokens each draft has accepted."""

    config: dict[str, Any]
    prompt: int
    accepted: tuple[int, ...] = (2, 0, 3, 0, 0, 9, 1)


CASES = {
    "dflash": Case(_flash(), 13),
    "dflash-windows": Case(_flash(**_WINDOWS), 20),
    "dflash-short": Case(_flash(**_WINDOWS), 3),
    "dflash-causal": Case(
        _flash({"causal": True, "attention_sink_bias": True}, final_logit_softcapping=2.0, **_WINDOWS), 20
    ),
    "dflash-latest": Case(_flash({"draft_window_size": 16}), 78),
    "dflash-latest-windows": Case(_flash({"draft_window_size": 16}, **_WINDOWS), 90),
    "dflash-runtime": Case(_flash({"runtime_block_size": 4}, rope_scaling=_YARN), 9),
    "dflash2": Case(_flash2(), 13),
    "dflash2-windows": Case(
        _flash2(
            {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "runtime_block_size": 6},
            rope_is_neox_style=False,
            **_WINDOWS,
        ),
        20,
    ),
    "dspark": Case(_spark(), 13),
    "dspark-anchored": Case(
        _spark(
            {"sample_from_anchor": False, "swa_window_size": 7, "causal": True},
            dspark_bonus_anchor=True,
            rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
            **_WINDOWS,
        ),
        20,
    ),
    "dspark-certain": Case(_spark({"enable_confidence_head": True, "runtime_block_size": 5}), 11),
    "eagle3": Case(_eagle(), 13),
    "eagle3-known": Case(_eagle(draft_vocab_size=KNOWN, norm_before_residual=True), 13),
    "eagle3-normed": Case(_eagle(norm_before_fc=True, layers=2), 13),
}


def numbers(name: str, *shape: int) -> np.ndarray:
    """Random numbers that depend on the name only, the same on every machine."""
    seed = int.from_bytes(name.encode(), "little") % (1 << 61)
    whole = np.random.default_rng(seed).integers(-1000, 1000, size=shape)
    return (whole / 1000).astype(np.float32)


def tensors(name: str) -> dict[str, mx.array]:
    """A case's checkpoint, by the published names."""
    config = CASES[name].config
    shapes = _eagle_shapes(config) if "transformer_layer_config" in config else _flash_shapes(config)
    made = {}
    for key, shape in shapes.items():
        values = numbers(name + key, *shape)
        if len(shape) == 1 and "norm" in key:
            values = 1 + values / 4
        elif len(shape) > 1 and not key.endswith("_codebook"):
            values = values * np.float32(1.7 / shape[-1] ** 0.5)
        made[key] = mx.array(values)
    if config.get("draft_vocab_size", VOCABULARY) != VOCABULARY:
        chosen = np.sort(np.random.default_rng(5).permutation(VOCABULARY)[:KNOWN])
        made["d2t"] = mx.array((chosen - np.arange(KNOWN)).astype(np.int64))
        made["t2d"] = mx.array(np.isin(np.arange(VOCABULARY), chosen))
    return made


def _layer_shapes(at: str, inputs: int, norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}self_attn.q_proj.weight": (32, inputs),
        f"{at}self_attn.k_proj.weight": (16, inputs),
        f"{at}self_attn.v_proj.weight": (16, inputs),
        f"{at}self_attn.o_proj.weight": (HIDDEN, 32),
        f"{at}mlp.gate_proj.weight": (48, HIDDEN),
        f"{at}mlp.up_proj.weight": (48, HIDDEN),
        f"{at}mlp.down_proj.weight": (HIDDEN, 48),
        **{f"{at}{norm}.weight": (HIDDEN,) for norm in norms},
    }


def _flash_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    inside, norms = config["dflash_config"], ("input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,),
    }  # fmt: skip
    for layer in range(2):
        at = f"layers.{layer}."
        shapes |= _layer_shapes(at, HIDDEN, norms)
        shapes |= {f"{at}self_attn.{norm}.weight": (8,) for norm in ("q_norm", "k_norm")}
        if inside.get("attention_sink_bias"):
            shapes[f"{at}self_attn.attention_sink_bias"] = (4,)
        if "conv_kernel_size" in inside:
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{at}{conv}.base_kernel"] = (2, 3, HIDDEN)
                shapes[f"{at}{conv}.kernel_projection.weight"] = (2 * 3 * 4, HIDDEN)
    if "selector_rank" in inside:
        shapes["candidate_selector.predecessor_codebook"] = (VOCABULARY, 4)
        shapes["candidate_selector.successor_codebook"] = (VOCABULARY, 4)
        shapes["candidate_selector.hidden_projection.weight"] = (4, HIDDEN)
    if "markov_rank" in inside:
        shapes |= {"markov_head.markov_w1.weight": (VOCABULARY, 4), "markov_head.markov_w2.weight": (VOCABULARY, 4)}
    if inside.get("enable_confidence_head"):
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN + 4), "confidence_head.proj.bias": (1,)}
    return shapes


def _eagle_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    norms = ("input_layernorm", "post_attention_layernorm")
    shapes = {
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (config["draft_vocab_size"], HIDDEN),
        **_layer_shapes("layers.0.", 2 * HIDDEN, (*norms, "hidden_norm")),
    }
    for layer in range(1, config["transformer_layer_config"]["num_hidden_layers"]):
        shapes |= _layer_shapes(f"layers.{layer}.", HIDDEN, norms)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    return shapes


def write_checkpoint(name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors(name), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CASES[name].config))
    return folder


class TargetModel(nn.Module):
    """The parts of a model that drafters borrow. It is ``outcore_drafters.drafter.Shared``, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = (
            nn.Embedding(VOCABULARY, HIDDEN),
            nn.Linear(HIDDEN, VOCABULARY, bias=False),
        )
        self.embed_tokens.weight = mx.array(numbers("embeddings", VOCABULARY, HIDDEN))
        self.lm_head.weight = mx.array(numbers("head", VOCABULARY, HIDDEN)) / 4
        self.layers = [nn.Identity() for _ in range(LAYERS)]
        self.config = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}

    def rollback_speculative_cache(self) -> None:
        raise NotImplementedError

    def embedded(self, ids: mx.array) -> mx.array:
        made: mx.array = self.embed_tokens(ids[None])
        return made

    def logits(self, states: mx.array) -> mx.array:
        made: mx.array = self.lm_head(states)
        return made


@dataclass(frozen=True)
class Round:
    """A text's next tokens and a draft after them.

    Attributes:
        states: of the model's layers, (1, n, 3 * HIDDEN).
        following: the token after each.
        drafted: the draft.
        logits: (drafted, VOCABULARY), -inf where the drafter knows no token.
    """

    states: mx.array
    following: list[int]
    drafted: list[int]
    logits: np.ndarray


def states_of(name: str, number: int, count: int) -> mx.array:
    return mx.array(numbers(f"{name} states {number}", 1, count, 3 * HIDDEN))


class _Sampler:
    """Keeps the logits that mlx-vlm's drafters sample from and takes tokens that have nothing to do with them."""

    def __init__(self, name: str) -> None:
        self.kept: list[mx.array] = []
        self._name, self._drawn = name, 0

    def __call__(self, logits: mx.array) -> mx.array:
        rows = logits.reshape(-1, logits.shape[-1])
        self.kept.append(rows)
        self._drawn += 1
        drawn = (numbers(f"{self._name} drawn {self._drawn}", rows.shape[0]) + 1) / 2 * (rows.shape[1] - 1)
        return mx.array(drawn.astype(np.int32)).reshape(logits.shape[:-1])

    sample_proposal = __call__


def reference(name: str, folder: Path) -> Iterator[Round]:
    """Yields a case's rounds by mlx-vlm's drafter. ``folder``: of its checkpoint."""
    from mlx_vlm.speculative.drafters import load_drafter

    case, target = CASES[name], TargetModel()
    drafter, kind = load_drafter(str(folder))
    sampler, cache = _Sampler(name), drafter.reset(target)
    following = _tokens(f"{name} prompt", case.prompt)
    states = states_of(name, 0, case.prompt)
    if kind == "eagle3":
        prompt = mx.array([[0, *following[:-1]]], dtype=mx.int32)
        drafter.prefill_from_target_hidden(prompt, states, following[-1], sampler)
    if hasattr(drafter, "candidate_selector"):
        _show_all(drafter.candidate_selector, sampler)
    length = _block_length(drafter)
    for number, accepted in enumerate(case.accepted, 1):
        drafted = drafter.draft_block(following[-1], states, cache, length, sampler)[0].tolist()
        kept = mx.concatenate([a for a in sampler.kept if a.shape[-1] == sampler.kept[-1].shape[-1]])
        yield Round(states, following, drafted, _of_all(np.array(kept.astype(mx.float32)), drafter))
        sampler.kept.clear()
        accepted = min(accepted, len(drafted))
        following = [*drafted[:accepted], *_tokens(f"{name} bonus {number}", 1)]
        states = states_of(name, number, len(following))
        if kind == "eagle3":
            tokens = mx.array([drafted], dtype=mx.int32)
            drafter.accept_verified_tokens(states, tokens, accepted, following, sampler)


def _tokens(name: str, count: int) -> list[int]:
    return [int(x) for x in (numbers(name, count) + 1) / 2 * (VOCABULARY - 2)]


def _block_length(drafter: Any) -> int:
    from mlx_vlm.speculative.common import _dflash_block_total

    return int(_dflash_block_total(drafter, None))


def _of_all(kept: np.ndarray, drafter: Any) -> np.ndarray:
    """Logits of all of the model's tokens from those of a draft vocabulary."""
    if getattr(drafter, "d2t", None) is None:
        return kept
    made = np.full((len(kept), VOCABULARY), -np.inf, np.float32)
    made[:, np.arange(kept.shape[1]) + np.array(drafter.d2t)] = kept
    return made


def _show_all(selector: Any, sampler: _Sampler) -> None:
    """Lets DFlash2's selector tell the sampler of all tokens, not only how good its candidates are."""
    select: Callable[..., mx.array] = selector.select

    def shown(hidden: mx.array, logits: mx.array, anchors: mx.array, _: Any) -> mx.array:
        own = _Sampler(sampler._name)
        own._drawn = sampler._drawn
        path = select(hidden, logits, anchors, own)
        sampler._drawn = own._drawn
        best = mx.argpartition(logits, -selector.top_k, axis=-1)[..., -selector.top_k :]
        for row, scores in enumerate(own.kept):
            everything = np.full((1, VOCABULARY), -np.inf, np.float32)
            everything[0, np.array(best[0, row])] = np.array(scores[0].astype(mx.float32))
            sampler.kept.append(mx.array(everything))
        return path

    selector.select = shown


def golden_of(rounds: list[Round]) -> list[dict[str, Any]]:
    """What GOLDEN has of a case: the tokens, and of each draft's rows some logits (null: -inf) and the best token."""
    return [
        {
            "following": r.following,
            "drafted": r.drafted,
            "best": [int(row.argmax()) for row in r.logits],
            "logits": [[float(f"{row[t]:.6g}") if np.isfinite(row[t]) else None for t in SHOWN] for row in r.logits],
        }
        for r in rounds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, nargs="?", const=GOLDEN, metavar="FILE")
    write = parser.parse_args().write
    found = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rounds = list(reference(name, write_checkpoint(name, Path(folder))))
        found[name] = golden_of(rounds)
        print(f"{name}: {len(rounds)} drafts of {len(rounds[0].drafted)} tokens")
    if write is not None:
        lines = (f"{json.dumps(name)}: {json.dumps(rounds, separators=(',', ':'))}" for name, rounds in found.items())
        write.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
