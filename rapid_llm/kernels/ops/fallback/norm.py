"""RMS norm in plain torch, alone and behind the residual sum (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.linalg import vector_norm

from rapid_llm.kernels.ops.norm.inputs import check_add_rms_norm, check_rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, eps: float) -> torch.Tensor:
    """Write x / sqrt(mean(x ** 2) + eps) * weight over the last dimension into ``out`` and return it; fp32 maths.

    Args:
        x: [num_tokens, d] or [num_tokens, num_heads, d], fp32 | bf16 | fp16; inner stride 1, the others free.
        weight: [d], same dtype; stride 1.
        out: like x in shape, dtype and device; inner stride 1, the others free; may be x itself.
        eps: added to the mean square.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/norm.py::rms_norm. Origin: this repo.
    """
    check_rms_norm(x, weight, out)
    if x.shape[0]:
        _normalise(x, weight, out, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to ``residual`` in place, rounded to its dtype, write rms_norm(residual) into ``out`` and return that.

    Args:
        x: [num_tokens, d], fp32 | bf16 | fp16; inner stride 1, row stride free.
        residual: like x; read and written; apart from x and out.
        weight: [d], same dtype; stride 1.
        out: like x; inner stride 1, row stride free; may be x itself.
        eps: added to the mean square.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is written then.
    Twin: kernels/reference/norm.py::add_rms_norm. Origin: this repo.
    """
    check_add_rms_norm(x, residual, weight, out)
    if x.shape[0]:
        _normalise(residual.add_(x), weight, out, eps)
    return out


def prepare_rms_norm(
    shared: dict[Any, Any], x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, eps: float
) -> tuple[Callable[[], object], ...]:
    """The call that repeats ``rms_norm`` on the same tensors."""
    if not _is_one_row(x):
        return (partial(_normalise, x, weight, out, eps),)
    return (partial(_normalise_row, x[0], weight, out[0], torch.zeros_like(weight), 1.0 / x.shape[1], eps),)


def prepare_add_rms_norm(
    shared: dict[Any, Any], x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, eps: float
) -> tuple[Callable[[], object], ...]:
    """The calls that repeat ``add_rms_norm`` on the same tensors."""
    return partial(residual.add_, x), *prepare_rms_norm(shared, residual, weight, out=out, eps=eps)


def _is_one_row(x: torch.Tensor) -> bool:
    """Whether x is one fp32 row: a decode step on a CPU, where the fewest calls count."""
    return x.dtype == torch.float32 and x.dim() == 2 and x.shape[0] == 1 and not x.is_cuda


def _normalise(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """The norm itself. Products promote to fp32 through the fp32 scale and are rounded once, into ``out``."""
    if _is_one_row(x):
        _normalise_row(x[0], weight, out[0], torch.zeros_like(weight), 1.0 / x.shape[1], eps)
        return
    length = vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = length.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    torch.mul(x * scale, weight, out=out)


def _normalise_row(
    row: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, zeros: torch.Tensor, share: float, eps: float
) -> None:
    """The norm of one fp32 row [d]; ``share`` is 1 / d."""
    scale = (torch.dot(row, row).item() * share + eps) ** -0.5
    torch.addcmul(zeros, row, weight, value=scale, out=out)
