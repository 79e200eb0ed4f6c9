"""Which part of a checkpoint's tensor somebody wants: plain numbers, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightPart:
    """Of a tensor of `shape`, the indices [start, stop) of each dimension."""

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, *shape: int) -> "WeightPart":
        return cls(shape, tuple((0, size) for size in shape))

    @property
    def is_whole(self) -> bool:
        return self.ranges == tuple((0, size) for size in self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """To index the whole tensor with."""
        return tuple(slice(start, stop) for start, stop in self.ranges)

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)
