from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest

import kept_tokenizers
import quick_compiler
import quick_mlx_lm  # noqa: F401
import quick_transformers
import zoo
from outcore.calibration import first_use
from outcore.disk.disk_probe import wrong_reads
from outcore.machine import written
from outcore.machine.allocator import AllocatorLimits, limits
from outcore.plan.partition import cut_layer
from rank_processes import RankProcesses, WaitingRanks

WITH_RANKS = {
    "test_combinations",
    "test_launch_models",
    "test_leading",
    "test_rank_drafters",
    "test_rank_drafts",
    "test_rank_folders",
    "test_ranks",
    "test_ranks_told_apart",
}
"""Files whose tests use ``waiting_ranks``."""

LIMITS = mx.set_memory_limit(2**40), mx.set_cache_limit(2**30)
mx.set_memory_limit(LIMITS[0])
mx.set_cache_limit(LIMITS[1])
limits_set: list[str] = []
"""Which of MLX's limits somebody has set since they were last looked at, which takes waiting for all streams."""


def noted(name: str) -> None:
    real = getattr(mx, name)

    def set_limit(nbytes: int) -> int:
        limits_set.append(name)
        return int(real(nbytes))

    setattr(mx, name, set_limit)


noted("set_memory_limit")
noted("set_cache_limit")

gc.disable()  # until all is imported and collected, as it would be looked at again and again
vars(mlx_lm.utils)["_load_tokenizer"] = kept_tokenizers.keeping(mlx_lm.utils._load_tokenizer)


def pytest_configure(config: pytest.Config) -> None:
    """What makes other processes quicker; the compiler for whoever runs all tests, and does so in several processes."""
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="outcore-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    quick_transformers.for_processes(Path(folder))
    # Where Python is told to keep no bytecode, each process that a test starts compiles all of Outcore: 0.3 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False  # pytest-xdist has its workers as it is itself
    if config.getoption("numprocesses", None):
        quick_compiler.first_in_path(Path(folder))
        # Arrays are made in one thread and freed in another: more of them kept for the next takes 13 % off all tests.
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=1024")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each of several processes imports its share of the tests first: in a fresh clone all of them would compile all.

    What fails here fails again when it is collected.
    """
    worker, here = getattr(session.config, "workerinput", None), Path(__file__).parent
    if worker is None or here not in (Path(asked).resolve() for asked in session.config.args):
        return
    mine = slice(int(worker["workerid"].removeprefix("gw")), None, worker["workercount"])
    for file in sorted(here.glob("test_*.py"))[mine]:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(file.stem)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    yield
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share a process and what its fixtures made; files whose tests use ranks share one."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ranks" if Path(file).stem in WITH_RANKS else file

    config.option.loadscopereorder = False  # the files with fewest tests are not the quickest
    return ByFile(config, log)


well: set[tuple[int, str]] = set()
"""Disks that were read right, and how."""


def wrong_reads_once(file: Path, io: str) -> Sequence[tuple[int, int, str]]:
    """As ``wrong_reads``; a disk that was well is not looked at by every test's first model."""
    there = file.stat().st_dev, io
    wrong = () if there in well else wrong_reads(file, io)
    if not wrong:
        well.add(there)
    return wrong


numbers = itertools.count()
CUTS = 400
"""More than two models' plans keep; thousands of them would be looked at by the garbage collector at each load."""


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed copies go to a folder of the test's own, and nobody's configuration file changes what it sees."""
    if cut_layer.cache_info().currsize > CUTS:
        cut_layer.cache_clear()
    if "tmp_path" in request.fixturenames:
        cache = request.getfixturevalue("tmp_path") / "outcore-cache"
    else:  # no folder is made that is not needed
        cache = tmp_path_factory.getbasetemp() / f"outcore-cache-{next(numbers)}"
    monkeypatch.setenv("OUTCORE_CONFIG", os.devnull)
    for variable in ("OUTCORE_MEMORY", "OUTCORE_MODEL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OUTCORE_CACHE", str(cache))
    monkeypatch.setattr(first_use, "wrong_reads", wrong_reads_once)
    monkeypatch.setattr(written, "_pending", {})
    monkeypatch.setenv("OUTCORE_MONITOR", "off")  # what is tested is nobody's business but its tests'


def beside_others(set_one: Callable[..., None]) -> Callable[..., None]:
    """Sets MLX's memory limit to what models may take besides what was there before the first of them.

    Where a module keeps mlx-lm's own model, a small budget's limit is passed all the time: then MLX waits for each
    operation in a loop that takes as much of a processor as the work does (``eval_impl`` in 0.32.4's transforms.cpp).
    """
    others = 0

    def set_beside(self: AllocatorLimits, name: str, limit: Callable[[int], int], nbytes: int | None) -> None:
        nonlocal others
        if name == "memory" and nbytes is not None:
            others = others if name in self._limits else mx.get_active_memory()
            nbytes += others
        set_one(self, name, limit, nbytes)

    return set_beside


@pytest.fixture(autouse=True)
def limits_beside_others(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where the limits themselves are what is tested."""
    if request.module.__name__ != "test_allocator":
        monkeypatch.setattr(AllocatorLimits, "_set", beside_others(AllocatorLimits._set))


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """No test leaves a reader thread behind, or MLX's limits changed where no model is left.

    Threads of a model that a module's tests share are there before."""
    before = set(_threads())
    yield
    if _threads() - before:
        gc.collect()  # models that were not closed; not after every test, as it takes 0.1 s
    end = time.monotonic() + 30  # a thread that ends itself (the monitor's, when the last model leaves) may be at it
    while _threads() - before and time.monotonic() < end:
        time.sleep(0.01)
    if limits_set and not limits.held:
        found = mx.set_memory_limit(LIMITS[0]), mx.set_cache_limit(LIMITS[1])
        limits_set.clear()
        assert found == LIMITS, "MLX's limits are not what they were"
    left = [t.name for t in _threads() - before]
    assert not left, f"threads left running: {left}"


@pytest.fixture(scope="module", autouse=True)
def nothing_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module's functions keep for its own tests goes with it: where other arrays take more than a model may,
    MLX waits before each operation. And what was there before a module is not looked at again whenever garbage is
    collected, as each load does that finds a closed model: imports, and what outlives modules."""
    gc.collect()
    gc.freeze()
    yield
    kept = [f for f in vars(request.module).values() if isinstance(f, functools._lru_cache_wrapper)]
    for function in kept:
        function.cache_clear()
    if kept:
        gc.collect()


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("outcore-")}


@pytest.fixture(scope="session", autouse=True)
def checkpoints_kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All processes of a run share them."""
    base = tmp_path_factory.getbasetemp()
    zoo.KEPT = (base.parent if hasattr(request.config, "workerinput") else base) / "zoo"
    zoo.KEPT.mkdir(exist_ok=True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The trained model that ``outcore demo`` runs: 16 layers, 4 bit, float32 scales."""
    return Path(str(resources.files("outcore_demo_model")))


@pytest.fixture(scope="session")
def short_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's first four layers, three of them recurrent: a quarter of the time, and no sense in its text."""
    folder = tmp_path_factory.mktemp("models") / "short"
    shutil.copytree(demo_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "layer_types": text["layer_types"][:4]}
    (folder / "config.json").write_text(json.dumps(config))
    weights: dict[str, mx.array] = mx.load(str(demo_model / "model.safetensors"))  # type: ignore[assignment]
    kept = {k: a for k, a in weights.items() if ".layers." not in k or int(k.split(".layers.")[1].split(".")[0]) < 4}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "mlx"})
    return folder


@pytest.fixture(scope="session")
def quick_models(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The demo model's architecture and tokenizer in random float32 weights, of any number of layers.

    Of so many layers (two, unless told) one has attention, the others are recurrent: a prompt's tokens go through those
    one after the other.
    """
    root = tmp_path_factory.mktemp("quick")

    @functools.cache
    def made(layers: int, attention: int = 2) -> Path:
        config = zoo.CONFIGS["qwen3_5"]
        text = config["text_config"] | {
            "num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 8192,
            "full_attention_interval": attention, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
            "max_position_embeddings": 4096, "tie_word_embeddings": True,
        }  # fmt: skip
        folder = root / (str(layers) if attention == 2 else f"{layers}-{attention}")
        with pytest.MonkeyPatch.context() as patch:
            whole = {"text_config": text, "vocab_size": text["vocab_size"], "tie_word_embeddings": True}
            patch.setitem(zoo.CONFIGS, "qwen3_5", config | whole)
            zoo.save_checkpoint("qwen3_5", folder)
        shutil.copy(demo_model / "tokenizer.json", folder)
        tokenizer = json.loads((demo_model / "tokenizer_config.json").read_text())
        # Random weights may end a text anywhere.
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": None}))
        return folder

    return made


@pytest.fixture(scope="session")
def quick_model(quick_models: Callable[[int], Path]) -> Path:
    """As many layers as the demo model has, and about its size: prompts take a sixth of the time."""
    return quick_models(16)


@pytest.fixture(scope="session")
def served(quick_models: Callable[[int], Path]) -> Path:
    """What a server serves in tests: six layers, three of them not recurrent."""
    return quick_models(6)


@pytest.fixture(scope="session")
def waiting_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WaitingRanks]:
    ranks = WaitingRanks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture
def two(waiting_ranks: WaitingRanks) -> RankProcesses:
    """Two ranks joined by pipes, which tests of all modules use one after the other."""
    return waiting_ranks.two()
