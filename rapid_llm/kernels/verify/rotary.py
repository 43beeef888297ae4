"""Cases of the rotary family."""

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.rotary.rows import ROPE
from rapid_llm.kernels.reference import rotary as reference
from rapid_llm.kernels.verify.buffers import Stage, angle_table, once_rounded, spikes
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

_MAX_POSITIONS = 211


def _rope(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    stage = Stage(ROPE, sizes, dtype, device)
    num_tokens, rotary_dim = sizes["num_tokens"], sizes["rotary_dim"]

    def heads(count: int) -> torch.Tensor:
        shape = (num_tokens, count, sizes["head_dim"])
        return spikes(shape, generator) if hard == "large_magnitude" else torch.randn(shape, generator=generator)

    q = stage.place("q", heads(sizes["num_heads"]))
    k = stage.place("k", heads(sizes["num_kv_heads"]))
    positions = stage.place("positions", torch.randint(0, _MAX_POSITIONS, (num_tokens,), generator=generator))
    cos_sin = stage.place("cos_sin", angle_table(rotary_dim, _MAX_POSITIONS))
    expected_q, expected_k = reference.rope(q, k, positions, cos_sin)
    # Two products may cancel, so the error is that of the largest term.
    rtol, atol = once_rounded(dtype, terms=2e4 if hard == "large_magnitude" else 10.0)
    checks = [Check("q", lambda: q, expected_q, rtol, atol), Check("k", lambda: k, expected_k, rtol, atol)]
    arguments = {"q": q, "k": k, "positions": positions, "cos_sin": cos_sin}
    return Case(hard or "random", arguments, [*checks, *stage.guards()])


CASES: dict[str, CaseMaker] = {"rope": _rope}
