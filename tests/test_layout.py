"""Units laid out in slots: every parameter arrives whole, whatever the files look like."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from outcore.disk.layout import GPU_ALIGN, Extent, Source, Unit, place_unit
from outcore.sizes import BLOCK, GAP, PAGE, round_up, slot_alignment, slot_bytes

A, B = Path("a"), Path("b")


def source(offset: int, nbytes: int, file: Path = A, path: str = "") -> Source:
    return Source(path or f"{file}.{offset}", "U8", (nbytes,), file, offset, nbytes)


def random_sources(rng: random.Random) -> tuple[dict[Path, bytes], list[Source]]:
    """Up to three files of random bytes and tensors in them: neighbours, some apart, some empty, one there twice."""
    files, sources = {}, []
    unit = rng.choice([1, 8, 256, BLOCK])  # what offsets and lengths are multiples of
    for name in "abc"[: rng.randint(1, 3)]:
        offset = rng.randrange(0, 20_000) // unit * unit
        for i in range(rng.randint(1, 6)):
            offset += rng.choice([0, 0, 0, 1, 8, BLOCK, GAP, GAP + 1, 2 * GAP]) // unit * unit
            nbytes = rng.choice([0, 1, 7, 64, 5_000, 40_000]) + rng.randrange(0, 9)
            nbytes = nbytes if unit == 1 else round_up(nbytes, unit)
            sources.append(source(offset, nbytes, Path(name), f"{name}.{i}"))
            offset += nbytes
        files[Path(name)] = rng.randbytes(offset + rng.randrange(0, 5_000))
    if rng.random() < 0.3:
        twin = rng.choice(sources)
        sources.append(source(twin.offset, twin.nbytes, twin.file, "tied"))
    rng.shuffle(sources)
    return files, sources


def blocks(e: Extent) -> range:
    """The blocks of a slot that reading the extent writes to."""
    return range(e.at // BLOCK, round_up(e.at + e.nbytes, BLOCK) // BLOCK)


def fill(unit: Unit, files: dict[Path, bytes], rng: random.Random) -> bytearray:
    """The slot after its extents were read in any order: whole blocks where they are read in place."""
    slot = bytearray(rng.randbytes(round_up(unit.slot_bytes, BLOCK)))
    for e in rng.sample(unit.extents, len(unit.extents)):
        start, end, at = e.offset, e.offset + e.nbytes, e.at
        if e.in_place:
            before, after = e.offset % BLOCK, -end % BLOCK
            start, end, at = start - before, end + after, at - before
        found = files[e.file][start:end]
        slot[at : at + len(found)] = found
    return slot


@pytest.mark.parametrize("align", [1, 8, GPU_ALIGN])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_every_parameter_arrives_whole_wherever_its_bytes_lie(direct: bool, align: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        files, sources = random_sources(rng)
        unit = place_unit("u", sources, direct=direct, align=align)
        slot = fill(unit, files, rng)
        assert len(slot) == round_up(unit.slot_bytes, BLOCK)  # nothing was written past the end
        fields = {f.path: f for f in unit.fields}
        assert len(unit.fields) == len(sources) == len(fields)
        for s in sources:
            f = fields[s.path]
            assert (f.dtype, f.shape, f.nbytes) == (s.dtype, s.shape, s.nbytes)
            assert f.at >= 0 and f.at + f.nbytes <= unit.slot_bytes
            assert f.at % align == 0
            assert slot[f.at : f.at + f.nbytes] == files[s.file][s.offset : s.offset + s.nbytes], (seed, s)
        assert sum(f.nbytes for f in unit.fields) == sum(s.nbytes for s in sources)


@pytest.mark.parametrize("align", [1, 8, GPU_ALIGN])
def test_direct_reads_agree_with_the_disk_block_by_block_and_share_no_block(align: int) -> None:
    in_place = 0
    for seed in range(40):
        _, sources = random_sources(random.Random(seed))
        unit = place_unit("u", sources, direct=True, align=align)
        assert unit.slot_bytes % BLOCK == 0
        for e in unit.extents:
            if e.in_place:
                in_place += 1
                assert e.at % BLOCK == e.offset % BLOCK
                others = [o for o in unit.extents if o is not e and o.nbytes]
                assert not any(set(blocks(e)) & set(blocks(o)) for o in others), seed
                assert max(blocks(e), default=0) < unit.slot_bytes // BLOCK
    assert in_place > 20


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_neighbours_are_read_together_and_strangers_apart(direct: bool) -> None:
    def extents(*sources: Source) -> list[tuple[Path, int, int]]:
        return [(e.file, e.offset, e.nbytes) for e in place_unit("u", sources, direct=direct).extents]

    assert extents(source(100, 50), source(150, 50)) == [(A, 100, 100)]
    assert extents(source(100, 50), source(150 + GAP, 50)) == [(A, 100, GAP + 100)]
    assert extents(source(100, 50), source(151 + GAP, 50)) == [(A, 100, 50), (A, 151 + GAP, 50)]
    assert extents(source(150, 50), source(100, 50)) == [(A, 100, 100)]  # in whatever order they are given
    assert extents(source(0, 50), source(50, 50, B)) == [(A, 0, 50), (B, 50, 50)]
    # A long tensor reaches over a short one that begins later.
    assert extents(source(0, GAP * 3), source(10, 10), source(GAP * 3 + 5, 5)) == [(A, 0, GAP * 3 + 10)]


def test_a_gpus_alignment_gives_each_tensor_a_place_of_its_own() -> None:
    unit = place_unit("u", [source(8, 1000), source(1008, 3), source(1011, 500)], direct=True, align=GPU_ALIGN)
    assert [f.at % GPU_ALIGN for f in unit.fields] == [0, 0, 0]
    assert [(e.offset, e.nbytes, e.in_place) for e in unit.extents] == [
        (8, 1000, False), (1008, 3, False), (1011, 500, False),
    ]  # fmt: skip
    assert [e.at for e in unit.extents] == [f.at for f in unit.fields]


def test_tensors_that_are_aligned_in_the_file_keep_one_read_in_place_on_a_gpu() -> None:
    unit = place_unit("u", [source(3 * BLOCK, 512), source(3 * BLOCK + 512, 777)], direct=True, align=GPU_ALIGN)
    assert [(e.offset, e.nbytes, e.in_place) for e in unit.extents] == [(3 * BLOCK, 1289, True)]


def test_where_any_address_will_do_a_scattered_unit_takes_its_bytes_and_at_most_two_blocks_a_run() -> None:
    for seed in range(40):
        _, sources = random_sources(random.Random(seed))
        unit = place_unit("u", sources, direct=True)
        assert unit.slot_bytes <= unit.read_bytes + 2 * BLOCK * len(unit.extents)


def test_a_slot_has_room_for_whole_blocks_wherever_its_memory_begins() -> None:
    for nbytes in (1, BLOCK - 1, BLOCK, BLOCK + 1, PAGE, 4 * PAGE - 1, 4 * PAGE, 5 * PAGE + 1):
        step = slot_alignment(nbytes)
        for address in (0, 16, BLOCK - 16, PAGE - 16, PAGE + 16):
            payload = round_up(address, step)
            assert payload + round_up(nbytes, BLOCK) <= address + slot_bytes(nbytes)


def test_large_slots_begin_at_a_large_page_and_all_at_a_block() -> None:
    assert slot_alignment(100 << 20) == PAGE
    assert all(slot_alignment(n) % BLOCK == 0 for n in (1, BLOCK, PAGE, 1 << 30))


def test_a_larger_unit_never_takes_a_smaller_slot() -> None:
    sizes = [slot_bytes(n) for n in range(0, 6 * PAGE, 1111)]
    assert sizes == sorted(sizes)
