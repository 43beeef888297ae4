"""Runs a tiny quantised checkpoint, prompt and steps with cache, beside a float model with the values that it stands for."""

import torch

from rapid_llm.modules.placement import Placement
from tests import reference
from tests.e2e.test_families_match_transformers import DENSE, FAMILIES, assert_close, run_model
from tests.quantization.writers import write_quantised
from tests.tiny_model import VOCAB_SIZE, expected_logits, tiny_model

__all__ = ["DENSE", "FAMILIES", "IDS", "check_family", "check_logits", "check_rounded_family"]

# Of the spread, where activations are rounded: sums in another order turn one rounding over now and then, which costs 1e-4.
# Activations that are not rounded at all are off by a tenth and more.
_ROUNDED_TOLERANCE = 5e-3
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


def check_rounded_family(folder, family, config, writer, quantiser, monkeypatch):
    """As check_family on a device whose rows are native, against an oracle whose layers round their inputs by ``quantiser``."""

    def rounded(values):
        codes, scales = getattr(reference, quantiser)(values.flatten(0, -2))
        return (codes.double() * scales.view(-1, 1)).view(values.shape).float()

    def experts_that_round(module):
        def forward(x, ids, weights):
            out = torch.zeros_like(x)
            for token, each in enumerate(rounded(x)):
                for expert, weight in zip(ids[token], weights[token], strict=True):
                    gate, up = (module.gate_up_proj[expert] @ each).chunk(2)
                    inner = torch.nn.functional.silu(gate) * up
                    out[token] += weight * (module.down_proj[expert] @ rounded(inner[None])[0])
            return out

        return forward

    monkeypatch.setattr(Placement, "is_native", lambda *_, **__: True)
    oracle = tiny_model(family, tie_word_embeddings=False)
    write_quantised(folder, oracle, config, writer)
    for name, module in oracle.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, arguments: (rounded(arguments[0]),))
        elif name.endswith(".experts") and quantiser == "quantize_fp8":  # experts of int8 keep their activations
            module.forward = experts_that_round(module)
    expected = expected_logits(oracle, IDS)
    for got, position in zip(run_model(folder, _STEPS), [19, 20, 21, 22, 23], strict=True):
        atol = _ROUNDED_TOLERANCE * expected[position].std().item()
        torch.testing.assert_close(got[0], expected[position], rtol=0, atol=atol)
