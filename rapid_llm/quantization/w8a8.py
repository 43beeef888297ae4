"""Weights of one byte whose products round the activations to one byte too, so that the matrix units multiply bytes."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from rapid_llm.errors import ConfigError
from rapid_llm.quantization.packed import E4M3_MAX, Packed, Place, Product, scaled

BLOCK = 128
"""Rows and columns of a matrix that share a scale where it is scaled by blocks."""


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Activations that the op before a product has rounded already.

    Attributes:
        codes: [num_tokens, k], of the product's one-byte dtype.
        scales: fp32 [num_tokens], or [num_tokens, ceil(k / 128)].
    """

    codes: torch.Tensor
    scales: torch.Tensor


Activations = torch.Tensor | RoundedRows
"""What a layer may hand to the next one."""


class W8A8(Packed):
    """One byte an element [n, k], and fp32 scales.

    Scales are one a row [n], or, with ``by_block``, one for each 128 of a row [n, ceil(k / 128)] until ``settle`` finds that the
    rows of every block of 128 agree: [ceil(n / 128), ceil(k / 128)]. Activations are scaled by token, and by 128 of k where
    weights are.

    Attributes:
        code: dtype of weights and rounded activations.
        largest: the largest number in it that activations are rounded to.
        x_scale: fp32 [1], what all activations are scaled by; None measures each token's.
    """

    code: ClassVar[torch.dtype]
    largest: ClassVar[float]
    quantiser: ClassVar[str]
    gemm: ClassVar[str]

    x_scale: torch.Tensor | None = None

    @classmethod
    def _empty(cls, place: Place, n: int, k: int, *, by_block: bool, static: bool, experts: int | None) -> Any:
        """Zeros with scales that are NaN until they are loaded."""
        lead = () if experts is None else (experts,)
        group = BLOCK if by_block and k > BLOCK else k
        shape = (*lead, n, -(-k // BLOCK)) if by_block else (*lead, n)
        tensors = {
            "weight": torch.zeros(*lead, n, k, dtype=cls.code, device=place.device),
            "scales": torch.full(shape, torch.nan, device=place.device),
        }
        weight = cls(n, k, group, tensors)
        if static and experts is None:
            weight.x_scale = torch.zeros(1, device=place.device)
        return weight

    @property
    def by_block(self) -> bool:
        """Whether scales are of blocks, or of 128 of a row."""
        return self.tensors["scales"].dim() == self.weight.dim()

    @property
    def experts_sizes(self) -> dict[str, int]:
        """See Packed."""
        return {"group": BLOCK if self.by_block else 0}

    def part(self, start: int, stop: int) -> Self:
        """Views of some rows, with the scales that they have once ``settle`` has put scales together."""
        part, scales = super().part(start, stop), self.tensors["scales"]
        if len(scales) != self.n:
            rows = slice(start // BLOCK, -(-stop // BLOCK)) if scales.dim() == 2 else slice(None)
            part.tensors["scales"] = scales[rows]
        return part

    def _sizes(self) -> dict[str, int]:
        return {"n": self.n, "k": self.k}

    def product(self, place: Place) -> Product:
        """Round, then multiply."""
        by_k = {name: size for name, size in self._sizes().items() if name != "n"}
        quantise, gemm = place.kernel(self.quantiser, **by_k), place.kernel(self.gemm, **self._sizes())
        weight = self.weight

        def multiply(x: Activations, out: torch.Tensor, bias: torch.Tensor | None) -> None:
            if isinstance(x, torch.Tensor):
                rows = self.room(len(x))
                quantise(x, out=rows.codes, scales=rows.scales, static=self.x_scale is not None)
            else:
                rows = x
            gemm(rows.codes, weight, rows.scales, self.tensors["scales"], out=out, bias=bias)

        return multiply

    def room(self, num_tokens: int) -> RoundedRows:
        """Where so many rows of activations are rounded to: with the one scale that all have, if there is one."""
        codes = torch.empty(num_tokens, self.k, dtype=self.code, device=self.device)
        groups = -(-self.k // self.group)
        scales = self.x_scale
        if scales is None:
            scales = torch.empty((num_tokens,) if groups == 1 else (num_tokens, groups), device=self.device)
        return RoundedRows(codes, scales)

    def numbers(self) -> torch.Tensor:
        """The values."""
        scales = self.tensors["scales"].view(len(self.tensors["scales"]), -1)
        rows = {self.n: 1, 1: self.n}.get(len(scales), BLOCK)
        columns = self.k if scales.shape[1] == 1 else BLOCK
        wide = scales.repeat_interleave(rows, 0)[: self.n].repeat_interleave(columns, 1)[:, : self.k]
        return self.weight.float() * wide


class Fp8Weight(W8A8):
    """e4m3 weights and activations: quantize_fp8 and fp8_gemm. Rounding: to e4m3 of a row's largest magnitude over 448."""

    experts_op = "fused_moe_fp8"
    code = torch.float8_e4m3fn
    largest = E4M3_MAX
    quantiser = "quantize_fp8"
    gemm = "fp8_gemm"

    @classmethod
    def empty(
        cls, place: Place, n: int, k: int, *, by_block: bool = False, static: bool = False, experts: int | None = None
    ) -> "Fp8Weight":
        """Before it is loaded; ``static`` has one scale for all activations, which the checkpoint holds."""
        weight: Fp8Weight = cls._empty(place, n, k, by_block=by_block, static=static, experts=experts)
        return weight

    def _sizes(self) -> dict[str, int]:
        return {"n": self.n, "k": self.k, "group": self.group}

    def settle(self) -> None:
        """Scale by whole blocks, or by the whole matrix beside activations that are scaled as a whole, where all rows agree."""
        scales = self.tensors["scales"]
        if self.by_block:
            blocks = scales[..., ::BLOCK, :]
            if torch.equal(blocks.repeat_interleave(BLOCK, -2).narrow(-2, 0, self.n), scales):
                self.tensors["scales"] = blocks.clone()
        elif self.x_scale is not None and bool((scales == scales[0]).all()):
            self.tensors["scales"] = scales[:1].clone()

    def round(self, start: int, values: torch.Tensor) -> None:
        """Round rows, a scale each. Raises: ConfigError on a weight that is scaled by blocks."""
        if self.by_block:
            change = "round to a weight that is scaled by row"
            raise ConfigError("rows cannot be rounded one by one", got="scales of blocks", wanted="scales of rows", change=change)
        scales, codes = scaled(values, E4M3_MAX)
        self.put_scales(start, scales)
        self.weight[start : start + len(values)] = codes.clamp_(-E4M3_MAX, E4M3_MAX).to(self.code)


class Int8Activations(W8A8):
    """int8 weights and activations: quantize_int8 and int8_gemm. Rounding: to int8 of a row's largest magnitude over 127."""

    code = torch.int8
    largest = 127.0
    quantiser = "quantize_int8"
    gemm = "int8_gemm"

    @classmethod
    def empty(cls, place: Place, n: int, k: int, *, static: bool = False, experts: int | None = None) -> "Int8Activations":
        """Before it is loaded; ``static`` has one scale for all activations, which the checkpoint holds."""
        weight: Int8Activations = cls._empty(place, n, k, by_block=False, static=static, experts=experts)
        return weight

    def round(self, start: int, values: torch.Tensor) -> None:
        """Round rows, a scale each."""
        scales, codes = scaled(values, self.largest)
        self.put_scales(start, scales)
        self.weight[start : start + len(values)] = codes.round_().to(self.code)
