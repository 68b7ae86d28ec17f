"""mlx-lm's private names that are touched are there, and do what is relied on; and none is touched elsewhere."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

import outcore
from outcore.modules import mlx_lm_compat as compat
from outcore.modules.mlx_lm_tokenizer import download as downloaded

PRIVATE = {"_get_classes", "_download", "_generation_batch", "_BaseCache", "_idx", "_tokenize"}


def test_every_cache_is_one() -> None:
    assert all(issubclass(kind, compat.BaseCache) for kind in (KVCache, RotatingKVCache, ArraysCache, CacheList))


def test_classes_are_those_of_the_config() -> None:
    model, arguments = compat.classes_of({"model_type": "llama"})
    assert (model.__name__, arguments.__name__) == ("Model", "ModelArgs")
    with pytest.raises(ValueError, match="nonsense"):
        compat.classes_of({"model_type": "nonsense"})


def test_downloads_take_a_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(inspect.signature(mlx_lm.utils._download).parameters)[:2] == ["path_or_hf_repo", "revision"]
    monkeypatch.setattr(mlx_lm.utils, "_download", lambda repo, revision: f"/{repo}/{revision}")
    assert downloaded("a", "b") == Path("/a/b")


def test_a_window_writes_where_its_index_says() -> None:
    cache = RotatingKVCache(max_size=4, keep=1)
    for n in range(6):
        token = mx.full((1, 1, 1, 1), n)
        cache.update_and_fetch(token, token)
    at = compat.window_index(cache)
    assert cache.keys is not None and cache.keys.flatten().tolist() == [0, 4, 5, 3] and at == 3
    compat.set_window_index(cache, 2)
    cache.update_and_fetch(mx.full((1, 1, 1, 1), 9), mx.full((1, 1, 1, 1), 9))
    assert cache.keys.flatten().tolist() == [0, 4, 9, 3]


def test_no_other_module_touches_them() -> None:
    root = Path(outcore.__file__).parent
    found = {
        (path.relative_to(root).as_posix(), name)
        for path in root.rglob("*.py")
        if path.name not in ("mlx_lm_compat.py", "mlx_lm_tokenizer.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in [getattr(node, "attr", None), *(a.name for a in getattr(node, "names", []) if hasattr(a, "name"))]
        if name in PRIVATE
    }
    assert found == set()
