"""What is measured: one op at one set of sizes, in one dtype, by one kind of values."""

from collections.abc import Iterable
from dataclasses import dataclass

from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.ops.interfaces import ITEMSIZE, Cost, Sizes


class Skipped(Exception):  # noqa: N818 - not an error: an arm that has no business at a cell, or whose package is missing
    """Why an arm has no time here."""


@dataclass(frozen=True)
class Cell:
    """One line of a sweep.

    Attributes:
        op, sizes: by the op's contract, all of its sizes.
        dtype: compute dtype, as torch names it.
        variant: how values or places are chosen where the time hangs on it: how to sample, where slots lie.
    """

    op: str
    sizes: Sizes
    dtype: str = "bfloat16"
    variant: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of a compute element."""
        return int(ITEMSIZE[self.dtype])

    @property
    def cost(self) -> Cost:
        """Bytes and operations by the contract."""
        return catalog().contract(self.op).cost(self.sizes, self.itemsize)

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.sizes.items())
        return " ".join(filter(None, (self.op, self.variant, self.dtype, sizes)))


def few(cells: Iterable[Cell]) -> list[Cell]:
    """The first and the middle cell of each op: enough to see that every arm works."""
    by_op: dict[str, list[Cell]] = {}
    for cell in cells:
        by_op.setdefault(cell.op, []).append(cell)
    return [cell for group in by_op.values() for cell in dict.fromkeys((0, len(group) // 2)) for cell in (group[cell],)]
