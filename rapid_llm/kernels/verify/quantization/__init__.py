"""Cases of the quantization family."""

from rapid_llm.kernels.verify.case import CaseMaker
from rapid_llm.kernels.verify.quantization import fp4, weight_only

CASES: dict[str, CaseMaker] = {**weight_only.CASES, **fp4.CASES}
