"""All cores on the CPU device, and weights at any address of a slot: the same bits as MLX's own product."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

import zoo
from outcore.disk.layout import GPU_ALIGN
from outcore.engine.model_profile import device_alignment
from outcore.machine.hardware import cores
from outcore.modules.split_linear import ROW_STEP, SMALLEST, split_rows

DTYPES = [mx.float32, mx.bfloat16, mx.float16]
MODES = [*(("affine", bits) for bits in (2, 3, 4, 5, 6, 8)), ("mxfp4", 4), ("nvfp4", 4), ("mxfp8", 8)]
IN_TURN = [(*mode, DTYPES[(i + i // 3) % 3]) for i, mode in enumerate(MODES)]
"""Each way to quantize with one type of what is computed."""
TOKENS = (1, 2, 3, 5, 17)
OFFSETS = (1, 2, 4, 63)
"""Of an address: odd, and aligned for two and for four bytes, but not for a vector."""


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def random(module: nn.Module, dtype: mx.Dtype, seed: int = 0) -> nn.Module:
    zoo.make_weights(module, seed)
    module.set_dtype(dtype)
    return module


def quantized(module: nn.Module, mode: str, bits: int, group_size: int | None = None) -> nn.Module:
    group_size = group_size or {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}[mode]
    done: nn.Module = module.to_quantized(group_size=group_size, bits=bits, mode=mode)
    return done


def inputs(dims: int, dtype: mx.Dtype, tokens: Sequence[int] = TOKENS) -> list[mx.array]:
    """A batch of one for each number of tokens, one of two, and a single vector."""
    shapes = [*((1, n, dims) for n in tokens), (2, 3, dims), (dims,)]
    return [mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i, shape in enumerate(shapes)]


def bits_of(array: mx.array) -> bytes:
    return bytes(mx.contiguous(array).reshape(-1).view(mx.uint8))


def assert_split_changes_no_bit(module: nn.Module, dims: int, dtype: mx.Dtype, name: str = "__call__") -> None:
    """Every number of streams gives the bits of the class as MLX has it."""
    plain = type(module)
    product: Callable[[nn.Module, mx.array], mx.array] = getattr(plain, name)
    xs = inputs(dims, dtype)
    expected = [bits_of(product(module, x)) for x in xs]
    for streams in (2, 3, 4):
        module.__class__ = plain
        assert split_rows(module, streams, smallest=0) == 1
        assert type(module) is not plain and isinstance(module, plain)
        for x, bits in zip(xs, expected, strict=True):
            found = getattr(type(module), name)(module, x)
            assert bits_of(found) == bits, (streams, x.shape)


# Rows: fewer than there are streams for, odd ones, and those that split evenly.
@pytest.mark.parametrize(
    ("rows", "bias"), [(2 * ROW_STEP, True), (2 * ROW_STEP + 1, False), (193, True), (333, False), (1024, True)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_layer_split_by_rows_gives_the_same_bits(dtype: mx.Dtype, bias: bool, rows: int) -> None:
    for dims in (64, 515):
        assert_split_changes_no_bit(random(nn.Linear(dims, rows, bias=bias), dtype), dims, dtype)


@pytest.mark.parametrize(("mode", "bits", "dtype"), IN_TURN, ids=str)
def test_a_quantized_layer_split_by_rows_gives_the_same_bits(mode: str, bits: int, dtype: mx.Dtype) -> None:
    for rows, bias in ((2 * ROW_STEP, True), (259, False)):
        module = quantized(random(nn.Linear(128, rows, bias=bias), dtype), mode, bits)
        assert_split_changes_no_bit(module, 128, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tied_head_split_by_rows_gives_the_same_bits(dtype: mx.Dtype) -> None:
    for rows in (2 * ROW_STEP, 333, 1000):
        assert_split_changes_no_bit(random(nn.Embedding(rows, 128), dtype), 128, dtype, "as_linear")


@pytest.mark.parametrize(("mode", "bits", "dtype"), IN_TURN, ids=str)
def test_a_quantized_tied_head_split_by_rows_gives_the_same_bits(mode: str, bits: int, dtype: mx.Dtype) -> None:
    module = quantized(random(nn.Embedding(259, 64), dtype), mode, bits)
    assert_split_changes_no_bit(module, 64, dtype, "as_linear")


def test_embedding_tokens_is_as_it_was() -> None:
    ids = mx.array([[0, 5, 332]])
    for module in (random(nn.Embedding(333, 128), mx.bfloat16), quantized(nn.Embedding(333, 128), "affine", 4)):
        expected = bits_of(module(ids))
        assert split_rows(module, 2, smallest=0) == 1
        assert bits_of(module(ids)) == expected


def test_layers_of_every_group_size_can_be_split() -> None:
    for group_size in (32, 64, 128):
        module = quantized(random(nn.Linear(256, 200), mx.float32), "affine", 4, group_size)
        assert_split_changes_no_bit(module, 256, mx.float32)


def test_chains_of_split_layers_give_the_same_bits_many_times_over() -> None:
    layers = [random(nn.Linear(256, 256), mx.bfloat16, seed) for seed in range(12)]
    x = mx.random.normal((1, 3, 256), key=mx.random.key(0)).astype(mx.bfloat16)

    def run() -> bytes:
        y = x
        for layer in layers:
            y = nn.silu(layer(y)) + y
        return bits_of(y)

    expected = run()
    for layer in layers:
        split_rows(layer, 4, smallest=0)
    assert {run() for _ in range(30)} == {expected}


def test_models_share_the_threads_behind_their_streams() -> None:
    """MLX ends none of them, and waits for each whenever it clears its cache: 5 ms of a processor for 400."""

    def threads() -> int:
        layer = random(nn.Linear(64, 512), mx.float32)
        split_rows(layer, 4, smallest=0)
        mx.eval(layer(mx.ones((1, 64))))
        return psutil.Process().num_threads()

    assert threads() == threads()


# What is left alone


class Own(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return -super().__call__(x)


def test_a_class_that_is_not_mlxs_own_keeps_what_it_does() -> None:
    module = random(Own(64, 512), mx.float32)
    assert split_rows(module, 4, smallest=0) == 0
    assert type(module) is Own


def test_small_layers_are_left_alone() -> None:
    model = nn.Sequential(
        nn.Linear(512, 512), nn.Linear(512, 511), nn.Linear(1 << 15, 2 * ROW_STEP - 1), nn.RMSNorm(512)
    )
    assert SMALLEST == 512 * 512
    assert split_rows(model, 2) == 1
    assert type(model.layers[0]) is not nn.Linear
    assert {type(layer) for layer in model.layers[1:]} == {nn.Linear, nn.RMSNorm}


def test_a_quantized_layers_size_is_counted_in_weights() -> None:
    for bits in (2, 3, 8):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 448))
        nn.quantize(model, bits=bits)
        assert split_rows(model, 2) == 1


@pytest.mark.parametrize("streams", [1, 0])
def test_one_stream_changes_nothing(streams: int) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024))
    assert split_rows(model, streams, smallest=0) == 0
    assert type(model.layers[0]) is nn.Linear


def test_the_split_keeps_parameters_and_their_paths() -> None:
    model = zoo.build("llama")
    before = {path: id(module) for path, module in model.named_modules()}
    parameters = [path for path, _ in nn.utils.tree_flatten(model.parameters())]
    assert split_rows(model, 2, smallest=0) > 0
    assert {path: id(module) for path, module in model.named_modules()} == before
    assert [path for path, _ in nn.utils.tree_flatten(model.parameters())] == parameters


def test_cores_are_those_that_this_process_may_use() -> None:
    assert cores() >= 1


# Weights at odd addresses. `layer_sizes.device_alignment` rests on these: where it says 1, tensors stay where the
# file's own offsets put them.

unaligned = pytest.mark.skipif(device_alignment() != 1, reason="weights are aligned on this device")


class Buffer:
    """A uint8 array whose bytes are written in place, as a slot's are."""

    def __init__(self, nbytes: int) -> None:
        self.array = mx.zeros((nbytes,), dtype=mx.uint8)
        mx.eval(self.array)
        self.memory = np.array(self.array, copy=False)

    def place(self, a: mx.array, at: int) -> mx.array:
        """The array's bytes at address ``at`` modulo 64, seen as what it was: a view, as the engine makes it."""
        at += -self.memory.ctypes.data % 64
        self.memory[at : at + a.nbytes] = np.frombuffer(bits_of(a), np.uint8)
        view = self.array[at : at + a.nbytes].view(a.dtype).reshape(a.shape)
        mx.eval(view)
        # It is the buffer's own memory, not a copy that MLX has aligned.
        seen = view if a.dtype != mx.bfloat16 else view.view(mx.uint16)
        assert np.array(seen, copy=False).ctypes.data == self.memory.ctypes.data + at
        return view


def matrices(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """What is streamed of a module: every parameter with more than one dimension."""
    return [(m, key) for m in module.modules() for key, a in m.items() if isinstance(a, mx.array) and a.ndim > 1]


def assert_the_same_at_every_address(module: nn.Module, run: Callable[[], Any]) -> None:
    """``run`` gives the same bits wherever the module's matrices lie."""
    places = matrices(module)
    aligned = [m[key] for m, key in places]
    assert places
    expected = bits_of(run())
    for at in OFFSETS:
        for (m, key), a in zip(places, aligned, strict=True):
            dict.__setitem__(m, key, Buffer(a.nbytes + 128).place(a, at))
        assert bits_of(run()) == expected, at
    for (m, key), a in zip(places, aligned, strict=True):
        dict.__setitem__(m, key, a)


@unaligned
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers_compute_the_same_bits_from_any_address(dtype: mx.Dtype, streams: int) -> None:
    for dims, rows in ((64, 192), (515, 333)):
        module = random(nn.Linear(dims, rows), dtype)
        split_rows(module, streams, smallest=0)
        for x in inputs(dims, dtype, (1, 17)):
            assert_the_same_at_every_address(module, lambda x=x, module=module: module(x))


@unaligned
@pytest.mark.parametrize(("mode", "bits", "dtype"), IN_TURN, ids=str)
def test_quantized_layers_compute_the_same_bits_from_any_address(mode: str, bits: int, dtype: mx.Dtype) -> None:
    """Whole, and split: one token and several each."""
    module = quantized(random(nn.Linear(128, 160), dtype), mode, bits)
    assert {key for _, key in matrices(module)} >= {"weight", "scales"}
    for streams, x in zip((1, 1, 2, 2), inputs(128, dtype, (1, 17, 1, 17)), strict=False):
        split_rows(module, streams, smallest=0)
        assert_the_same_at_every_address(module, lambda x=x: module(x))


@unaligned
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_quantized_layers_of_every_group_size_compute_the_same_bits_from_any_address(group_size: int) -> None:
    for bits in (2, 3, 4, 5, 6, 8):
        module = quantized(random(nn.Linear(128, 100), mx.bfloat16), "affine", bits, group_size)
        x = inputs(128, mx.bfloat16)[2]
        assert_the_same_at_every_address(module, lambda x=x, module=module: module(x))


@unaligned
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_compute_the_same_bits_from_any_address(dtype: mx.Dtype) -> None:
    ids = mx.array([[0, 3, 198, 7]])
    x = inputs(64, dtype)[2]
    modules = [random(nn.Embedding(199, 64), dtype)]
    modules += [quantized(random(nn.Embedding(199, 64), dtype), mode, bits) for mode, bits in MODES]
    for module in modules:
        assert_the_same_at_every_address(module, lambda module=module: module(ids))
        assert_the_same_at_every_address(module, lambda module=module: module.as_linear(x))


# What layers do with a matrix besides multiplying by it: gates, decays, convolutions, tables, merged projections.
OPERATIONS: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "transposed product": lambda w, x: x @ w,
    "product with a reshaped matrix": lambda w, x: x.reshape(16, 8, 16).swapaxes(0, 1) @ w.reshape(8, 16, -1),
    "slice": lambda w, x: x @ w[:, 3:77],
    "sum": lambda w, x: w.sum(axis=1) + w.sum(axis=0)[:1] + w.max() + w.mean(),
    "gate": lambda w, x: w * mx.sigmoid(w) + x[:1],
    "decay": lambda w, x: -mx.exp(w) * x[:1],
    "power and root": lambda w, x: mx.sqrt(mx.abs(w)) + mx.square(w) + mx.tanh(w) + mx.logaddexp(w, w),
    "norm": lambda w, x: mx.fast.rms_norm(x, w[0], 1e-5) + mx.fast.layer_norm(x, w[1], w[2], 1e-5),
    "cast": lambda w, x: w.astype(mx.float32) + w.astype(mx.bfloat16) + w.astype(mx.float16),
    "copy": lambda w, x: mx.concatenate([w, w], axis=1) + mx.contiguous(w.T)[:, :1],
    "take": lambda w, x: mx.take(w, mx.array([5, 1, 0]), axis=1),
    "where": lambda w, x: mx.where(w > 0, w, x[:1]),
    "sort": lambda w, x: mx.sort(w, axis=-1) + mx.argsort(w, axis=0) + mx.cumsum(w, axis=1),
    "depthwise convolution": lambda w, x: mx.conv1d(x[None], w[:, :4, None], padding=3, groups=128),
    "convolution": lambda w, x: mx.conv1d(x[None], w[:, :, None].swapaxes(1, 2), padding=0),
    "einsum": lambda w, x: mx.einsum("td,ed->te", x, w),
    "outer": lambda w, x: (w[:, None] * x[None, :4]).sum(-1),
}


@unaligned
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_operations_compute_the_same_bits_from_any_address(dtype: mx.Dtype, name: str) -> None:
    w = mx.random.normal((128, 128), key=mx.random.key(0)).astype(dtype)
    x = mx.random.normal((16, 128), key=mx.random.key(1)).astype(dtype)
    expected = bits_of(OPERATIONS[name](w, x))
    for at in OFFSETS:
        assert bits_of(OPERATIONS[name](Buffer(w.nbytes + 128).place(w, at), x)) == expected, at


@unaligned
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("quantize", [None, *MODES], ids=str)
def test_experts_are_gathered_to_the_same_bits_from_any_address(quantize: tuple[str, int] | None, tokens: int) -> None:
    from mlx_lm.models.switch_layers import SwitchGLU

    module = random(SwitchGLU(128, 64, 8), mx.float32)
    if quantize is not None:
        mode, bits = quantize
        size = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}[mode]
        nn.quantize(module, group_size=size, bits=bits, mode=mode)
    x = mx.random.normal((1, tokens, 128), key=mx.random.key(0))
    chosen = mx.random.randint(0, 8, (1, tokens, 2), key=mx.random.key(1))
    assert_the_same_at_every_address(module, lambda: module(x, chosen))


@unaligned
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("gemma3_text", mx.bfloat16), ("mamba", mx.float32), ("mamba2", mx.bfloat16), ("qwen3_5", mx.float32),
        ("recurrent_gemma", mx.bfloat16), ("rwkv7", mx.float32),
    ],
    ids=str,
)  # fmt: skip
def test_whole_models_compute_the_same_bits_from_any_address(model_type: str, dtype: mx.Dtype) -> None:
    model = zoo.build(model_type)
    model.set_dtype(dtype)
    tokens = mx.array([[3, 17, 99, 5, 42]])
    assert_the_same_at_every_address(model, lambda: model(tokens))


def test_the_alignment_asked_for_is_what_the_device_needs() -> None:
    expected = 1 if platform.machine() in ("x86_64", "AMD64") else 8
    assert device_alignment() == expected
    if mx.is_available(mx.gpu):
        mx.set_default_device(mx.gpu)
        assert device_alignment() == GPU_ALIGN
