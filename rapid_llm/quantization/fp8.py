"""Checkpoints of e4m3 weights (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433), and quant_method "fp8".

A layer holds ``weight`` e4m3 [n, k] and scales that multiply it: of the whole matrix (``weight_scale`` [] or [1]), of a row, or
of blocks of 128 rows by 128 columns (``weight_scale_inv``); with static activations also ``input_scale``. Where the device
multiplies e4m3, activations are rounded to it too; elsewhere the bytes stay as they are and are multiplied by activations of the
compute dtype, which is more exact, and scales of activations are not needed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import ClassVar, Literal

import torch

from rapid_llm.quantization.filling import Layout, expanded_scales, input_scale_slot, scale_slot
from rapid_llm.quantization.formats import Held, Read
from rapid_llm.quantization.names import NamePatterns
from rapid_llm.quantization.packed import Fp8Bytes, Packed, Place
from rapid_llm.quantization.settings import Settings
from rapid_llm.quantization.w8a8 import BLOCK, Fp8Weight
from rapid_llm.weights import WeightSlot

Activations = Literal["plain", "dynamic", "static"]
"""How activations are rounded: not at all, by a scale of each token, or by one that the checkpoint holds."""

_LEAST_GROUP = 16  # columns that share a scale where activations are plain


@dataclass(frozen=True)
class Fp8:
    """The format of one layer.

    Attributes:
        layout: what a scale is of.
        activations: how the checkpoint means activations to be rounded.
        exponents: whether scales may be bytes that name a power of two.
        held, file: the checkpoint's tensors and its name in errors.
    """

    layout: Layout
    activations: Activations
    exponents: bool = False
    held: Held = field(default_factory=dict, compare=False, repr=False)
    file: Path = field(default=Path(), compare=False, repr=False)

    kind: ClassVar[str] = "fp8"

    def codes(self, name: str) -> str:
        """See CheckpointFormat."""
        return f"{name}.weight"

    def refusal(self, k: int) -> str:
        """See CheckpointFormat."""
        is_odd = self.layout == "block" and k % _LEAST_GROUP and k > BLOCK
        return f"rows of {k} in blocks of {BLOCK}, no multiple of {_LEAST_GROUP}" if is_odd else ""

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """See WeightFormat."""
        by_block = self.layout == "block"
        if self.activations != "plain":
            sizes = {} if experts is not None else {"n": n, "k": k, "group": BLOCK if by_block and k > BLOCK else k}
            if place.is_native(Fp8Weight.gemm if experts is None else Fp8Weight.experts_op, **sizes):
                static = self.activations == "static"
                return Fp8Weight.empty(place, n, k, by_block=by_block, static=static, experts=experts)
        group = gcd(k, BLOCK) if by_block and k > BLOCK else 0
        return Fp8Bytes.empty(place, n, k, group=group, experts=experts)

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """See WeightFormat."""
        yield WeightSlot(f"{name}.weight", part.weight, ("float8_e4m3fn",), part.whole.finish)
        yield scale_slot(self._scale(name), part, self.layout, self.held, exponents=self.exponents)
        if (activations := input_scale_slot(self._input(name), part, self.held)) is not None:
            yield activations

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """See CheckpointFormat."""
        codes = read(f"{name}.weight").float().double()
        return codes * expanded_scales(read(self._scale(name)), self.layout, *codes.shape)

    def _scale(self, name: str) -> str:
        usual, other = f"{name}.weight_scale", f"{name}.weight_scale_inv"
        return other if other in self.held or (self.layout == "block" and usual not in self.held) else usual

    def _input(self, name: str) -> str:
        other = f"{name}.activation_scale"
        return other if other in self.held else f"{name}.input_scale"


def fp8_rule(settings: Settings, held: Held) -> Callable[[str], Fp8 | None]:
    """The format of a layer by its name. Raises: CheckpointError on what is not served."""
    settings.one_of("quant_method", ("fp8",))
    settings.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    settings.one_of("weight_per_tensor", (None, True, False))
    settings.one_of("expert_dtype", ("fp8",), "fp8")
    settings.one_of("modules_to_convert", (None, []))
    scheme: Activations = settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    if settings.get("weight_block_size") not in (None, [BLOCK, BLOCK]):
        raise settings.refused("weight_block_size", f"{[BLOCK, BLOCK]} | no such key")
    by_block = settings.get("weight_block_size") is not None
    if by_block and scheme == "static":
        raise settings.refused("activation_scheme", "'dynamic' with weight_block_size")
    exponents = settings.one_of("scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    form = Fp8("block" if by_block else "tensor", scheme, exponents, held, settings.file)
    key = "modules_to_not_convert" if settings.get("modules_to_not_convert") is not None else "ignored_layers"
    ignored = NamePatterns(settings.names(key), f"{settings.file}: {key}")
    settings.log_unknown(("dequantize", "ignored_layers", "kv_cache_scheme", "is_checkpoint_fp8_serialized"))
    return lambda name: None if ignored.match(name) else form
