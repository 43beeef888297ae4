"""Angles to rotate by."""

from rapid_llm.kernels.verify.buffers import angle_table


def table(rotary_dim, device, max_positions=64):
    """Cosines and sines, fp32 [max_positions, rotary_dim]."""
    return angle_table(rotary_dim, max_positions).float().to(device)
