"""Cases of gather_columns."""

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.quantization.columns_rows import GATHER_COLUMNS
from rapid_llm.kernels.reference.quantization import columns as reference
from rapid_llm.kernels.verify.buffers import Stage
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check


def _gather_columns(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_tokens, k = sizes["num_tokens"], sizes["k"]
    stage = Stage(GATHER_COLUMNS, sizes, dtype, device)
    x = stage.place("x", torch.randn(num_tokens, k, generator=generator))
    order = stage.place("order", torch.randperm(k, generator=generator))
    out = stage.unwritten("out", (num_tokens, k))
    check = Check("out", lambda: out, reference.gather_columns(x, order), rtol=0.0, atol=0.0)  # a copy is exact
    return Case(hard or "random", {"x": x, "order": order, "out": out}, [check, *stage.guards()])


CASES: dict[str, CaseMaker] = {"gather_columns": _gather_columns}
