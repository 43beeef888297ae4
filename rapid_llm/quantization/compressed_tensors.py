"""Checkpoints of quant_method "compressed-tensors": groups of layers by name, each with arguments for weights and activations.

Formats: pack-quantized (int4 and int8 codes in 32-bit words, alone), int-quantized (int8, with int8 activations or alone),
float-quantized (e4m3), nvfp4-pack-quantized and mxfp4-pack-quantized (weights alone), naive-quantized (int8 or e4m3 by its type).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rapid_llm.errors import CheckpointError
from rapid_llm.quantization import mxfp4, nvfp4
from rapid_llm.quantization.filling import (
    Layout,
    codes_of,
    expanded_scales,
    input_scale_slot,
    intake,
    scale_slot,
    zeros_slot,
)
from rapid_llm.quantization.formats import CheckpointFormat, Held, Read
from rapid_llm.quantization.fp8 import Activations, Fp8
from rapid_llm.quantization.gptq import GROUPS, empty_integers, group_index, refused_rows
from rapid_llm.quantization.modelopt import Nvfp4
from rapid_llm.quantization.mxfp4 import Mxfp4
from rapid_llm.quantization.names import NamePatterns
from rapid_llm.quantization.packed import Int8Weight, Packed, Place
from rapid_llm.quantization.settings import Settings
from rapid_llm.quantization.w8a8 import BLOCK, Int8Activations
from rapid_llm.weights import WeightSlot

_NEUTRAL_PARTS = ("sparsity_config", "transform_config")  # empty, or absent
_SYMMETRIC = "0, as the config says symmetric"
_ARGUMENTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # how numbers were found


@dataclass(frozen=True)
class PackedIntegers:
    """Integers in 32-bit words along k: ``weight_packed`` int32 [n, k * bits / 32], ``weight_scale`` and ``weight_shape``.

    Attributes:
        bits: of a code, 4 or 8.
        layout: what a scale is of: "tensor", "channel" or "group".
        group: columns that share a scale; 0 is all of them.
        zeros: whether there are zero points, ``weight_zero_point`` int32 [n * bits / 32, k / group].
        act_order: whether the columns of a group lie apart, by ``weight_g_idx`` int32 [k].
        held, file: the checkpoint's tensors and its name in errors.
    """

    bits: int
    layout: Layout
    group: int
    zeros: bool
    act_order: bool
    held: Held = field(compare=False, repr=False)
    file: Path = field(compare=False, repr=False)

    @property
    def kind(self) -> str:
        """See WeightFormat."""
        return f"w{self.bits}a16"

    def codes(self, name: str) -> str:
        """See CheckpointFormat."""
        return f"{name}.weight_packed"

    def refusal(self, k: int) -> str:
        """See CheckpointFormat."""
        return refused_rows(k, self.bits, self.group)

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """See WeightFormat."""
        return empty_integers(
            place, n, k, bits=self.bits, group=self.group, zeros=self.zeros, act_order=self.act_order, experts=experts
        )

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """See WeightFormat."""
        per_word = 32 // self.bits

        def codes(start: int, words: torch.Tensor) -> None:
            octets = words.contiguous().view(torch.uint8)
            part.weight[start : start + len(words)] = octets if self.bits == 4 else (octets ^ 0x80).view(torch.int8)

        def zeros(start: int, words: torch.Tensor) -> None:
            points = codes_of(words.t(), self.bits).t()[: part.n - start * per_word]
            part.tensors["zeros"][start * per_word : start * per_word + len(points)] = points

        yield intake(f"{name}.weight_packed", part, codes, (part.n, part.k // per_word), ("int32",))
        yield scale_slot(f"{name}.weight_scale", part, self.layout, self.held)
        if self.zeros:
            shape = (-(-part.n // per_word), part.k // part.group)
            yield intake(f"{name}.weight_zero_point", part, zeros, shape, ("int32",))
        elif f"{name}.weight_zero_point" in self.held:
            yield zeros_slot(f"{name}.weight_zero_point", part, self.held, self.file, _SYMMETRIC)
        if f"{name}.weight_shape" in self.held:
            yield _shape_slot(f"{name}.weight_shape", part, self.file)
        index = f"{name}.weight_g_idx"
        if part.group != part.k and (self.act_order or index in self.held):
            yield group_index(index, name, part, self.act_order, self.file)

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """See CheckpointFormat."""
        shifts, mask = torch.arange(0, 32, self.bits, dtype=torch.int32), 2**self.bits - 1
        codes = (read(f"{name}.weight_packed")[:, :, None] >> shifts & mask).flatten(1).double()
        n, k = codes.shape
        zeros = torch.full((1, 1), 2.0 ** (self.bits - 1), dtype=torch.float64)
        if self.zeros:
            zeros = (read(f"{name}.weight_zero_point")[:, None, :] >> shifts[:, None] & mask).flatten(0, 1)[:n].double()
        scales, width = read(f"{name}.weight_scale").double().view(-1, 1), self.group or k
        columns = torch.arange(k) // width
        if self.layout == "group":
            scales = scales.view(n, -1)
            if f"{name}.weight_g_idx" in self.held and (index := read(f"{name}.weight_g_idx")).min() >= 0:
                columns = index.long()
        zeros = zeros.expand(n, scales.shape[1]) if zeros.numel() == 1 else zeros
        values: torch.Tensor = (codes - zeros[:, columns]) * scales.expand(n, -1)[:, columns]
        return values


@dataclass(frozen=True)
class Integers:
    """int8 as it is: ``weight`` int8 [n, k] and ``weight_scale``; with static activations also ``input_scale``.

    Attributes:
        layout: what a scale is of: "tensor" or "channel".
        activations: how the checkpoint means activations to be rounded, to int8.
        held, file: the checkpoint's tensors and its name in errors.
    """

    layout: Layout
    activations: Activations
    held: Held = field(compare=False, repr=False)
    file: Path = field(compare=False, repr=False)

    @property
    def kind(self) -> str:
        """See WeightFormat."""
        return "w8a16" if self.activations == "plain" else "w8a8"

    def codes(self, name: str) -> str:
        """See CheckpointFormat."""
        return f"{name}.weight"

    def refusal(self, k: int) -> str:
        """See CheckpointFormat."""
        return ""

    def empty(self, place: Place, n: int, k: int, *, experts: int | None = None) -> Packed:
        """See WeightFormat. Stacked experts keep activations as they are: no op multiplies int8 ones."""
        if self.activations == "plain" or experts is not None:
            return Int8Weight.empty(place, n, k, experts=experts)
        return Int8Activations.empty(place, n, k, static=self.activations == "static")

    def slots(self, name: str, part: Packed) -> Iterator[WeightSlot]:
        """See WeightFormat."""
        yield WeightSlot(f"{name}.weight", part.weight, ("int8",), part.whole.finish)
        yield scale_slot(f"{name}.weight_scale", part, self.layout, self.held)
        for zero_point in ("weight_zero_point", "input_zero_point"):
            if f"{name}.{zero_point}" in self.held:
                yield zeros_slot(f"{name}.{zero_point}", part, self.held, self.file, _SYMMETRIC)
        if (activations := input_scale_slot(f"{name}.input_scale", part, self.held)) is not None:
            yield activations

    def dequantised(self, read: Read, name: str) -> torch.Tensor:
        """See CheckpointFormat."""
        codes = read(f"{name}.weight").double()
        return codes * expanded_scales(read(f"{name}.weight_scale"), self.layout, *codes.shape)


def _shape_slot(name: str, part: Packed, file: Path) -> WeightSlot:
    """The slot of the shape that a packed weight says it has."""

    def store(start: int, sizes: torch.Tensor) -> None:
        wanted = [part.n, part.k][start : start + len(sizes)]
        if sizes.tolist() != wanted:
            got, change = str(sizes.tolist()), "fetch the checkpoint again"
            raise CheckpointError(f"{file}: {name} is not the layer's", got=got, wanted=str(wanted), change=change)

    return intake(name, part, store, (2,), ("int64", "int32"))


def compressed_tensors_rule(settings: Settings, held: Held) -> Callable[[str], CheckpointFormat | None]:
    """The format of a layer by its name. Raises: CheckpointError on what is not served."""
    settings.one_of("quant_method", ("compressed-tensors",))
    settings.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    for key in _NEUTRAL_PARTS:
        part = settings.part(key)
        if part is not None and (part.raw.get("format", "dense") != "dense" or part.raw.get("config_groups")):
            raise settings.refused(key, "no such key, or an empty one")
    usual = settings.get("format")
    groups = settings.part("config_groups")
    if groups is None or not groups.raw:
        raise settings.refused("config_groups", "groups of layers")
    found: list[tuple[NamePatterns, bool, CheckpointFormat]] = []
    for key in groups.raw:
        group = groups.part(key) or groups
        targets = group.names("targets")
        patterns = NamePatterns(targets, f"{settings.file}: config_groups.{key}.targets")
        found.append((patterns, "Linear" in targets, _form(group, usual, held)))
    ignored = NamePatterns(settings.names("ignore"), f"{settings.file}: ignore")
    settings.log_unknown(("version", "global_compression_ratio", "kv_cache_scheme"))

    def rule(name: str) -> CheckpointFormat | None:
        if ignored.match(name):
            return None
        named = [form for patterns, _, form in found if patterns.match(name)]
        return next(iter(named or [form for _, is_every, form in found if is_every]), None)

    return rule


def _form(group: Settings, usual: object, held: Held) -> CheckpointFormat:
    """The format of one group."""
    group.one_of("output_activations", (None,))
    weights, inputs = group.part("weights"), group.part("input_activations")
    if weights is None:
        raise group.refused("weights", "how they are quantised")
    name = group.get("format") or usual
    makers = {
        "pack-quantized": _packed_integers,
        "int-quantized": _integers,
        "float-quantized": _floats,
        "nvfp4-pack-quantized": _nvfp4,
        "mxfp4-pack-quantized": _mxfp4,
        "naive-quantized": _floats if weights.get("type") == "float" else _integers,
    }
    if not isinstance(name, str) or name not in makers:
        problem = f"{group.file}: format of {group.below.rstrip('.')} is not served"
        change = "use a checkpoint of a format that is served"
        raise CheckpointError(problem, got=repr(name), wanted=" | ".join(map(repr, makers)), change=change)
    form = makers[name](weights, inputs, held)
    for part in (weights, inputs):
        if part is not None:
            part.log_unknown((*_ARGUMENTS, "block_structure", "group_size", "actorder"))
    group.log_unknown(())
    return form


def _packed_integers(weights: Settings, inputs: Settings | None, held: Held) -> PackedIntegers:
    """Weights of pack-quantized."""
    weights.one_of("type", ("int",), "int")
    weights.one_of("dynamic", (False,), False)
    bits, symmetric = weights.one_of("num_bits", (4, 8)), weights.flag("symmetric", default=True)
    if inputs is not None:
        raise CheckpointError(
            f"{inputs.file}: activations of {inputs.below.rstrip('.')} beside packed integers are not served",
            got=f"{inputs.raw.get('num_bits')} bits",
            wanted="no input_activations",
            change="use a checkpoint of weights alone",
        )
    if bits == 8 and not symmetric:
        raise weights.refused("symmetric", "true, of 8 bits")
    group = weights.group("group_size", GROUPS)
    layout = _strategy(weights, ("channel", "group", "tensor"), "group" if group else "channel")
    if layout == "tensor" and not symmetric:
        raise weights.refused("symmetric", "true, of one scale a tensor")
    if (layout == "group") != bool(group):
        raise weights.refused("group_size", "a size with strategy group, and none with another")
    order = weights.one_of("actorder", (None, False, True, "weight", "static", "group", "dynamic"))
    act_order = order in (True, "group", "dynamic") and layout == "group"
    return PackedIntegers(bits, layout, group, not symmetric, act_order, held, weights.file)


def _integers(weights: Settings, inputs: Settings | None, held: Held) -> Integers:
    """Weights of int-quantized."""
    _eight_bits(weights, "int")
    layout = _strategy(weights, ("channel", "tensor"), "tensor")
    return Integers(layout, _activations(inputs, "int"), held, weights.file)


def _floats(weights: Settings, inputs: Settings | None, held: Held) -> Fp8:
    """Weights of float-quantized."""
    _eight_bits(weights, "float")
    layout = _strategy(weights, ("channel", "tensor", "block"), "tensor")
    if layout == "block" and weights.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise weights.refused("block_structure", f"{[BLOCK, BLOCK]}")
    return Fp8(layout, _activations(inputs, "float", by_block=layout == "block"), held=held, file=weights.file)


def _nvfp4(weights: Settings, inputs: Settings | None, held: Held) -> Nvfp4:
    """Weights of nvfp4-pack-quantized; activations, which may be meant to be rounded alike, keep their dtype."""
    _four_bits(weights, "tensor_group", nvfp4.GROUP)
    if inputs is not None:
        _four_bits(inputs, "tensor_group", nvfp4.GROUP)
    return Nvfp4(True, held, weights.file)


def _mxfp4(weights: Settings, inputs: Settings | None, held: Held) -> Mxfp4:
    """Weights of mxfp4-pack-quantized; activations as of _nvfp4."""
    _four_bits(weights, "group", mxfp4.GROUP)
    if inputs is not None:
        _four_bits(inputs, "group", mxfp4.GROUP)
    return Mxfp4(True, held, weights.file)


def _four_bits(arguments: Settings, strategy: str, group: int) -> None:
    for key, served in (("type", "float"), ("num_bits", 4), ("strategy", strategy), ("group_size", group)):
        arguments.one_of(key, (served,))
    arguments.one_of("symmetric", (True,), True)
    arguments.get("dynamic")


def _eight_bits(arguments: Settings, kind: str) -> None:
    arguments.one_of("type", (kind,), "int")
    arguments.one_of("num_bits", (8,), 8)
    arguments.one_of("symmetric", (True,), True)


def _strategy(weights: Settings, served: tuple[Layout, ...], usual: Layout) -> Layout:
    weights.one_of("dynamic", (False,), False)
    layout: Layout = weights.one_of("strategy", served, usual)
    return layout


def _activations(inputs: Settings | None, kind: str, *, by_block: bool = False) -> Activations:
    """How activations are rounded."""
    if inputs is None:
        return "plain"
    _eight_bits(inputs, kind)
    if not inputs.flag("dynamic"):
        if by_block:
            raise inputs.refused("dynamic", "true, beside weights scaled by blocks")
        inputs.one_of("strategy", ("tensor",), "tensor")
        return "static"
    strategy = inputs.one_of("strategy", ("group",) if by_block else ("token", "tensor"), "token")
    if strategy == "group":
        inputs.one_of("group_size", (BLOCK,))
    return "dynamic"
