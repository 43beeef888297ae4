"""Embedding look-up in float64."""

import torch


def vocab_embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Table rows of the ids, zeros for id -1: [T], [V, H] -> float64 [T, H]."""
    rows = torch.zeros(len(ids), weight.shape[1], dtype=torch.float64, device=weight.device)
    for token, row in enumerate(ids.tolist()):
        if row != -1:
            rows[token] = weight[row].double()
    return rows
