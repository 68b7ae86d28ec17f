"""What of a packed copy one rank of several needs: its own layers, and of the rest what is no other rank's alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outcore.checkpoint.manifest import Absent, RankLayers
from outcore.checkpoint.packed_bytes import PackedFile, Spec, file_of, packed_tensors
from outcore.checkpoint.packed_store import NON_LAYER


@dataclass(frozen=True)
class RankPack:
    """What one rank needs.

    Attributes:
        rank: of ``ranks``. ``owners``: the rank of each layer, by its number.
        unneeded: parameters outside of layers that this rank does without.
    """

    rank: int
    ranks: int
    owners: tuple[int, ...]
    unneeded: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[int, int, tuple[int, ...]]:
        """What tells it from others of the same model."""
        return self.rank, self.ranks, self.owners

    def divided(self, files: Sequence[PackedFile], layers: Sequence[str]) -> tuple[list[PackedFile], RankLayers]:
        """The files that are its own, of those of a whole copy, and what is absent.

        Args:
            files: of each layer, and of the rest behind them. ``layers``: their paths.
        """
        foreign = {path for path, owner in zip(layers, self.owners, strict=True) if owner != self.rank}
        # What of others' layers stays in memory is not in their files.
        beginnings = tuple(f"{path}." for path in foreign)
        own: list[PackedFile] = []
        absent: dict[str, list[Absent]] = {}
        for file in files:
            gone = [
                spec
                for spec in file.tensors
                if file.unit in foreign
                or (file.unit == NON_LAYER and (spec[0].startswith(beginnings) or spec[0] in self.unneeded))
            ]
            if gone:
                absent[file.name] = _absent(file, gone)
            if len(gone) < len(file.tensors):
                names = {spec[0] for spec in gone}
                own.append(file_of(file.name, file.unit, [spec for spec in file.tensors if spec[0] not in names]))
        return own, RankLayers(rank=self.rank, ranks=self.ranks, owners=list(self.owners), absent=absent)


def _absent(file: PackedFile, specs: Sequence[Spec]) -> list[Absent]:
    infos = packed_tensors(Path(file.name), specs)
    return [Absent(name=info.name, dtype=info.dtype, shape=list(info.shape)) for info in infos]
