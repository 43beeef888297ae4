"""Weights rounded while they are loaded: what a layer then multiplies by is within half a step of what the file holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.errors import ConfigError
from rapid_llm.quantization.online import GROUPS, Int4Matrix, Int8Matrix, quantised_matrix
from rapid_llm.runtime.staging import place_pieces, plan_pieces
from tests.checkpoint.writers import write_folder

KINDS = ["int8", "int4"]


class Cpu:
    """A place whose kernels are never called here."""

    device = torch.device("cpu")

    def kernel(self, op, **sizes):
        return None


def values_of(matrix):
    """What the codes stand for, in float64."""
    if isinstance(matrix, Int8Matrix):
        return matrix.weight.double() * matrix.scales.double()[:, None]
    codes = torch.stack((matrix.weight & 15, matrix.weight >> 4), 2).view(len(matrix.weight), -1, matrix.group).double()
    return ((codes - matrix.zeros.double()[..., None]) * matrix.scales.double()[..., None]).view(len(matrix.weight), -1)


def half_steps(matrix):
    """Half the distance of two neighbouring values, by element; int4's zero code is rounded too, which may cost as much again."""
    if isinstance(matrix, Int8Matrix):
        return matrix.scales.double()[:, None].expand(matrix.weight.shape) / 2
    return matrix.scales.double().repeat_interleave(matrix.group, 1)


def quantised(kind, weight):
    matrix = quantised_matrix(kind, Cpu(), "layer", *weight.shape)
    matrix.rows(0, len(weight)).copy_(weight)
    return matrix


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), spread=st.sampled_from([1e-6, 1.0, 300.0]))
@settings(deadline=None, max_examples=20)
def test_every_value_is_within_its_rounding(kind, seed, spread):
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(seed)) * spread
    weight[3] = 0.0
    weight[4, 5] = 400.0 * spread  # an outlier costs its own row or group only
    matrix = quantised(kind, weight)
    assert ((values_of(matrix) - weight.double()).abs() <= half_steps(matrix) * 1.001).all()
    assert (values_of(matrix)[3] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_come_in_any_pieces_and_order(kind):
    weight = torch.randn(10, 64)
    whole, parts = quantised(kind, weight), quantised_matrix(kind, Cpu(), "layer", 10, 64)
    for start, stop in ((6, 10), (0, 2), (2, 6)):
        parts.rows(0, 10)[start:stop].copy_(weight[start:stop])
    assert torch.equal(values_of(whole), values_of(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_fills_the_parts_of_a_fused_layer(kind, tmp_path):
    tensors = {name: np.random.default_rng(i).standard_normal((size, 64)).astype(np.float32) for i, (name, size) in
               enumerate((("q.weight", 12), ("k.weight", 4)))}  # fmt: skip
    source = SafetensorsCheckpoint(write_folder(tmp_path, tensors=tensors))
    matrix = quantised_matrix(kind, Cpu(), "q", 16, 64)
    targets = {"q.weight": matrix.rows(0, 12), "k.weight": matrix.rows(12, 16)}
    list(place_pieces(source, plan_pieces(source.tensors.values(), 1000), targets, threads=2))
    expected = quantised(kind, torch.from_numpy(np.concatenate(list(tensors.values()))))
    assert torch.equal(values_of(matrix), values_of(expected))


@pytest.mark.parametrize(("width", "group"), [(384, 128), (192, 64), (96, 32)])
def test_int4_takes_the_largest_group_that_divides(width, group):
    assert Int4Matrix(Cpu(), 2, width).group == group
    assert group in GROUPS


def test_rows_that_do_not_divide_are_refused_by_layer():
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.down_proj cannot be int4: got rows of 100"):
        quantised_matrix("int4", Cpu(), "model.layers.0.mlp.down_proj", 8, 100)
    assert quantised_matrix("int8", Cpu(), "any", 8, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_were_never_loaded_are_not_numbers(kind):
    matrix = quantised_matrix(kind, Cpu(), "layer", 4, 64)
    matrix.rows(0, 2).copy_(torch.randn(2, 64))
    assert values_of(matrix)[2:].isnan().all()
