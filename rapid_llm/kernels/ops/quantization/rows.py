"""Rows and contracts of the quantization family."""

from rapid_llm.kernels.ops.interfaces import Family
from rapid_llm.kernels.ops.quantization import fp4_rows, weight_only_rows

FAMILY = Family(
    name="quantization",
    contracts=(*weight_only_rows.CONTRACTS, *fp4_rows.CONTRACTS),
    rows=(*weight_only_rows.ROWS, *fp4_rows.ROWS),
)
