"""How far rounded weights, and rounded K and V, move the embedded model's predictions: no further than docs/quantization.md says.

The bounds are twice the divergence that benchmarks/engine/bench_perplexity.py found over the whole text, which is what its parts
differ by. int8, fp8 and nvfp4 also keep their distances from each other: rounding that got worse shows there first.
"""

from itertools import pairwise

import pytest

from benchmarks.engine.bench_perplexity import measure, windows

pytestmark = pytest.mark.real_model

TOKENS = 200
MOST_DIVERGENCE = {"gguf kept": 1e-6, "fp8 KV cache": 0.012, "int8": 0.006, "fp8": 0.03, "nvfp4": 0.4, "int4": 0.6}
MOST_RATIO = {"gguf kept": 1.0001, "fp8 KV cache": 1.03, "int8": 1.02, "fp8": 1.05, "nvfp4": 1.4, "int4": 1.5}
"""Of the perplexity to that of float32, which says less, as errors of both signs cancel in it."""


def test_formats_stay_within_their_stated_distance_of_float32():
    texts, _ = windows(TOKENS)
    found = dict(measure(texts, ["float32", *MOST_DIVERGENCE]))
    floats = found.pop("float32")
    assert 10 < floats["perplexity"] < 40  # it reads the text at all
    for way, each in found.items():
        assert abs(each["kl"]) <= MOST_DIVERGENCE[way], way
        assert each["perplexity"] / floats["perplexity"] <= MOST_RATIO[way], way
    order = [found[way]["kl"] for way in ("int8", "fp8", "nvfp4")]
    assert all(better < worse / 2 for better, worse in pairwise(order))
