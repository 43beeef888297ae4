"""Activations in float64."""

import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a fused row: [T, 2 * d] -> float64 [T, d]."""
    wide = gate_up.double()
    d = wide.shape[1] // 2
    gate, up = wide[:, :d], wide[:, d:]
    return gate / (1.0 + torch.exp(-gate)) * up
