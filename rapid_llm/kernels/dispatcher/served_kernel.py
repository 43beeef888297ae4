"""What serves an op in an engine that runs, as plain data that travels between processes. Imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherRow:
    """A row of the op that does not serve, and each reason against it."""

    name: str
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class ServedKernel:
    """The answer to one question that a model's layers asked of dispatch.

    Attributes:
        op, dtype, sizes: what was asked. A size that is not named may take any value.
        summary: what the op does.
        row: the row that serves; ``because``, ``evidence`` and ``tiles`` say why, on what runs, and with which launch knobs
            (empty where the tile policy gives none).
        by_size: where rows differ by the number of tokens: (largest number that it serves, row), smallest first.
        others: the rows that do not serve.
    """

    op: str
    summary: str
    dtype: str
    sizes: dict[str, int]
    row: str
    because: str
    evidence: str
    tiles: str
    by_size: list[tuple[int, str]]
    others: list[OtherRow]
