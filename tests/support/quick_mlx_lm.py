"""mlx-lm looks at the signature of a model's arguments once for each key of a config.json: 7 % of a tiny model's load.

Whoever imports this has each of them looked at once.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace

import mlx_lm.models.base

mlx_lm.models.base.inspect = SimpleNamespace(signature=functools.cache(inspect.signature))
