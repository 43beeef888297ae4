"""GPTQ checkpoints (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): 32-bit words of 4-bit or 8-bit codes along k.

A layer holds ``qweight`` int32 [k * bits / 32, n], ``qzeros`` int32 [k / group, n * bits / 32], ``scales`` [k / group, n] and
``g_idx`` int32 [k], the group of each column: value = (code - zero) * scale. Files of "checkpoint_format" gptq store a zero point
less one, in its own bits, so that a stored 15 is 0; gptq_v2 stores it as it is. Under act-order the columns of a group are not
neighbours: they are sorted by group when the layer is loaded, and activations are gathered in that order.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from rapid_llm.errors import CheckpointError, ConfigError
from rapid_llm.quantization.filling import check_scales, codes_of, intake, sort_columns, unread, zeros_slot
from rapid_llm.quantization.formats import Held, Read, unusable
from rapid_llm.quantization.names import NamePatterns
from rapid_llm.quantization.packed import Int4Weight, Int8Weight, Packed, Place
from rapid_llm.quantization.settings import Settings
from rapid_llm.weights import WeightSlot

GROUPS = (16, 32, 64, 128, 256, 512, 1024)
"""Group sizes that the kernels serve."""

# How the numbers were found, and which library wrote or ran them: nothing that a stored code means.
_HARMLESS = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "quantizer", "meta", "dataset"),
    *("model_name_or_path", "model_file_base_name", "model_seqlen", "tokenizer", "batch_size", "pad_token_id", "version"),
    *("module_name_preceding_first_block", "block_name_to_quantize", "cache_block_outputs", "use_exllama", "disable_exllama"),
    *("exllama_config", "backend", "use_cuda_fp16", "max_input_length", "act_group_aware", "hyb_act", "offload_to_disk"),
    *("parallel_packing", "fail_safe"),
)


@dataclass(frozen=True)
class Gptq:
    """The format of one layer.

    Attributes:
        bits: of a code, 4 or 8.
        group: columns that share a scale; 0 is all of them.
        less_one: whether a zero point is stored less one.
        act_order: whether the columns of a group may lie apart.
        held, file: the checkpoint's tensors and its name in errors.
    """

    bits: int
    group: int
    less_one: bool
    act_order: bool
    held: Held = field(compare=False, repr=False)
    file: Path = field(compare=False, repr=False)

    kind: ClassVar[str] = "gptq"

    def codes(self, name: str) -> str:
        """See CheckpointFormat."""
        return f"{name}.qweight"

    def refusal(self, k: int) -> str:
        """See CheckpointFormat."""
        return refused_rows(k, self.bits, self.group)

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """See WeightFormat."""
        return empty_integers(place, n, k, bits=self.bits, group=self.group, act_order=self.act_order, experts=experts)

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """See WeightFormat."""
        per_word = 32 // self.bits
        if part.n % per_word:
            raise unusable(self.file, name, self.kind, f"{part.n} outputs, no multiple of {per_word}")
        groups = part.k // part.group

        def codes(start: int, words: torch.Tensor) -> None:
            octets = words.t().contiguous().view(torch.uint8)  # of 4-bit codes two, as they are kept
            first = start * 4
            where = part.weight[:, first : first + octets.shape[1]]
            where.copy_(octets if self.bits == 4 else (octets ^ 0x80).view(torch.int8))

        def zeros(start: int, words: torch.Tensor) -> None:
            points = self._zero_points(codes_of(words, self.bits))
            if self.bits == 4:
                part.tensors["zeros"][:, start : start + len(points)] = points.t()
            elif bool((points != 128).any()):
                got, wanted = "8-bit codes with other zero points", "128, which symmetric ones have"
                change = "use a checkpoint that was quantised with sym"
                raise CheckpointError(f"{self.file}: {name}.qzeros cannot be used", got=got, wanted=wanted, change=change)

        def scales(start: int, rows: torch.Tensor) -> None:
            part.tensors["scales"].view(part.n, groups)[:, start : start + len(rows)] = rows.t()

        part.after_loading(lambda: check_scales(f"{name}.scales", part.tensors["scales"]))
        yield intake(f"{name}.qweight", part, codes, (part.k // per_word, part.n), ("int32",))
        yield intake(f"{name}.qzeros", part, zeros, (groups, part.n // per_word), ("int32",))
        yield intake(f"{name}.scales", part, scales, (groups, part.n), ())
        index = f"{name}.g_idx"
        if part.group != part.k and (index in self.held or self.act_order):
            yield group_index(index, name, part, self.act_order, self.file)
        elif index in self.held:
            yield unread(index, part, self.held)
        if f"{name}.bias" in self.held:  # some writers give every layer one; a model that has one takes it in place of this
            yield zeros_slot(f"{name}.bias", part, self.held, self.file, "0, as the model has no bias there")

    def _zero_points(self, stored: torch.Tensor) -> torch.Tensor:
        return stored + 1 & 2**self.bits - 1 if self.less_one else stored

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """See CheckpointFormat."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        words, points = read(f"{name}.qweight"), read(f"{name}.qzeros")
        codes = (words[:, None, :] >> shifts[:, None] & 2**self.bits - 1).flatten(0, 1)
        zeros = (points[:, :, None] >> shifts & 2**self.bits - 1).flatten(1)
        if self.less_one:
            zeros = zeros + 1 & 2**self.bits - 1
        k, groups = codes.shape[0], zeros.shape[0]
        index = f"{name}.g_idx"
        of_group = read(index).long() if index in self.held and groups > 1 else torch.arange(k) // (k // groups)
        scales = read(f"{name}.scales").double()
        values: torch.Tensor = ((codes - zeros[of_group]).double() * scales[of_group]).t()
        return values


def empty_integers(
    place: Place, n: int, k: int, *, bits: int, group: int, zeros: bool = True, act_order: bool = False, experts: int | None
) -> Packed:
    """A weight of 4-bit or 8-bit codes; of ``zeros`` only those of 4 bits are kept. Raises: ConfigError on ordered experts."""
    is_ordered, group = act_order and group not in (0, k), 0 if group == k else group
    if is_ordered and experts is not None:
        wanted, change = "experts quantised without an activation order", "use such a checkpoint"
        raise ConfigError("experts share no activation order", got="one each", wanted=wanted, change=change)
    weight: Packed
    if bits == 4:
        weight = Int4Weight.empty(place, n, k, group=group, zeros=zeros, experts=experts)
    else:
        weight = Int8Weight.empty(place, n, k, group=group, experts=experts)
    weight.is_ordered = is_ordered
    return weight


def refused_rows(k: int, bits: int, group: int) -> str:
    """Why rows of ``k`` codes cannot be cut into 32-bit words and groups; empty when they can."""
    if k % (32 // bits):
        return f"rows of {k}, no multiple of {32 // bits}"
    return f"rows of {k}, which do not divide into groups of {group}" if group and k % group else ""


def group_index(tensor: str, name: str, part: Packed, act_order: bool, file: Path) -> WeightSlot:
    """The slot of the group of each column, which sorts the columns of ``part`` once it is there."""
    index = torch.full((part.k,), -1, dtype=torch.int32, device=part.device)
    in_order = torch.arange(part.k, dtype=torch.int32, device=part.device) // part.group

    def refused(got: str, wanted: str) -> CheckpointError:
        change = "fetch the checkpoint again, or quantise it again"
        return CheckpointError(f"{file}: {tensor} cannot be used", got=got, wanted=wanted, change=change)

    def store(start: int, groups: torch.Tensor) -> None:
        index[start : start + len(groups)] = groups

    def sort() -> None:
        if torch.equal(index, in_order) or bool((index == -1).all()):  # -1: a writer that knew no order
            part.arrange(name, None)
            return
        order = torch.argsort(index, stable=True)
        if not torch.equal(index[order], in_order):
            raise refused("groups of uneven sizes", f"{part.group} columns in each of {part.k // part.group} groups")
        if not act_order:
            raise refused("columns of a group that lie apart", "neighbours, as the config names no activation order")
        part.arrange(name, order)
        sort_columns(part, order)

    part.after_loading(sort)
    return intake(tensor, part, store, (part.k,), ("int32",))


def gptq_rule(settings: Settings, held: Held) -> Callable[[str], Gptq | None]:
    """The format of a layer by its name. Raises: CheckpointError on what is not served."""
    settings.one_of("quant_method", ("gptq",))
    stored_as = {
        settings.one_of(key, ("gptq", "gptq_v2"), "gptq") for key in ("checkpoint_format", "format") if key in settings.raw
    }
    if len(stored_as) > 1:
        raise settings.refused("format", f"{settings.raw['checkpoint_format']!r}, as checkpoint_format says")
    settings.one_of("lm_head", (False,), False)
    settings.one_of("is_marlin_format", (False,), False)
    settings.one_of("pack_dtype", ("int32",), "int32")
    for key in ("adapter", "rotation"):
        settings.one_of(key, (None,))
    usual = _layer(settings, Gptq(0, 0, stored_as != {"gptq_v2"}, False, held, settings.file))
    listed = settings.names("modules_in_block_to_quantize")
    where = f"{settings.file}: modules_in_block_to_quantize"
    flat = [name for each in listed for name in (each if isinstance(each, list) else [each])]
    wanted = NamePatterns(flat, where) if flat else None
    overrides = _overrides(settings, usual)
    settings.log_unknown(_HARMLESS)

    def rule(name: str) -> Gptq | None:
        for pattern, form in overrides:
            if pattern.match(name):
                return form
        return usual if wanted is None or wanted.match(name) else None

    return rule


def _layer(settings: Settings, usual: Gptq) -> Gptq:
    """``usual`` with what these keys say."""
    bits = settings.one_of("bits", (4, 8), usual.bits if usual.bits else None)
    group = settings.group("group_size", GROUPS) if settings.raw.get("group_size") is not None else usual.group
    act_order = settings.flag("desc_act", default=usual.act_order)
    settings.flag("sym", default=True)  # zero points are read from the file, whatever it says
    return replace(usual, bits=bits, group=group, act_order=act_order)


def _overrides(settings: Settings, usual: Gptq) -> list[tuple[re.Pattern[str], Gptq | None]]:
    """Layers that "dynamic" sets apart: by a regular expression, after "-:" not quantised, else with other settings."""
    found: list[tuple[re.Pattern[str], Gptq | None]] = []
    dynamic: Any = settings.part("dynamic")
    for key in () if dynamic is None else dynamic.raw:
        try:
            pattern = re.compile(key[2:] if key[:2] in ("-:", "+:") else key)
        except re.error as error:
            raise dynamic.refused(key, "a regular expression after -: or +:", "correct it") from error
        if key.startswith("-:"):
            found.append((pattern, None))
            continue
        own = dynamic.part(key) or Settings({}, settings.file)
        found.append((pattern, _layer(own, usual)))
        own.log_unknown(_HARMLESS)
    return found
