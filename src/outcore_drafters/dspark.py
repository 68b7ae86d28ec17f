"""DSpark: DFlash whose logits of a row also depend on the token before, by a product of two small matrices, which
stands for a table of which token follows which."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .dflash import Block, DFlash, names_of, required, setting
from .drafter import Config, DraftedModel


class Markov(nn.Module):
    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocabulary, rank), nn.Linear(rank, vocabulary, bias=False)

    def __call__(self, before: mx.array) -> mx.array:
        made: mx.array = self.markov_w2(self.markov_w1(before))
        return made


class DSpark(DFlash):
    """Its rows draft from that of the text's last token on, unless the config says otherwise. Its head for how certain
    a row is goes unused."""

    kind = "DSpark"
    eps = 1e-5
    longest = 8
    sign = "qwen3dsparkmodel"

    def __init__(self, config: Config, target: DraftedModel) -> None:
        super().__init__(config, target)
        self.leading = 0 if setting(config, "sample_from_anchor", True) else 1
        if setting(config, "markov_head_type", "vanilla") != "vanilla":
            raise ValueError("its markov_head_type is not vanilla")
        self.markov_head = Markov(int(required(config, "vocab_size")), int(setting(config, "markov_rank", 256)))

    @classmethod
    def block_tokens(cls, config: Config) -> int:
        trained = int(required(config, "block_size")) + (not config.get("dspark_bonus_anchor", False))
        return min(trained, int(setting(config, "runtime_block_size", cls.longest)))

    @classmethod
    def claims(cls, config: Config) -> bool:
        named = setting(config, "projector_type") == "dspark" or cls.sign in names_of(config)
        return (named or int(setting(config, "markov_rank", 0)) > 0) and super().claims(config)

    def chosen(self, block: Block, row: int, before: mx.array) -> mx.array:
        made: mx.array = (block.logits[:, row] + self.markov_head(before))[0]
        return made
