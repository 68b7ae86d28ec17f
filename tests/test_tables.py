"""Embeddings read by row and heads cut into slices: the right rows, each once, and errors that name them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import outcore
import zoo
from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.packed_store import open_model
from outcore.disk.reader import RowReader
from outcore.engine import engine
from outcore.engine.layer_sizes import Place
from outcore.engine.streamed_layers import SLICE_STEP, StreamedTable, Table
from outcore.engine.whole_profile import profile_of
from outcore.errors import ReadError
from outcore.modules.layers import find_layers, find_tables


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows"
    path.write_bytes(b"header!" + np.arange(5000, dtype=np.uint32).tobytes())
    return path


@pytest.mark.parametrize("rows", [[0], [999], [3, 1, 2], list(range(1000)), []])
def test_rows_are_read_wherever_they_lie(rows_file: Path, rows: list[int]) -> None:
    reader = RowReader([rows_file, rows_file])
    got = reader.read(rows_file, 7, 20, rows, "embed").view(np.uint32)
    assert got.tolist() == [list(range(5 * r, 5 * r + 5)) for r in rows]
    assert reader.metrics.rows_read == len(rows)
    reader.close()
    reader.close()


def test_a_file_that_became_shorter_is_named_with_the_row(rows_file: Path) -> None:
    reader = RowReader([rows_file])
    os.truncate(rows_file, 1000)
    for rows in ([990], list(range(980, 1000))):
        with pytest.raises(ReadError, match=r"rows: reading rows of model\.embed, bytes .*, failed: the file ended"):
            reader.read(rows_file, 7, 20, rows, "model.embed")
    reader.close()


def test_a_missing_file_leaves_nothing_open(rows_file: Path, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(ReadError, match="gone"):
        RowReader([rows_file, tmp_path / "gone"])
    assert not before or len(list(Path("/proc/self/fd").iterdir())) == before


def table_of(folder: Path) -> Table:
    lazy = open_model(folder)
    found = profile_of(lazy, context=16, prompt=4, dtype=None)
    return next(t for t in found.tables if t.looked_up)


@pytest.mark.parametrize("quantize", [None, {"group_size": 64, "bits": 4}])
def test_ids_are_looked_up_once_each_in_any_shape(tmp_path: Path, quantize: dict[str, int] | None) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model", quantize=quantize)
    table = table_of(folder)
    reader = RowReader([p.file for p in table.places])
    ids = mx.array([[5, 127, 5], [0, -1, 127]])
    arrays, places = StreamedTable(table, (), reader).rows_of(ids)
    assert [a.shape[0] for a in arrays] == [3] * len(arrays)  # rows 0, 5 and 127, which is -1 too
    whole = mx.load(str(folder / "model.safetensors"))
    for p, got in zip(table.layer.parameters, arrays, strict=True):
        assert mx.array_equal(got[places], whole[f"{table.layer.path}.{p.path}"][ids]).item()
    reader.close()


@pytest.mark.parametrize(("rows", "largest"), [(128, 10**9), (4096, 4096 * 10), (20011, 50_000), (20011, 1)])
def test_slices_cover_every_row_once(tmp_path: Path, rows: int, largest: int) -> None:
    model = zoo.build("llama")
    layer = next(t for t in find_tables(model, find_layers(model)) if t.path == "lm_head")
    info = TensorInfo(
        name="lm_head.weight", dtype="F32", shape=(rows, 16), file=tmp_path / "file", offset=1000, nbytes=rows * 64
    )
    table = Table(layer, (info,), (None,), False, True, True)
    slices = Place({}, True, 1).slices(table, largest)
    assert [s.start for s, _ in slices] == [0, *(s.stop for s, _ in slices[:-1])]
    assert slices[-1][0].stop == rows
    assert all(s.start % SLICE_STEP == 0 for s, _ in slices)
    reads = [e for _, unit in slices for e in unit.extents]
    assert sum(e.nbytes for e in reads) == info.nbytes
    assert [e.offset for e in reads] == [1000 + s.start * 64 for s, _ in slices]
    if largest < info.nbytes:
        assert len(slices) > 1


def test_a_closed_model_has_closed_its_rows(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    model, _ = outcore.load_model(folder, memory="1GB", resident=0, context=16)
    (table,) = (t for t in model.outcore.streaming.tables if t.reader is not None)
    mx.eval(model(mx.array([[1, 2]])))
    model.outcore.close()
    assert table.reader is not None and not table.reader._reader._files


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to count open files")
def test_a_load_that_is_broken_off_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    monkeypatch.setattr(engine, "make_resident", interrupted)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(KeyboardInterrupt):
        outcore.load_model(folder, memory="1GB", resident=0, context=16)
    gc.collect()  # MLX keeps a file open for as long as lazily loaded arrays live
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
