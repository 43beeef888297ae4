"""SwiGLU in plain torch: silu(gate) * up over a fused gate-up row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu

from rapid_llm.kernels.ops.activation.inputs import check_swiglu

_silu: Callable[..., torch.Tensor] = torch._C._nn.silu  # torch.nn.functional.silu takes no out


def swiglu(gate_up: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write silu(gate) * up, computed in fp32, into ``out`` and return it.

    Args:
        gate_up: [num_tokens, 2 * d], fp32 | bf16 | fp16; gate first; inner stride 1, row stride free.
        out: [num_tokens, d], same dtype and device, apart from gate_up; inner stride 1, row stride free.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/activation.py::swiglu. Origin: this repo.
    """
    check_swiglu(gate_up, out)
    if out.shape[0]:
        gate, up = gate_up.chunk(2, dim=1)
        if out.dtype == torch.float32:
            _silu(gate, out=out).mul_(up)
        else:
            torch.mul(silu(gate.float()), up, out=out)  # fp32 by promotion, rounded once into out
    return out


def prepare_swiglu(shared: dict[Any, Any], gate_up: torch.Tensor, *, out: torch.Tensor) -> tuple[Callable[[], object], ...]:
    """The calls that repeat ``swiglu`` on the same tensors; none of its own below fp32."""
    if out.dtype != torch.float32:
        return ()
    gate, up = gate_up.chunk(2, dim=1)
    return partial(_silu, gate, out=out), partial(out.mul_, up)
