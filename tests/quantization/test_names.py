"""A list of names means the layers that its writer meant, and no others."""

import pytest

from rapid_llm import CheckpointError
from rapid_llm.quantization.names import NamePatterns

LAYER = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("lm_head", "lm_head", True),
        (LAYER, LAYER, True),
        ("self_attn.q_proj", LAYER, True),
        ("model.layers.1", LAYER, True),
        ("model.layers.1", "model.layers.11.self_attn.q_proj", False),
        ("layers.1.self_attn", LAYER, True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("self_attn.qkv_proj", LAYER, True),
        ("model.layers.1.self_attn.qkv_proj", LAYER, True),
        ("mlp.gate_up_proj", "model.layers.0.mlp.up_proj", True),
        ("mlp.gate_up_proj", "model.layers.0.mlp.down_proj", False),
        ("re:.*q_proj", LAYER, True),
        ("re:.*self_attn.*", LAYER, True),
        ("re:self_attn", LAYER, False),
        ("re:.*qkv_proj$", LAYER, True),
        ("model.layers.*.self_attn", LAYER, True),
        ("*self_attn*", LAYER, True),
        ("model.layers.0*", LAYER, False),
        ("model.layers.?.mlp*", LAYER, False),
    ],
)
def test_a_pattern_means_these_layers(pattern, name, matches):
    assert NamePatterns([pattern], "ignore").match(name) is matches


def test_an_empty_list_means_nothing():
    assert not NamePatterns([], "ignore").match(LAYER)


@pytest.mark.parametrize("pattern", ["re:(", 7, None, ""])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(CheckpointError, match=r"config\.json: ignore"):
        NamePatterns([pattern], "config.json: ignore")
