"""Other implementations of the ops: those run beside ours from a folder of peers, and the times recorded of them once.

A folder of peers holds ``common.py``, whose REGISTRY maps an op to {name: factory(case, sets)}, and ``suite_*.py``, which fill
it. Their cases and sets have names of their own; this module puts our cells and arguments into them, so that both see one memory.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cells import Cell, Skipped
from rapid_llm.kernels.measure.workloads import Workload
from rapid_llm.kernels.ops.interfaces import Sizes

Peer = Callable[[Cell, Workload], list[Callable[[], Any]]]
"""Prepares (untimed) and gives one call for each set of buffers; what a call returns ``deliver`` knows how to compare."""

RECORDED = Path(__file__).parent / "peers_recorded.json"
PREFIX = "peer:"
SAME_AS_ROW = {"torch_cublas": "cublas.dense_gemm"}
"""Peers that are a row of ours, which stands for them."""

_SUITES = ("suite_elementwise", "suite_kv_sampling", "suite_gemm", "suite_decode", "suite_prefill")
_DIM = 128  # of every head in their cases
_MODES = {"greedy": ("greedy", 0, 1.0), "top_k_top_p": ("topk_topp", 50, 0.9), "top_p": ("topp", 0, 0.9)}
_GEMMS = {"gemm_fp8": ("fp8_gemm", 0), "gemm_int4": ("w4a16_gemm", 128), "gemm_int8w": ("w8a16_gemm", 0)}  # theirs: ours, group
QWEN3_EXPERTS = {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768}
_ROUTED_FREE = 4096  # tokens from which on the routing in their times is under a hundredth of them; ours is an op of its own
_OWN_POOL = "vllm_cuda_split_pool"  # writes to a pool of another layout, which nobody here could check
_COMPILED = ("compile", "flex", "inductor")  # arms whose compilation takes longer than everything else together


# --- times recorded once ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The fastest peer of a cell.

    Attributes:
        us: its time, at this run's ceilings.
        text: which it is, and where the time is from.
    """

    us: float
    text: str


def best_peer(cell: Cell, arms: Mapping[str, float], floor_us: float, recorded: Mapping[str, Any] | None = None) -> Best | None:
    """The smallest of this run's peers and of the recorded time, scaled by this run's floor over the recorded one.

    Args:
        arms: microseconds of this run by arm; those of rows of ours count only where the row is a peer.
        floor_us: of the cell in this run.
        recorded: the cell's entry of the table; None looks it up.
    Returns: None where nothing is known.
    """
    ours = {row: name for name, row in SAME_AS_ROW.items()}
    times = {
        ours.get(name, name.removeprefix(PREFIX)): us for name, us in arms.items() if name.startswith(PREFIX) or name in ours
    }
    found = [Best(us, f"{name} in this run") for name, us in times.items()]
    entry = recorded if recorded is not None else recorded_cell(cell)
    if entry is not None:
        missing = "" if entry["arm"] in times else ", not in this run"
        text = f"{entry['arm']} recorded at {entry['us']:.2f} us over a floor of {entry['floor_us']:.2f}{missing}"
        found.append(Best(entry["us"] * floor_us / entry["floor_us"], text))
    return min(found, key=lambda best: best.us, default=None)


def recorded_cell(cell: Cell) -> Mapping[str, Any] | None:
    """The recorded entry of a cell."""
    return _by_cell().get(_key(cell))


def recorded_cells() -> list[Cell]:
    """Every cell of the recorded table."""
    return [Cell(entry["op"], entry["sizes"], entry["dtype"], entry["variant"]) for entry in _table()["cells"]]


@cache
def _table() -> dict[str, Any]:
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {"cells": []}


@cache
def _by_cell() -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {_key(cell): entry for cell, entry in zip(recorded_cells(), _table()["cells"], strict=True)}


def _key(cell: Cell) -> tuple[Any, ...]:
    return cell.op, tuple(sorted(cell.sizes.items())), cell.dtype, cell.variant


# --- their cases and ours -----------------------------------------------------------------------------------------------------


def our_cell(op: str, case: Mapping[str, Any]) -> Cell | None:
    """The cell that a case of theirs is; None where we have no such op."""
    if op in ("rmsnorm", "add_rmsnorm"):
        return Cell(
            {"rmsnorm": "rms_norm", "add_rmsnorm": "add_rms_norm"}[op], {"num_tokens": case["tokens"], "d": case["hidden"]}
        )
    if op == "swiglu":
        return Cell("swiglu", {"num_tokens": case["tokens"], "d": case["ffn"]})
    if op == "rope":
        heads = {"num_heads": case["hq"], "num_kv_heads": case["hk"], "head_dim": _DIM, "rotary_dim": _DIM}
        return Cell("rope", {"num_tokens": case["tokens"], **heads})
    if op == "kv_scatter":
        sizes = {"num_tokens": case["tokens"], "num_kv_heads": case["hk"], "head_dim": _DIM, "num_rows": 65_536}
        return Cell("update_kv_buffer", sizes, variant="scattered")
    if op == "gemm_bf16":
        return Cell("dense_gemm", {"num_tokens": case["M"], "n": case["N"], "k": case["K"]})
    if op in _GEMMS and case["proj"] != "lm_head":  # no head is quantised here
        ours, group = _GEMMS[op]
        sizes = {"num_tokens": case["M"], "n": case["N"], "k": case["K"], "group": group or case["K"]}
        return Cell(ours, sizes)
    if op == "moe" and case["tokens"] >= _ROUTED_FREE:
        return Cell("fused_moe", {"num_tokens": case["tokens"], **QWEN3_EXPERTS})
    if op == "sampling":
        variant = next(name for name, mode in _MODES.items() if mode[0] == case["mode"])
        return Cell("sample", {"num_seqs": case["B"], "vocab_size": case["V"]}, "float32", variant)
    if op == "decode" and case["kv"] == "bf16":
        return Cell("flash_decoding", attention_sizes(case["hq"], case["hk"], _DIM, case["B"], 1, case["ctx"], case["page"]))
    if op == "prefill":
        return Cell("flashattention2_nopad", attention_sizes(case["hq"], case["hk"], _DIM, case["n"], case["S"], case["S"]))
    if op == "prefill_cached":
        keys = case["new"] + case["prefix"]
        return Cell("flashattention2_nopad", attention_sizes(case["hq"], case["hk"], _DIM, case["n"], case["new"], keys))
    return None


def attention_sizes(heads: int, kv_heads: int, dim: int, seqs: int, q_len: int, kv_len: int, page_size: int = 16) -> Sizes:
    """Sizes of an attention op."""
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "page_size": page_size,
        "num_seqs": seqs,
        "q_len": q_len,
        "kv_len": kv_len,
    }


def their_case(cell: Cell) -> tuple[str, dict[str, Any]]:
    """Their op and case of a cell. Raises: Skipped where they have none."""
    s = cell.sizes
    if cell.dtype != ("float32" if cell.op == "sample" else "bfloat16"):
        raise Skipped(f"its cases of this op are not {cell.dtype}")
    if s.get("head_dim", _DIM) != _DIM:
        raise Skipped(f"its heads are {_DIM} wide")
    heads = {"hq": s.get("num_heads"), "hk": s.get("num_kv_heads")}
    if cell.op in ("rms_norm", "add_rms_norm"):
        return cell.op.replace("rms_norm", "rmsnorm"), {"tokens": s["num_tokens"], "hidden": s["d"]}
    if cell.op == "swiglu":
        return "swiglu", {"tokens": s["num_tokens"], "ffn": s["d"]}
    if cell.op == "rope":
        return "rope", {"tokens": s["num_tokens"], **heads}
    if cell.op == "update_kv_buffer":
        return "kv_scatter", {"tokens": s["num_tokens"], "hk": s["num_kv_heads"]}
    if cell.op == "dense_gemm":
        return "gemm_bf16", {"proj": "", "N": s["n"], "K": s["k"], "M": s["num_tokens"]}
    if cell.op == "fused_moe" and s["num_tokens"] >= _ROUTED_FREE:
        return "moe", {"tokens": s["num_tokens"]}
    for theirs, (ours, group) in _GEMMS.items():
        if cell.op == ours and s["group"] == (group or s["k"]):
            return theirs, {"proj": "", "N": s["n"], "K": s["k"], "M": s["num_tokens"]}
    if cell.op == "sample" and cell.variant in _MODES:
        mode, k, p = _MODES[cell.variant]
        return "sampling", {"B": s["num_seqs"], "V": s["vocab_size"], "mode": mode, "k": k, "p": p}
    if cell.op == "flash_decoding" and s["kv_len"] % s["page_size"] == 0:
        return "decode", {**heads, "B": s["num_seqs"], "ctx": s["kv_len"], "page": s["page_size"], "kv": "bf16"}
    if cell.op == "flashattention2_nopad" and s["q_len"] == s["kv_len"]:
        return "prefill", {**heads, "n": s["num_seqs"], "S": s["q_len"]}
    if cell.op == "flashattention2_nopad" and s["page_size"] == 16 and s["kv_len"] % 16 == 0:
        return "prefill_cached", {**heads, "n": s["num_seqs"], "new": s["q_len"], "prefix": s["kv_len"] - s["q_len"]}
    raise Skipped("it has no such case")


def combined(k_pool: torch.Tensor, heads: int) -> torch.Tensor:
    """The buffer [rows, 2 * heads, dim] whose halves a K and a V pool are."""
    rows, _, dim = k_pool.shape
    return k_pool.as_strided((rows, 2 * heads, dim), (2 * heads * dim, dim, 1))


def packed_keys(arguments: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all sequences out of their pages, [num_seqs * kv_len, num_kv_heads, head_dim]; of whole pages only."""
    page, table = arguments["page_size"], _table_of(arguments).long()
    slots = (table[..., None] * page + torch.arange(page, device=table.device)).flatten(1)
    slots = slots[:, : int(arguments["seq_lens"][0])].reshape(-1)
    return arguments["k_pool"].index_select(0, slots), arguments["v_pool"].index_select(0, slots)


def _table_of(arguments: Mapping[str, Any]) -> torch.Tensor:
    """The rows of the page table in the order of the sequences."""
    return arguments["page_table"].index_select(0, arguments["table_rows"])


def _their_set(cell: Cell, op: str, a: Mapping[str, Any]) -> dict[str, Any]:
    """Our arguments under their names; copies only where they hold packed tensors."""
    if op in ("rmsnorm", "add_rmsnorm"):
        return {"x": a["x"], "w": a["weight"]} | ({"r": a["residual"]} if op == "add_rmsnorm" else {})
    if op == "swiglu":
        return {"x": a["gate_up"]}
    if op == "rope":
        return {"q": a["q"].contiguous(), "k": a["k"].contiguous(), "cs": a["cos_sin"], "pos": a["positions"].long()}
    if op == "kv_scatter":
        rows, pool = a["slot_mapping"], combined(a["k_pool"], cell.sizes["num_kv_heads"])
        return {"k": a["k"].contiguous(), "v": a["v"].contiguous(), "rows": rows, "rows64": rows.long(), "pool": pool}
    if op == "gemm_bf16":
        return {"x": a["x"], "w": a["weight"]}
    if op == "gemm_fp8":
        return {"x": _scaled(a["x"], a["x_scales"]), "w": _scaled(a["weight"], a["weight_scales"])}
    if op == "gemm_int4":
        codes = torch.stack((a["weight"] & 15, a["weight"] >> 4), 2).flatten(1)
        return {"x": a["x"], "w": codes, "q": (codes, a["scales"])}
    if op == "gemm_int8w":
        return {"x": a["x"], "w": a["weight"], "q": (a["weight"], a["scales"].view(-1, 1).to(torch.bfloat16))}
    if op == "sampling":
        return {"logits": a["logits"]}
    if op == "prefill":
        k, v = packed_keys(a)
        return {"q": a["q"], "k": k, "v": v}
    return {"q": a["q"], "q8": None, "pool": combined(a["k_pool"], cell.sizes["num_kv_heads"]), "pages": _table_of(a)}


def _scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of e4m3 codes with a scale a row, which their quantiser brings back."""
    return (codes.float() * scales.view(-1, 1)).to(torch.bfloat16)


# --- their factories as our arms ----------------------------------------------------------------------------------------------


def load_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """The registry of a folder of peers, all of its suites imported. Raises: ImportError where it is no such folder."""
    sys.path.insert(0, str(folder.resolve()))
    registry = importlib.import_module("common").REGISTRY
    for suite in _SUITES:
        importlib.import_module(suite)
    return registry


def peers_of(registry: Mapping[str, Mapping[str, Any]], cell: Cell, *, compiled: bool) -> dict[str, Peer]:
    """The peers of a registry that have a case like this cell, by name."""
    try:
        op, case = their_case(cell)
    except Skipped:
        return {}
    if op == "moe":  # on weights and routes of their own, which nobody here could check
        return {}
    names = [name for name in registry.get(op, {}) if name not in SAME_AS_ROW and name != _OWN_POOL]
    return {
        name: _peer(registry[op][name], op, case) for name in names if compiled or not any(word in name for word in _COMPILED)
    }


def _peer(factory: Callable[..., Any], op: str, case: Mapping[str, Any]) -> Peer:
    def prepare(cell: Cell, work: Workload) -> list[Callable[[], Any]]:
        try:
            return list(factory(case, [_their_set(cell, op, arguments) for arguments in work.sets]))
        except Exception as error:
            if type(error).__name__ == "Skip":  # their class, of a module that is known only once it is imported
                raise Skipped(str(error)) from None
            raise

    return prepare


class Kept:
    """A call whose result stays alive until its next one.

    Results of consecutive calls then lie in different memory, as our ``out`` tensors do; freed at once, each would be written
    into the last one's place, which the cache still holds.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None

    def __call__(self) -> Any:
        """Call, and keep what came."""
        self._result = self._call()
        return self._result


_WRITING = ("update_kv_buffer", "update_kv_index", "rope_kv_write", "qk_norm_rope_kv_write")
"""Ops whose peers write to the pool themselves."""


def deliver(op: str, arguments: Mapping[str, Any], result: Any) -> None:
    """Put what a peer returned where the op's rows write it, so that one check serves both."""
    if op == "rope":
        arguments["q"].copy_(result[0].reshape(arguments["q"].shape))
        arguments["k"].copy_(result[1].reshape(arguments["k"].shape))
    elif op == "add_rms_norm":
        arguments["out"].copy_(result[0])
        arguments["residual"].copy_(result[1])
    elif op == "sample":
        arguments["out_ids"].copy_((result[0] if isinstance(result, tuple) else result).view(-1))
    elif op == "top_logprobs":
        arguments["out_ids"].copy_(result[0])
        arguments["out_logprobs"].copy_(result[1])
    elif op not in _WRITING:
        arguments["out"].copy_(result.reshape(arguments["out"].shape))
