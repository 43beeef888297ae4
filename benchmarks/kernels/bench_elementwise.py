"""How near to one pass over memory are norm, activation, rotation and embedding, from one token to a long prompt?

    python -m benchmarks.kernels.bench_elementwise [--quick] [--op OP] [--peers FOLDER] [--compile]

Below some hundred tokens their bytes take less than one node of a graph: there the launch is the floor.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nn

from benchmarks.kernels.cells import Cell
from benchmarks.kernels.microbench import Bench, main
from benchmarks.kernels.peers import Peer
from rapid_llm.kernels.measure.workloads import Workload

TOKENS = (1, 8, 64, 512, 4096, 16_384)


def _cells() -> list[Cell]:
    cells = []
    for op in ("rms_norm", "add_rms_norm"):
        cells += [Cell(op, {"num_tokens": tokens, "d": d}) for d in (4096, 1024, 2048, 8192) for tokens in TOKENS]
    # The norm of query heads: rows are tokens times heads.
    cells += [Cell("rms_norm", {"num_tokens": 32 * tokens, "d": 128}) for tokens in (1, 64, 4096)]
    cells += [Cell("swiglu", {"num_tokens": tokens, "d": d}) for d in (14_336, 3072, 768) for tokens in TOKENS]
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128), (32, 4, 128), (9, 3, 64)):
        shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "rotary_dim": dim}
        cells += [Cell("rope", {"num_tokens": tokens, **shape}) for tokens in TOKENS]
    for hidden, vocabulary in ((4096, 128_256), (1024, 151_936)):
        sizes = {"vocab_size": vocabulary, "hidden_size": hidden}
        cells += [Cell("vocab_embedding", {"num_tokens": tokens, **sizes}) for tokens in TOKENS]
    return cells


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return _norm(total, weight, eps), total


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return nn.silu(gate) * up


def _turned(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)

    def turn(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.float().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)

    return turn(q), turn(k)


def plain(function: Callable[..., Any], *names: str) -> Peer:
    """A peer that is called with these of the op's arguments, in this order."""

    def prepare(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
        return [lambda each=each: function(*(each[name] for name in names)) for each in work.sets]

    return prepare


def compiled(function: Callable[..., Any], *names: str) -> Peer:
    """The same, compiled: once for all numbers of tokens."""
    made: list[Callable[..., Any]] = []

    def prepare(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
        if not made:
            torch._dynamo.config.recompile_limit = 64
            made.append(torch.compile(function, dynamic=True))
        return plain(made[0], *names)(cell, work)

    return prepare


def _library_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return nn.rms_norm(x, weight.shape, weight, eps)


_NORM, _ADD_NORM = ("x", "weight", "eps"), ("x", "residual", "weight", "eps")
_ROPE = ("q", "k", "positions", "cos_sin")

BENCH = Bench(
    name="bench_elementwise",
    cells=_cells(),
    peers={
        "rms_norm": {"torch_eager": plain(_norm, *_NORM), "torch_F.rms_norm": plain(_library_norm, *_NORM)},
        "add_rms_norm": {"torch_eager": plain(_add_norm, *_ADD_NORM)},
        "swiglu": {"torch_eager": plain(_gated, "gate_up")},
        "rope": {"torch_eager": plain(_turned, *_ROPE)},
        "vocab_embedding": {"torch_embedding": plain(nn.embedding, "ids", "weight")},
    },
    compiled={
        "rms_norm": {"torch_compile": compiled(_norm, *_NORM)},
        "add_rms_norm": {"torch_compile": compiled(_add_norm, *_ADD_NORM)},
        "swiglu": {"torch_compile": compiled(_gated, "gate_up")},
        "rope": {"torch_compile": compiled(_turned, *_ROPE)},
    },
)

if __name__ == "__main__":
    main(__doc__, BENCH)
