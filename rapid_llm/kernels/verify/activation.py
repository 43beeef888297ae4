"""Cases of the activation family."""

import torch

from rapid_llm.kernels.ops.activation.rows import SWIGLU
from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.reference import activation as reference
from rapid_llm.kernels.verify.buffers import Stage, once_rounded, spikes, uniform
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check


def _swiglu(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_tokens, d = sizes["num_tokens"], sizes["d"]
    stage = Stage(SWIGLU, sizes, dtype, device)
    gate = spikes((num_tokens, d), generator) if hard else 4 * torch.randn(num_tokens, d, generator=generator)
    up = uniform((num_tokens, d), -2.0, 2.0, generator)  # keeps 1e4 * up inside fp16
    gate_up = stage.place("gate_up", torch.cat([gate, up], dim=1))
    out = stage.unwritten("out", (num_tokens, d))
    check = Check("out", lambda: out, reference.swiglu(gate_up), *once_rounded(dtype))
    return Case(hard or "random", {"gate_up": gate_up, "out": out}, [check, *stage.guards()])


CASES: dict[str, CaseMaker] = {"swiglu": _swiglu}
