"""Cases of the quantization family."""

from rapid_llm.kernels.verify.case import CaseMaker
from rapid_llm.kernels.verify.quantization import columns, fp4, fp8, w8a8_int8, weight_only

CASES: dict[str, CaseMaker] = {**weight_only.CASES, **fp8.CASES, **w8a8_int8.CASES, **fp4.CASES, **columns.CASES}
