"""How near to one read of the logits is drawing a token, greedy or by temperature, top-k and top-p, and its log-probabilities?

    python -m benchmarks.kernels.bench_sampling [--quick] [--op OP] [--peers FOLDER]

Our rows must agree token for token: their noise hangs on seed and position alone. Peers draw with noise of their own, so each of
their tokens must be one that the rules keep. They see the logits as they are, at temperature 1, where ours divide by 0.8 too.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.cells import Cell, Skipped
from benchmarks.kernels.microbench import Bench, Check, Function, by_fallback, main
from benchmarks.kernels.peers import PREFIX
from rapid_llm.kernels.measure.workloads import Workload, variants

BATCHES = (1, 8, 64, 256)
_CHECKED_ROWS = 16  # of a peer's tokens
_RULES = {"greedy": (0, 1.0), "temperature": (0, 1.0), "top_p": (0, 0.9), "top_k_top_p": (50, 0.9)}  # top_k, top_p


def _cells() -> list[Cell]:
    cells = []
    for variant in variants("sample"):
        cells += [Cell("sample", _sizes(batch, 151_936), "float32", variant) for batch in BATCHES]
    for variant in variants("sample"):
        cells += [Cell("sample", _sizes(batch, 128_256), "bfloat16", variant) for batch in (1, 64)]
    cells += [Cell("top_logprobs", _sizes(batch, 151_936), "float32") for batch in BATCHES]
    cells += [Cell("top_logprobs", _sizes(batch, 128_256), "bfloat16") for batch in (1, 64)]
    return cells


def _sizes(batch: int, vocabulary: int) -> dict[str, int]:
    return {"num_seqs": batch, "vocab_size": vocabulary}


def _gate(cell: Cell, work: Workload) -> Check:
    exact = by_fallback(cell, work)

    def problem(arm: str, function: Function) -> str:
        if cell.op != "sample" or not arm.startswith(PREFIX):
            return exact(arm, function)
        ids = work.outputs(function)["out_ids"]
        return dropped(work.sets[0]["logits"], ids, cell.variant)

    return problem


def dropped(logits: torch.Tensor, ids: torch.Tensor, variant: str) -> str:
    """How many of the tokens the rules of ``variant`` do not keep at temperature 1; empty where all are kept.

    Peers differ in whether top_p counts before or after top_k; what either order keeps is right.
    """
    rows = logits[:_CHECKED_ROWS].double()
    drawn = ids[: len(rows)].long()
    if variant == "greedy":
        wrong = int((rows.amax(1) != rows.gather(1, drawn.clamp(0, rows.shape[1] - 1)[:, None]).view(-1)).sum())
        return f"{wrong} of {len(rows)} tokens are not the largest" if wrong else ""
    top_k, top_p = _RULES[variant]
    mass, order = rows.softmax(1).sort(1, descending=True)
    kept = torch.ones_like(mass, dtype=torch.bool)
    if top_k:
        kept[:, top_k:] = False
    if top_p < 1:
        few = torch.where(kept, mass, 0.0)
        few = few / few.sum(1, keepdim=True)
        before = [part.cumsum(1) - part for part in (few, mass)]
        kept &= (before[0] < top_p + 1e-4) | (before[1] < top_p + 1e-4)
    wrong = int((~((order == drawn[:, None]) & kept).any(1)).sum())
    return f"{wrong} of {len(rows)} tokens are not among those kept" if wrong else ""


def _draw(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The place of one of descending ``scores`` [rows, n] by top_p and exponential noise, [rows, 1]."""
    mass = scores.softmax(-1)
    if top_p < 1:
        mass = mass.masked_fill(mass.cumsum(-1) - mass >= top_p, 0.0)
    return (mass / torch.empty_like(mass).exponential_()).argmax(-1, keepdim=True)


def _sorted(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    top_k, top_p = _RULES[cell.variant]

    def call(logits: torch.Tensor) -> torch.Tensor:
        if cell.variant == "greedy":
            return logits.argmax(-1)
        if cell.variant == "temperature":
            return _draw(logits, 1.0)
        scores, order = logits.sort(-1, descending=True)
        if top_k:
            scores[:, top_k:] = float("-inf")
        return order.gather(-1, _draw(scores, top_p))

    return [lambda each=each: call(each["logits"]) for each in work.sets]


def _largest(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    top_k, top_p = _RULES[cell.variant]
    if not top_k:
        raise Skipped("it needs a top_k")

    def call(logits: torch.Tensor) -> torch.Tensor:
        scores, order = logits.topk(top_k, -1)
        return order.gather(-1, _draw(scores, top_p))

    return [lambda each=each: call(each["logits"]) for each in work.sets]


def _logprobs(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
    def call(each: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = each["logits"].float().log_softmax(-1)
        values, ids = logprobs.topk(each["out_ids"].shape[1] - 1, -1)
        given = each["token_ids"].long()[:, None]
        return torch.cat((given, ids), 1), torch.cat((logprobs.gather(1, given), values), 1)

    return [lambda each=each: call(each) for each in work.sets]


BENCH = Bench(
    name="bench_sampling",
    cells=_cells(),
    peers={"sample": {"torch_sort": _sorted, "torch_topk": _largest}, "top_logprobs": {"torch_topk": _logprobs}},
    gate=_gate,
)

if __name__ == "__main__":
    main(__doc__, BENCH)
