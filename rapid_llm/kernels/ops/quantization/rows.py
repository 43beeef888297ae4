"""Rows and contracts of the quantization family."""

from rapid_llm.kernels.ops.interfaces import Family
from rapid_llm.kernels.ops.quantization import weight_only_rows

FAMILY = Family(name="quantization", contracts=weight_only_rows.CONTRACTS, rows=weight_only_rows.ROWS)
