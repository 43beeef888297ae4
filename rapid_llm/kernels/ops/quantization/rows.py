"""Rows and contracts of the quantization family."""

from rapid_llm.kernels.ops.interfaces import Family
from rapid_llm.kernels.ops.quantization import columns_rows, fp4_rows, fp8_rows, w8a8_int8_rows, weight_only_rows

_PARTS = (weight_only_rows, fp8_rows, w8a8_int8_rows, fp4_rows, columns_rows)

FAMILY = Family(
    name="quantization",
    contracts=tuple(contract for part in _PARTS for contract in part.CONTRACTS),
    rows=tuple(row for part in _PARTS for row in part.ROWS),
)
