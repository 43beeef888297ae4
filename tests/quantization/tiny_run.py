"""Runs a tiny quantised checkpoint, prompt and steps with cache, beside a float model with the values that it stands for."""

import torch

from tests.e2e.test_families_match_transformers import FAMILIES, assert_close, run_model
from tests.quantization.writers import write_quantised
from tests.tiny_model import VOCAB_SIZE, expected_logits, tiny_model

__all__ = ["FAMILIES", "IDS", "check_family", "check_logits"]

IDS = torch.randint(0, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(3)).tolist()
_STEPS = [[(0, 0, IDS[:20])], *([(0, i, IDS[i : i + 1])] for i in range(20, 24))]


def check_logits(folder, oracle):
    """The checkpoint's logits are the oracle's."""
    expected = expected_logits(oracle, IDS)
    for got, position in zip(run_model(folder, _STEPS), [19, 20, 21, 22, 23], strict=True):
        assert_close(got[0], expected[position])


def check_family(folder, family, config, writer, **changes):
    """A tiny model of ``family``, written by ``writer(name, weight)`` under ``config``, says what its values say."""
    oracle = tiny_model(family, **{"tie_word_embeddings": False, **changes})
    write_quantised(folder, oracle, config, writer)
    check_logits(folder, oracle)
