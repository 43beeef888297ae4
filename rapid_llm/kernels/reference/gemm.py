"""Linear layers in float64."""

import torch


def dense_gemm(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T (+ bias): [T, K], [N, K] -> float64 [T, N]."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()
