"""Weights of 4-bit floating-point numbers in groups of 16, as NVIDIA's Blackwell reads them."""

import torch

from rapid_llm.quantization.packed import Packed, Place, Product, halves_of

GROUP = 16
"""Elements along k that share a scale; rows of a multiple of it can be kept."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for; with 8 added they are negative."""

_LARGEST = 6.0 * 448.0  # of a code times a scale


class Nvfp4Weight(Packed):
    """Two e2m1 codes a byte [n, k / 2], an e4m3 scale for 16 of them [n, k / 16], an fp32 one for a row [n]: the three's product.

    Rounding: a row's global scale is its largest magnitude over 6 * 448, so that the e4m3 scales of the row reach up to their
    largest. It is the row's own and no tensor's, since rows come in pieces: whatever the pieces, a row becomes the same bits.
    The rest is done by quantize_nvfp4 on the device, over the row divided by its global scale.
    """

    _place: Place

    @classmethod
    def empty(cls, place: Place, n: int, k: int, *, experts: int | None = None) -> "Nvfp4Weight":
        """Zeros with scales that are NaN until they are loaded."""
        lead = () if experts is None else (experts,)
        nans = torch.full((*lead, n, k // GROUP), torch.nan, device=place.device)
        tensors = {
            "weight": torch.zeros(*lead, n, k // 2, dtype=torch.uint8, device=place.device),
            "scales": nans.to(torch.float8_e4m3fn),
            "global_scales": torch.full((*lead, n), torch.nan, device=place.device),
        }
        weight = cls(n, k, GROUP, tensors)
        weight._place = place
        return weight

    def product(self, place: Place) -> Product:
        """By nvfp4_gemm."""
        gemm, weight = place.kernel("nvfp4_gemm", n=self.n, k=self.k), self.weight
        scales, global_scales = self.tensors["scales"], self.tensors["global_scales"]
        return lambda x, out, bias: gemm(x, weight, scales, global_scales, out=out, bias=bias)

    def numbers(self) -> torch.Tensor:
        """The values."""
        every = torch.tensor([*E2M1, *(-value for value in E2M1)], device=self.device)
        codes = halves_of(self.weight).view(self.n, -1, GROUP)
        steps = self.tensors["scales"].float() * self.tensors["global_scales"][:, None]
        return (every[codes.long()] * steps[..., None]).view(self.n, self.k)

    def round(self, start: int, values: torch.Tensor) -> None:
        """Round rows."""
        smallest = torch.finfo(torch.float32).tiny  # of a row of zeros
        global_scales = (values.abs().amax(1) / _LARGEST).clamp_(min=smallest)
        quantise = self.whole._place.kernel("quantize_nvfp4", k=self.k)
        where = slice(start, start + len(values))
        codes, scales = self.weight[where], self.tensors["scales"][where]
        quantise(values / global_scales[:, None], values.new_ones(1), out=codes, scales=scales)
        self.tensors["global_scales"][where] = global_scales
