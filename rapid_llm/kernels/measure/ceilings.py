"""What this machine can do at best, measured in the run that it is compared with."""

from dataclasses import dataclass

import torch

from rapid_llm.kernels.measure.timer import empty_node_us, measure
from rapid_llm.kernels.ops.interfaces import Cost

_BYTES = 256 << 20
_SIDE = 8192  # of the square matrices whose product gives the rate
_MOSTLY_READ = 10  # times more read than written: the read ceiling counts


@dataclass(frozen=True)
class Ceilings:
    """Rates of one run.

    Attributes:
        read_gbps: a pass that reads and keeps next to nothing.
        copy_gbps: bytes read and written by a copy.
        tflops: bf16 products, in a short burst as kernels are timed.
        node_us: one trivial kernel in a graph.
    """

    read_gbps: float
    copy_gbps: float
    tflops: float
    node_us: float

    def floor_us(self, cost: Cost, itemsize: int) -> float:
        """The time that bytes and operations take at these rates, the larger of the two.

        Products of fp32 are held to half the rate of bf16, since no card multiplies exact fp32 faster; those of bytes to twice.
        """
        moved = cost.read + cost.written
        rate = self.read_gbps if cost.read >= _MOSTLY_READ * cost.written else self.copy_gbps
        return max(moved / rate / 1e3, cost.flops / (self.tflops * 2 / (cost.operand_bytes or itemsize)) / 1e6)


def measure_ceilings() -> Ceilings:
    """Run a copy, a read and a product. Takes about a second."""
    pairs = [(torch.randn(_BYTES // 4, device="cuda"), torch.empty(_BYTES // 4, device="cuda")) for _ in range(4)]
    copy = min(
        measure([lambda a=a, b=b: b.copy_(a) for a, b in pairs]).us,  # type: ignore[misc]
        measure([lambda a=a, b=b: torch.mul(a, 1.5, out=b) for a, b in pairs]).us,  # type: ignore[misc]
    )
    read = measure([lambda a=a: _read(a) for a, _ in pairs]).us  # type: ignore[misc]
    del pairs
    left, right = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = measure([lambda: left @ right.t()], budget_s=0.03, eager=True).least_us
    return Ceilings(
        read_gbps=max(_BYTES / read, 2 * _BYTES / copy) / 1e3,
        copy_gbps=2 * _BYTES / copy / 1e3,
        tflops=2 * _SIDE**3 / product / 1e6,
        node_us=empty_node_us(),
    )


def _read(values: torch.Tensor) -> None:
    from rapid_llm.kernels.measure.read_kernel import read_all

    read_all(values)
