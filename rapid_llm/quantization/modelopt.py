"""Checkpoints of NVIDIA's ModelOpt, quant_method "modelopt" or hf_quant_config.json: FP8 by tensor, and NVFP4.

FP8 layers are those of ``fp8.py`` with one scale a tensor and static activations. NVFP4 layers hold ``weight`` uint8 [n, k / 2],
two e2m1 codes a byte, ``weight_scale`` e4m3 [n, k / 16] and ``weight_scale_2`` fp32 [], which all multiply; compressed-tensors
has the codes as ``weight_packed`` and, in ``weight_global_scale``, what the product is divided by. Activations keep their dtype,
so that the scales which both formats hold for them are not needed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rapid_llm.quantization.filling import check_scales, intake, scalar_shape, unread
from rapid_llm.quantization.formats import CheckpointFormat, Held, Read
from rapid_llm.quantization.fp8 import Fp8
from rapid_llm.quantization.mxfp4 import e2m1_values
from rapid_llm.quantization.names import NamePatterns
from rapid_llm.quantization.nvfp4 import GROUP, Nvfp4Weight
from rapid_llm.quantization.packed import Packed, Place
from rapid_llm.quantization.settings import Settings
from rapid_llm.weights import WeightSlot


@dataclass(frozen=True)
class Nvfp4:
    """The format of one layer.

    Attributes:
        packed: whether the tensors are named as compressed-tensors does it, and the global scale divides.
        held, file: the checkpoint's tensors and its name in errors.
    """

    packed: bool
    held: Held = field(compare=False, repr=False)
    file: Path = field(compare=False, repr=False)

    @property
    def kind(self) -> str:
        """See WeightFormat."""
        return "ct-nvfp4" if self.packed else "modelopt"

    def codes(self, name: str) -> str:
        """See CheckpointFormat."""
        return f"{name}.weight_packed" if self.packed else f"{name}.weight"

    def refusal(self, k: int) -> str:
        """See CheckpointFormat."""
        return f"rows of {k}, no multiple of {GROUP}" if k % GROUP else ""

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """See WeightFormat."""
        return Nvfp4Weight.empty(place, n, k, experts=experts)

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """See WeightFormat."""
        scales, whole_scale = part.tensors["scales"], part.tensors["global_scales"]

        def store(_start: int, value: torch.Tensor) -> None:
            whole_scale.fill_(1 / value.float().view(()) if self.packed else value.float().view(()))

        def check() -> None:
            check_scales(f"{name}.weight_scale", scales, zero=True)  # a group of numbers that are small beside the largest
            check_scales(self._global(name), whole_scale)

        part.after_loading(check)
        yield WeightSlot(self.codes(name), part.weight, ("uint8",), part.whole.finish)
        yield WeightSlot(f"{name}.weight_scale", scales, ("float8_e4m3fn",), part.whole.finish)
        yield intake(self._global(name), part, store, scalar_shape(self._global(name), self.held), ())
        for activations in ("input_global_scale", "input_scale"):
            if f"{name}.{activations}" in self.held:
                yield unread(f"{name}.{activations}", part, self.held)

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """See CheckpointFormat."""
        scale = read(self._global(name)).double().view(())
        scales = read(f"{name}.weight_scale").float().double() * (1 / scale if self.packed else scale)
        return e2m1_values(read(self.codes(name))) * scales.repeat_interleave(GROUP, 1)

    def _global(self, name: str) -> str:
        return f"{name}.weight_global_scale" if self.packed else f"{name}.weight_scale_2"


def modelopt_rule(settings: Settings, held: Held) -> Callable[[str], CheckpointFormat | None]:
    """The format of a layer by its name. Raises: CheckpointError on what is not served."""
    settings.one_of("quant_method", ("modelopt",))
    nested = settings.part("quantization")
    found = settings if nested is None else nested
    algorithm = found.one_of("quant_algo", ("FP8", "NVFP4"))
    form: CheckpointFormat
    if algorithm == "FP8":
        found.one_of("group_size", (None, 0))
        form = Fp8("tensor", "static", held=held, file=settings.file)
    else:
        found.one_of("group_size", (GROUP,), GROUP)
        form = Nvfp4(False, held, settings.file)
    for key in ("quantized_layers", "awq_block_size", "has_zero_point", "pre_quant_scale"):
        found.one_of(key, (None, False))
    ignored = NamePatterns(found.names("exclude_modules", "ignore"), f"{settings.file}: modules that are left out")
    of_the_cache = ("kv_cache_quant_algo", "kv_cache_scheme")  # read where the cache is made
    settings.log_unknown(("producer", "config_groups", "ignore", *of_the_cache))
    if nested is not None:
        nested.log_unknown(("ignore", *of_the_cache))
    return lambda name: None if ignored.match(name) else form
