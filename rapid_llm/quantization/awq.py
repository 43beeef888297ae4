"""AWQ checkpoints (Lin et al. 2023, https://arxiv.org/abs/2306.00978) of version "gemm": 32-bit words of 4-bit codes along n.

A layer holds ``qweight`` int32 [k, n / 8], ``qzeros`` int32 [k / group, n / 8] and ``scales`` [k / group, n]: value =
(code - zero) * scale. A word holds 8 neighbouring outputs in the order 0 2 4 6 1 3 5 7, lowest bits first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from rapid_llm.quantization.filling import check_scales, codes_of, intake, put_columns
from rapid_llm.quantization.formats import Held, Read, unusable
from rapid_llm.quantization.gptq import GROUPS, empty_integers, refused_rows
from rapid_llm.quantization.names import NamePatterns
from rapid_llm.quantization.packed import Packed, Place
from rapid_llm.quantization.settings import Settings
from rapid_llm.weights import WeightSlot

_STORED = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each 4 bits of a word hold
_WHERE = tuple(_STORED.index(output) for output in range(8))  # which 4 bits hold each output
_HARMLESS = ("sym", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "modules_to_not_convert")


@dataclass(frozen=True)
class Awq:
    """The format of one layer.

    Attributes:
        group: columns that share a scale; 0 is all of them.
        held, file: the checkpoint's tensors and its name in errors.
    """

    group: int
    held: Held = field(compare=False, repr=False)
    file: Path = field(compare=False, repr=False)

    kind: ClassVar[str] = "awq"

    def codes(self, name: str) -> str:
        """See CheckpointFormat."""
        return f"{name}.qweight"

    def refusal(self, k: int) -> str:
        """See CheckpointFormat."""
        return refused_rows(k, 4, self.group)

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """See WeightFormat."""
        return empty_integers(place, n, k, bits=4, group=self.group, experts=experts)

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """See WeightFormat."""
        if part.n % 8:
            raise unusable(self.file, name, self.kind, f"{part.n} outputs, no multiple of 8")
        groups = part.k // part.group

        def codes(start: int, words: torch.Tensor) -> None:
            put_columns(part, start, _outputs(words))

        def zeros(start: int, words: torch.Tensor) -> None:
            part.tensors["zeros"][:, start : start + len(words)] = _outputs(words).t()

        def scales(start: int, rows: torch.Tensor) -> None:
            part.tensors["scales"][:, start : start + len(rows)] = rows.t()

        part.after_loading(lambda: check_scales(f"{name}.scales", part.tensors["scales"]))
        yield intake(f"{name}.qweight", part, codes, (part.k, part.n // 8), ("int32",))
        yield intake(f"{name}.qzeros", part, zeros, (groups, part.n // 8), ("int32",))
        yield intake(f"{name}.scales", part, scales, (groups, part.n), ())

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """See CheckpointFormat."""

        def unpacked(words: torch.Tensor) -> torch.Tensor:
            outputs = torch.empty(words.shape[0], words.shape[1] * 8, dtype=torch.float64)
            for place, output in enumerate(_STORED):
                outputs[:, output::8] = (words >> 4 * place & 15).double()
            return outputs

        codes, zeros = unpacked(read(f"{name}.qweight")), unpacked(read(f"{name}.qzeros"))
        width = codes.shape[0] // zeros.shape[0]
        zeros, scales = (each.repeat_interleave(width, 0) for each in (zeros, read(f"{name}.scales").double()))
        return ((codes - zeros) * scales).t()


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Words int32 [r, n / 8] -> codes uint8 [r, n] in the order of the outputs."""
    return codes_of(words, 4).view(len(words), -1, 8)[:, :, _WHERE].flatten(1)


def awq_rule(settings: Settings, held: Held) -> Callable[[str], Awq | None]:
    """The format of a layer by its name. Raises: CheckpointError on what is not served."""
    settings.one_of("quant_method", ("awq",))
    for key in ("version", "format"):
        if isinstance(settings.get(key), str) and settings.raw[key].lower() != "gemm":
            raise settings.refused(key, "'gemm'")
    settings.one_of("backend", (None, "auto", "autoawq"))
    settings.one_of("bits" if "bits" in settings.raw else "w_bit", (4,))
    settings.one_of("zero_point", (True,), True)
    settings.one_of("lm_head", (False,), False)
    settings.one_of("desc_act", (False,), False)
    form = Awq(settings.group("group_size" if "group_size" in settings.raw else "q_group_size", GROUPS), held, settings.file)
    ignored = NamePatterns(settings.names("modules_to_not_convert"), f"{settings.file}: modules_to_not_convert")
    settings.log_unknown(_HARMLESS)
    return lambda name: None if ignored.match(name) else form
