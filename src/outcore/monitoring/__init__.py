"""What a running model does, for others to look at: snapshots of it, and the file in which others find them.

import outcore, outcore.monitoring

model, tokenizer = outcore.load("mlx-community/Qwen3-8B-4bit", memory="4GB")
outcore.monitoring.publish(model)  # `outcore monitor` in another terminal shows it, until the model is closed
"""

from __future__ import annotations

from .publisher import publish

__all__ = ["publish"]
