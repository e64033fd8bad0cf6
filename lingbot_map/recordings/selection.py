"""Which pictures of a recording are used."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lingbot_map.recordings.source import Source, SourceError
import numpy as np


@dataclass(frozen=True)
class Selection:
    """A stretch of time of a recording, and every n-th picture of it."""

    every: int = 1
    start_s: float = 0.0  # after the first picture
    duration_s: float = 0.0  # 0: to the end
    max_frames: int = 0  # 0: no limit

    def choose(self, stamps_ns: Sequence[int]) -> list[int]:
        """Return the positions of the chosen pictures, ascending."""
        if not stamps_ns:
            return []
        begin = stamps_ns[0] + round(self.start_s * 1e9)
        end = begin + round(self.duration_s * 1e9) if self.duration_s else float('inf')
        inside = [i for i, stamp in enumerate(stamps_ns) if begin <= stamp <= end]
        return inside[:: self.every][: self.max_frames or None]


@dataclass(frozen=True)
class SelectedPictures:
    """The chosen pictures of a source, whose stamps are all known and have been read once."""

    source: Source
    stamps_ns: list[int]  # of all pictures of the source
    chosen: list[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (stamp_ns, rgb); only chosen pictures are decoded."""
        wanted = set(self.chosen)
        last = self.chosen[-1]
        for i, (stamp_ns, read) in enumerate(self.source.lazy()):
            if i in wanted:
                yield stamp_ns, read()
            if i == last:
                return


def select(source: Source, selection: Selection) -> SelectedPictures:
    """
    Read all stamps of a source and choose.

    What is wrong with a recording as such shows here, before any work. Raises SourceError, also
    if nothing is chosen.
    """
    stamps_ns = [stamp_ns for stamp_ns, _ in source.lazy()]
    chosen = selection.choose(stamps_ns)
    if not chosen:
        length_s = (stamps_ns[-1] - stamps_ns[0]) * 1e-9 if stamps_ns else 0.0
        raise SourceError(
            f'nothing is left of {len(stamps_ns)} images over {length_s:.3f} s: '
            f'start is {selection.start_s:g} s'
        )
    return SelectedPictures(source, stamps_ns, chosen)
