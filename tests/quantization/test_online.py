"""Weights rounded while they are loaded: what a layer then multiplies by is within half a step of what the file holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import current_device
from rapid_llm.kernels.dispatcher.dispatch import choose, load_target
from rapid_llm.quantization.online import GROUPS, OnlineFormats
from rapid_llm.quantization.packed import Fp8Bytes
from rapid_llm.quantization.w8a8 import Fp8Weight
from rapid_llm.runtime.staging import place_pieces, plan_pieces
from tests.checkpoint.writers import write_folder

KINDS = ["fp8", "int8", "int4", "nvfp4"]


class Cpu:
    """A place whose kernels are those of a CPU; ``native`` says that they are more than plain torch."""

    device = torch.device("cpu")

    def __init__(self, native=False):
        self.native = native

    def is_native(self, op, **sizes):
        return self.native

    def kernel(self, op, **sizes):
        return load_target(choose(op, device=current_device("cpu"), dtype="float32", **sizes))


def empty(kind, n, k):
    return OnlineFormats(kind).of(["layer"], k).empty(Cpu(), n, k)


def target(kind, weight, start=0, stop=None):
    """Where a loader puts these rows."""
    part = weight.part(start, weight.n if stop is None else stop)
    [slot] = OnlineFormats(kind).of(["layer"], weight.k).slots("layer", part)
    return slot.target


def half_steps(weight):
    """Half the distance of two neighbouring values, by element; int4's zero code is rounded too, which may cost as much again.

    Codes of nvfp4 lie up to 2 scales apart, and 6, its largest, ends up to a 16th short of what is largest: scales are rounded.
    """
    if "global_scales" in weight.tensors:
        steps = weight.tensors["scales"].double() * weight.tensors["global_scales"].double()[:, None]
        return steps.repeat_interleave(weight.group, 1)
    scales = weight.tensors["scales"].double().view(weight.n, -1).repeat_interleave(weight.group, 1)
    if weight.weight.dtype == torch.float8_e4m3fn:
        return scales * (weight.weight.double().abs() / 16).clamp_min(2**-10)  # 3 bits after the first; subnormals 2**-9 apart
    return scales if "zeros" in weight.tensors else scales / 2


def quantised(kind, values):
    weight = empty(kind, *values.shape)
    target(kind, weight).copy_(values)
    return weight


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), spread=st.sampled_from([1e-6, 1.0, 300.0]))
@settings(deadline=None, max_examples=20)
def test_every_value_is_within_its_rounding(kind, seed, spread):
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(seed)) * spread
    weight[3] = 0.0
    weight[4, 5] = 400.0 * spread  # an outlier costs its own row or group only
    packed = quantised(kind, weight)
    assert ((packed.numbers().double() - weight.double()).abs() <= half_steps(packed) * 1.001).all()
    assert (packed.numbers()[3] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_come_in_any_pieces_and_order(kind):
    weight = torch.randn(10, 64)
    whole, parts = quantised(kind, weight), empty(kind, 10, 64)
    for start, stop in ((6, 10), (0, 2), (2, 6)):
        target(kind, parts)[start:stop].copy_(weight[start:stop])
    assert torch.equal(whole.numbers(), parts.numbers())


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_fills_the_parts_of_a_fused_layer(kind, tmp_path):
    tensors = {name: np.random.default_rng(i).standard_normal((size, 64)).astype(np.float32) for i, (name, size) in
               enumerate((("q.weight", 12), ("k.weight", 4)))}  # fmt: skip
    source = SafetensorsCheckpoint(write_folder(tmp_path, tensors=tensors))
    packed = empty(kind, 16, 64)
    targets = {"q.weight": target(kind, packed, 0, 12), "k.weight": target(kind, packed, 12, 16)}
    list(place_pieces(source, plan_pieces(source.tensors.values(), 1000), targets, threads=2))
    expected = quantised(kind, torch.from_numpy(np.concatenate(list(tensors.values()))))
    assert torch.equal(packed.numbers(), expected.numbers())


@pytest.mark.parametrize(("width", "group"), [(384, 128), (192, 64), (96, 32)])
def test_int4_takes_the_largest_group_that_divides(width, group):
    assert empty("int4", 2, width).group == group
    assert group in GROUPS


def test_a_row_of_nvfp4_reaches_its_largest_value_whatever_its_neighbours_are():
    weight = torch.randn(5, 64) * torch.tensor([1e-30, 1e-3, 1.0, 1e4, 1e30])[:, None]
    packed = quantised("nvfp4", weight)
    largest = weight.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(packed.numbers().gather(1, largest), weight.gather(1, largest), rtol=1e-6, atol=0)
    assert (packed.tensors["scales"].float().amax(1) == 448).all()
    assert torch.equal(quantised("nvfp4", weight * 4).tensors["weight"], packed.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_stays_none_and_in_its_row(kind, broken):
    weight = torch.randn(3, 64)
    weight[1, 40] = broken
    numbers = quantised(kind, weight).numbers()
    assert not numbers[1, 32:].isfinite().all()
    assert numbers[::2].isfinite().all()


@pytest.mark.case("E1")
def test_fp8_rounds_activations_only_where_the_device_multiplies_e4m3():
    """Elsewhere the bytes are kept, and meet activations of the compute dtype: the weights are the same either way."""
    kept = {native: OnlineFormats("fp8").of(["layer"], 64).empty(Cpu(native), 6, 64) for native in (True, False)}
    assert (type(kept[True]), type(kept[False])) == (Fp8Weight, Fp8Bytes)
    weight = torch.randn(6, 64)
    for each in kept.values():
        target("fp8", each).copy_(weight)
    assert torch.equal(kept[True].numbers(), kept[False].numbers())
    for name, tensor in kept[True].tensors.items():
        assert torch.equal(tensor.view(torch.uint8), kept[False].tensors[name].view(torch.uint8))


def test_rows_that_do_not_divide_are_refused_by_layer():
    for kind in ("int4", "nvfp4"):
        with pytest.raises(ConfigError, match=rf"model\.layers\.0\.mlp\.down_proj cannot be {kind}: got rows of 100"):
            OnlineFormats(kind).of(["model.layers.0.mlp.down_proj"], 100)
    assert OnlineFormats("int8").of(["any"], 100)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_were_never_loaded_are_not_numbers(kind):
    packed = empty(kind, 4, 64)
    target(kind, packed, 0, 2).copy_(torch.randn(2, 64))
    assert packed.numbers()[2:].isnan().all()
