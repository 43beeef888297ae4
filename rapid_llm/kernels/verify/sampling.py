"""Cases of the sampling family. Ids are compared exactly: the scores and the noise are defined to the bit before the last log."""

import math
from collections.abc import Sequence

import torch

from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.ops.sampling.rows import ADJUST_LOGITS, MASK_LOGITS, SAMPLE, TOP_LOGPROBS
from rapid_llm.kernels.reference import sampling as reference
from rapid_llm.kernels.verify.buffers import Stage, once_rounded
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check

# One value per row in turn; the periods share no factor, so that a sweep pairs all of them.
_TEMPERATURES = (0.7, 0.0, 1.0, 1.6, 0.3)
_TINY_TEMPERATURES = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 0.0)
_TOP_P = (1.0, 0.9, 0.5, 0.99)
_MIN_P = (0.0, 0.05, 0.0)
_NUM_TOP_LOGPROBS = (5, 0, 1, 20)


def _sample(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_seqs, vocab_size = sizes["num_seqs"], sizes["vocab_size"]
    stage = Stage(SAMPLE, sizes, dtype, device)
    top_k: Sequence[float] = (0, 50, 1, -1, 7, vocab_size, 5000)
    if hard == "mixed_top_k":
        top_k = (-1, 0, 1, 64, vocab_size, vocab_size + 1, 10**7)
    temperatures = _TINY_TEMPERATURES if hard == "tiny_temperature" else _TEMPERATURES
    arguments = {
        "logits": stage.place("logits", _logits(sizes, generator, hard)),
        "temperature": stage.place("temperature", _in_turn(temperatures, num_seqs)),
        "top_k": stage.place("top_k", _in_turn(top_k, num_seqs)),
        "top_p": stage.place("top_p", _in_turn(_TOP_P, num_seqs)),
        "min_p": stage.place("min_p", _in_turn(_MIN_P, num_seqs)),
        "seeds": stage.place("seeds", torch.randint(-(1 << 63), (1 << 63) - 1, (num_seqs,), generator=generator)),
        "positions": stage.place("positions", torch.randint(0, 1 << 20, (num_seqs,), generator=generator)),
    }
    expected = reference.sample(**arguments)
    out_ids = stage.unwritten("out_ids", (num_seqs,))
    check = Check("out_ids", lambda: out_ids, expected, rtol=0.0, atol=0.0)
    return Case(hard or "random", {**arguments, "out_ids": out_ids}, [check, *stage.guards()])


def _top_logprobs(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_seqs, vocab_size = sizes["num_seqs"], sizes["vocab_size"]
    stage = Stage(TOP_LOGPROBS, sizes, dtype, device)
    logits = stage.place("logits", _logits(sizes, generator, hard))
    tokens = torch.randint(0, vocab_size, (num_seqs,), generator=generator)
    tokens[3::4] = -1
    token_ids = stage.place("token_ids", tokens)
    n = _NUM_TOP_LOGPROBS[(num_seqs + SAMPLE.dtypes.index(str(dtype).removeprefix("torch."))) % len(_NUM_TOP_LOGPROBS)]
    expected_ids, expected_logprobs = reference.top_logprobs(logits, token_ids, n=n)
    out_ids = stage.unwritten("out_ids", (num_seqs, n + 1))
    out_logprobs = stage.unwritten("out_logprobs", (num_seqs, n + 1))
    # The log of a sum of vocab_size fp32 numbers, whose errors add up like a random walk, and an fp32 difference.
    fp32 = torch.finfo(torch.float32).eps
    checks = [
        Check("out_ids", lambda: out_ids, expected_ids, rtol=0.0, atol=0.0),
        Check("out_logprobs", lambda: out_logprobs, expected_logprobs, rtol=4 * fp32, atol=2 * fp32 * math.sqrt(vocab_size)),
    ]
    arguments = {"logits": logits, "token_ids": token_ids, "out_ids": out_ids, "out_logprobs": out_logprobs}
    return Case(hard or "random", arguments, [*checks, *stage.guards()])


def _adjust_logits(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_seqs, vocab_size, table_rows, num_edits = (sizes[name] for name in ("num_seqs", "vocab_size", "table_rows", "num_edits"))
    stage = Stage(ADJUST_LOGITS, sizes, dtype, device)
    counts = torch.randint(0, 40, (table_rows, vocab_size), generator=generator)
    counts *= torch.rand(counts.shape, generator=generator) < 0.2
    counts += (torch.rand(counts.shape, generator=generator) < 0.2).long() << 30
    # Every third row has no penalties; the others share the table in an order that is not theirs.
    rows = torch.tensor([-1 if row % 3 == 2 or not table_rows else (7 * row + 2) % table_rows for row in range(num_seqs)])
    edits = {"edit_rows": torch.zeros(0), "edit_ids": torch.zeros(0), "edit_values": torch.zeros(0)}
    if num_seqs and num_edits:
        places = torch.randperm(num_seqs * vocab_size, generator=generator)[:num_edits]
        if hard == "doubled_edits":  # a token that is raised and banned, and banned twice
            places[1::2] = places[: 2 * (num_edits // 2) : 2]
        values = _in_turn((-math.inf, 100.0, -math.inf, -99.5, -math.inf, 0.25), num_edits)
        edits = {"edit_rows": places // vocab_size, "edit_ids": places % vocab_size, "edit_values": values}
    arguments = {
        "logits": stage.place("logits", _logits(sizes, generator, hard)),
        "counts": stage.place("counts", counts),
        "count_rows": stage.place("count_rows", rows),
        "repetition": stage.place("repetition", _in_turn((1.2, 1.0, 0.5, 2.0), num_seqs)),
        "presence": stage.place("presence", _in_turn((0.5, 0.0, -2.0), num_seqs)),
        "frequency": stage.place("frequency", _in_turn((0.25, 0.0, 1.5, -2.0, 0.0), num_seqs)),
        **{name: stage.place(name, values) for name, values in edits.items()},
    }
    expected = reference.adjust_logits(**arguments)
    out = stage.unwritten("out", (num_seqs, vocab_size))
    # The largest terms are a bias of 100 and 39 times a frequency penalty of 2.
    check = Check("out", lambda: out, expected, *once_rounded(torch.float32, terms=200.0))
    return Case(hard or "random", {**arguments, "out": out}, [check, *stage.guards()])


def _mask_logits(sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None) -> Case:
    num_seqs, vocab_size, num_masks = sizes["num_seqs"], sizes["vocab_size"], sizes["num_masks"]
    stage = Stage(MASK_LOGITS, sizes, dtype, device)
    # Bits past the vocabulary are set at random as well: they say nothing.
    masks = torch.randint(-(1 << 31), 1 << 31, (num_masks, -(-vocab_size // 32)), generator=generator)
    if hard == "nothing_allowed":
        masks[::2] = 0
    # Every third row has no mask; the others share the masks in an order that is not theirs.
    rows = torch.tensor([-1 if row % 3 == 2 or not num_masks else (7 * row + 2) % num_masks for row in range(num_seqs)])
    arguments = {
        "logits": stage.place("logits", _logits(sizes, generator, hard)),
        "masks": stage.place("masks", masks),
        "mask_rows": stage.place("mask_rows", rows),
    }
    out = stage.unwritten("out", (num_seqs, vocab_size))
    check = Check("out", lambda: out, reference.mask_logits(**arguments), rtol=0.0, atol=0.0)
    return Case(hard or "random", {**arguments, "out": out}, [check, *stage.guards()])


def _in_turn(values: Sequence[float], count: int) -> torch.Tensor:
    return torch.tensor([values[row % len(values)] for row in range(count)], dtype=torch.float64)


def _logits(sizes: Sizes, generator: torch.Generator, hard: str | None) -> torch.Tensor:
    """Logits as a model gives them, with every other row (the first included) hostile in the named way."""
    num_seqs, vocab_size = sizes["num_seqs"], sizes["vocab_size"]
    logits = 4 * torch.randn(num_seqs, vocab_size, generator=generator)
    hostile = logits[::2]
    if hard == "nan_row":
        hostile[:, vocab_size // 3] = math.nan
    elif hard == "all_minus_inf":
        hostile[:] = -math.inf
    elif hard == "all_negative":
        hostile.abs_().neg_().sub_(20.0)
    elif hard == "plus_inf":
        hostile[:, vocab_size // 2] = math.inf
    elif hard == "ties":
        hostile.round_()
    elif hard == "banned_tokens":
        hostile[:, torch.randperm(vocab_size, generator=generator)[: vocab_size - 3]] = -math.inf
    elif hard == "tiny_temperature":
        hostile.mul_(15.0).clamp_(-60.0, 60.0)[:, vocab_size // 4] = -math.inf
    return logits


CASES: dict[str, CaseMaker] = {
    "sample": _sample,
    "top_logprobs": _top_logprobs,
    "adjust_logits": _adjust_logits,
    "mask_logits": _mask_logits,
}
