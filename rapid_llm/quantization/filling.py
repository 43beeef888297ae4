"""What the formats' slots share: codes out of 32-bit words and into bytes, scales of every layout, checks of what was loaded."""

from collections.abc import Callable

import torch

from rapid_llm.errors import CheckpointError
from rapid_llm.quantization.formats import FLOATS, Held
from rapid_llm.quantization.packed import Packed
from rapid_llm.weights import Intake, WeightSlot

Store = Callable[[int, torch.Tensor], None]
"""Takes the first row's number and some rows, as an Intake hands them over."""

_CHUNK = 1 << 24  # codes that are wide at one time


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words [.., w] -> codes uint8 [.., w * 32 / bits], bits 4 or 8, the first in the lowest bits."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else halves_of(octets)


def halves_of(octets: torch.Tensor) -> torch.Tensor:
    """Bytes [.., w] -> codes uint8 [.., 2w], the low half first."""
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


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


def expanded(values: torch.Tensor, shape: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
    """``values`` with each repeated ``widths`` times along its dimensions, cut to ``shape``."""
    for dim, (width, size) in enumerate(zip(widths, shape, strict=True)):
        values = values.repeat_interleave(width, dim).narrow(dim, 0, size)
    return values


def check_scales(name: str, values: torch.Tensor, *, zero: bool = False) -> None:
    """Raises: CheckpointError, by tensor ``name``, unless all are finite and above 0, or 0 where ``zero`` allows it."""
    values = values.float()
    least = values >= 0 if zero else values > 0
    if bool((values.isfinite() & least).all()):
        return
    kinds = (
        ("NaN", values.isnan()),
        ("infinite", values.isinf()),
        ("negative", values.isfinite() & (values < 0)),
        ("zero", values == 0 if not zero else values.isnan() & ~values.isnan()),
    )
    found = ", ".join(f"{int(mask.sum()):,} {kind}" for kind, mask in kinds if mask.any())
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


def unread(name: str, part: Packed, held: Held) -> WeightSlot:
    """A slot for a tensor that is in the file and not needed."""
    dtypes = () if held[name].dtype in FLOATS else (held[name].dtype,)
    return WeightSlot(name, Intake(lambda _start, _rows: None, held[name].shape, part.device), dtypes, optional=True)


def scalar_shape(name: str, held: Held, *, other: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The shape of a tensor of one value, which files write as [] or [1]; ``other`` where it has another one or is not there."""
    shape = held[name].shape if name in held else other
    return shape if shape in ((), (1,)) else other
