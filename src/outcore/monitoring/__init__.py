"""Lets ``outcore monitor`` watch running models: each process writes snapshots of its models to a file.

import outcore, outcore.monitoring

model, tokenizer = outcore.load("mlx-community/Qwen3-8B-4bit", memory="4GB")
outcore.monitoring.publish(model)  # `outcore monitor` in another terminal shows it, until the model is closed
"""

from __future__ import annotations

from .publisher import publish

__all__ = ["publish"]
