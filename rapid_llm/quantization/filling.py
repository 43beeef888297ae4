"""What the formats' slots share: codes out of 32-bit words and into bytes, scales of every layout, checks of what was loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from rapid_llm.errors import CheckpointError
from rapid_llm.quantization.formats import FLOATS, Held
from rapid_llm.quantization.packed import Packed, halves_of
from rapid_llm.quantization.w8a8 import BLOCK, W8A8
from rapid_llm.weights import Intake, WeightSlot

Store = Callable[[int, torch.Tensor], None]
"""Takes the first row's number and some rows, as an Intake hands them over."""

_CHUNK = 1 << 24  # codes that are wide at one time


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words [.., w] -> codes uint8 [.., w * 32 / bits], bits 4 or 8, the first in the lowest bits."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else halves_of(octets)


def paired(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [.., 2w] below 16 -> bytes [.., w], the even one in the low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def put_columns(part: Packed, start: int, codes: torch.Tensor) -> None:
    """Write codes uint8 [r, n] of the columns from ``start`` on into 4-bit ``part``, whose bytes hold two columns each.

    Pieces of a file may end between the two, in different threads: a byte is completed under the weight's lock.
    """
    before, after = start % 2, (start + len(codes)) % 2
    both = torch.nn.functional.pad(codes, (0, 0, before, after))
    first = start // 2
    octets = (both[::2] | both[1::2] << 4).t()
    with part.whole.lock:
        part.weight[:, first : first + octets.shape[1]] |= octets


def sort_columns(part: Packed, order: torch.Tensor) -> None:
    """Put the columns of 4-bit or 8-bit codes in this order, some rows at a time."""
    order = order.to(part.device).long()
    is_paired = part.weight.dtype == torch.uint8
    rows = max(_CHUNK // part.k, 1)
    for start in range(0, part.n, rows):
        some = part.weight[start : start + rows]
        codes = (halves_of(some) if is_paired else some).index_select(1, order)
        some.copy_(paired(codes) if is_paired else codes)


Layout = Literal["tensor", "channel", "block", "group"]
"""What a scale is of in a file: the whole matrix, a row, 128 rows by 128 columns, or some columns of a row."""


def scale_slot(name: str, part: Packed, layout: Layout, held: Held, *, exponents: bool = False) -> WeightSlot:
    """The slot of the scales ``name`` of ``part``, which are checked once they are loaded.

    Args:
        exponents: scales may be bytes that name a power of two.
    """

    def store(start: int, values: torch.Tensor) -> None:
        values = as_scales(values)
        if layout == "tensor":
            part.put_scales(0, values.view(1, 1).expand(part.n, 1))
        elif layout == "block":
            first = start * BLOCK
            part.put_scales(first, values.repeat_interleave(BLOCK, 0)[: part.n - first], width=BLOCK)
        else:
            part.put_scales(start, values.view(len(values), -1))

    shape: tuple[int, ...] = {
        "tensor": scalar_shape(name, held),
        "channel": (part.n,) if name in held and held[name].shape == (part.n,) else (part.n, 1),
        "block": (-(-part.n // BLOCK), -(-part.k // BLOCK)),
        "group": (part.n, part.k // part.group),
    }[layout]
    dtypes = ("uint8",) if exponents and name in held and held[name].dtype == "uint8" else ()
    part.after_loading(lambda: check_scales(name, part.tensors["scales"]))
    return intake(name, part, store, shape, dtypes)


def as_scales(values: torch.Tensor) -> torch.Tensor:
    """Scales of a file in float32: numbers, or bytes b that stand for 2**(b - 127), 255 for NaN."""
    if values.dtype != torch.uint8:
        return values.float()
    return torch.where(values == 255, torch.nan, torch.exp2(values.float() - 127))


def expanded_scales(values: torch.Tensor, layout: Layout, n: int, k: int) -> torch.Tensor:
    """Scales of a file, one for each element of [n, k], in float64."""
    wide = values.double() if values.dtype != torch.uint8 else 2.0 ** (values.double() - 127)
    if layout == "tensor":
        return wide.view(1, 1).expand(n, k)
    wide = wide.view(len(wide), -1)
    if layout == "block":
        return wide.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return wide.repeat_interleave(k // wide.shape[1], 1)


def input_scale_slot(name: str, part: Packed, held: Held) -> WeightSlot | None:
    """The slot of the one scale of all activations; None where the weight measures them and the file has none.

    Layers that are multiplied as one share the largest of theirs: none of their activations is cut off then.
    """
    whole = part.whole
    if not isinstance(whole, W8A8) or whole.x_scale is None:
        return unread(name, part, held) if name in held else None
    scale, mine = whole.x_scale, torch.full((1,), torch.nan, device=part.device)

    def store(_start: int, value: torch.Tensor) -> None:
        mine.copy_(value.view(1))

    def check() -> None:
        check_scales(name, mine)
        torch.maximum(scale, mine, out=scale)

    part.after_loading(check)
    return intake(name, part, store, scalar_shape(name, held), ())


def check_scales(name: str, values: torch.Tensor, *, zero: bool = False) -> None:
    """Raises: CheckpointError, by tensor ``name``, unless all are finite and above 0, or 0 where ``zero`` allows it."""
    values = values.float()
    least = values >= 0 if zero else values > 0
    if bool((values.isfinite() & least).all()):
        return
    kinds = (
        ("NaN", values.isnan()),
        ("infinite", values.isinf()),
        ("negative", values < 0),
        ("zero", values == 0),
    )
    found = ", ".join(f"{int(mask.sum()):,} {kind}" for kind, mask in kinds if mask.any() and (kind != "zero" or not zero))
    raise CheckpointError(
        f"{name} holds scales that no quantiser writes",
        got=f"{found} of {values.numel():,}",
        wanted="finite numbers " + ("of 0 or more" if zero else "above 0"),
        change="fetch the checkpoint again, or quantise it again",
    )


def intake(
    name: str, part: Packed, store: Store, shape: tuple[int, ...], dtypes: tuple[str, ...], *, optional: bool = False
) -> WeightSlot:
    """A slot of ``part`` whose rows go to ``store``."""
    return WeightSlot(name, Intake(store, shape, part.device), dtypes, part.whole.finish, optional)


def zeros_slot(name: str, part: Packed, held: Held, file: Path, why: str) -> WeightSlot:
    """A slot for a tensor that may be in the file as long as all of it is 0; ``why`` tells what else it would mean."""

    def store(_start: int, values: torch.Tensor) -> None:
        if bool((values != 0).any()):
            change = "use a checkpoint whose config and tensors agree"
            raise CheckpointError(f"{file}: {name} cannot be used", got="values that are not 0", wanted=why, change=change)

    dtypes = () if held[name].dtype in FLOATS else (held[name].dtype,)
    return intake(name, part, store, held[name].shape, dtypes, optional=True)


def unread(name: str, part: Packed, held: Held) -> WeightSlot:
    """A slot for a tensor that is in the file and not needed."""
    dtypes = () if held[name].dtype in FLOATS else (held[name].dtype,)
    return WeightSlot(name, Intake(lambda _start, _rows: None, held[name].shape, part.device), dtypes, optional=True)


def scalar_shape(name: str, held: Held) -> tuple[int, ...]:
    """The shape of a tensor of one value, which files write as [] or [1]."""
    return () if name in held and held[name].shape == () else (1,)
