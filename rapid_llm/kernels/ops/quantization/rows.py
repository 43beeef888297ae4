"""Rows and contracts of the quantization family."""

from rapid_llm.kernels.ops.interfaces import Family
from rapid_llm.kernels.ops.quantization import fp8_rows, w8a8_int8_rows, weight_only_rows

FAMILY = Family(
    name="quantization",
    contracts=(*weight_only_rows.CONTRACTS, *fp8_rows.CONTRACTS, *w8a8_int8_rows.CONTRACTS),
    rows=(*weight_only_rows.ROWS, *fp8_rows.ROWS, *w8a8_int8_rows.ROWS),
)
