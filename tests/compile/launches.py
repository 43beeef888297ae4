"""Calls of native rows for compile-only runs: those of the verify cases, and plain ones of any size that nothing computes on."""

import functools
import inspect
import math
import re
import zlib

import numpy as np
import pytest
import torch

from rapid_llm.kernels.device import known_devices
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.dispatcher.ranking import missing_packages
from rapid_llm.kernels.testing.compile_only import compile_only
from rapid_llm.kernels.verify.runner import case_maker

NATIVE_ROWS = [row for row in catalog().all_rows() if "triton" in row.requires.packages]
_SHARE = {"bfloat16": slice(None), "float16": slice(1, None, 3), "float32": slice(2, None, 3)}
MOE_GROUPS = (("fused_moe_fp8", 0), ("fused_moe_w8a16", 0), ("fused_moe_w4a16", 128))  # and the group of their defaults
# By op or by row, paths of a kernel that its contract's sweep is too small for: a row wider than a tile, the widest tiles of a
# product; of the Gluon row, whose kernel takes dense rows only, every page size.
BEYOND_THE_SWEEP = {
    "gluon.flashattention2_nopad": tuple({"page_size": size} for size in (8, 16, 32, 64, 128)),
    "rms_norm": ({"d": 20_480},),
    "add_rms_norm": ({"d": 20_480},),
    "w8a16_gemm": ({"num_tokens": 4096}, {"num_tokens": 4096, "group": 128}, {"num_tokens": 64, "group": 1024}),
    "quantize_fp8": (
        {"group": 128},
        {"num_tokens": 65_540, "k": 128, "group": 128},
        {"num_tokens": 65_536, "k": 20_480, "group": 20_480},
    ),
    "quantize_int8": ({"num_tokens": 65_540, "k": 128}, {"num_tokens": 65_536, "k": 20_480}),
    "add_rms_norm_fp8": ({"d": 20_480, "group": 20_480}, {"d": 20_480, "group": 128}, {"num_tokens": 65_536, "group": 128}),
    "swiglu_fp8": ({"d": 20_480, "group": 20_480}, {"num_tokens": 65_536, "d": 128, "group": 128}),
    "fp8_gemm": ({"num_tokens": 4096}, {"num_tokens": 4096, "group": 128}, {"num_tokens": 16, "group": 128}),
    "int8_gemm": ({"num_tokens": 4096}, {"num_tokens": 16}),
    "w4a16_gemm": ({"num_tokens": 4096}, {"num_tokens": 4096, "group": 4096}, {"num_tokens": 64, "group": 1024}),
    "nvfp4_gemm": ({"num_tokens": 16, "n": 14_336}, {"num_tokens": 64, "n": 14_336}, {"num_tokens": 4096}),
    "mxfp4_gemm": ({"num_tokens": 16, "n": 14_336}, {"num_tokens": 64, "n": 14_336}, {"num_tokens": 4096}),
    **{op: ({"num_tokens": 4096},) for op in ("fused_moe", "fused_moe_mxfp4")},
    **{op: ({"num_tokens": 512}, {"num_tokens": 4096, "group": 128 - group}) for op, group in MOE_GROUPS},
}
SCALARS = {"eps": 1e-6, "sm_scale": 0.125}

each_native_row = pytest.mark.parametrize("row", NATIVE_ROWS, ids=lambda row: row.name)


def why_not_compiled(row, device):
    """Why the row is compiled for no such device, or not by the Triton that is installed; "" where it is."""
    unmet = row.requires.unmet(device) + missing_packages(row)
    if device.name not in catalog().contract(row.op).devices:
        unmet.append(f"{row.op} is not made for {device.name}")
    return "; ".join(unmet)


def counts_of(row):
    """Names of the sizes of the row's op that change from step to step."""
    contract = catalog().contract(row.op)
    names = ("num_tokens", "num_seqs", "num_updates", *(["q_len"] if contract.phase == "prefill" else []))
    return [name for name in names if name in contract.defaults]


def compiled_sweep(row, device, dtype, every=1):
    """The record of the row run over its contract's sweep, in the views and values of the verify cases.

    bfloat16 is what models run in and takes the whole sweep; float16, which compiles to the same but for conversions, and
    float32 take every third point of it, other ones each. Of those, every ``every``-th is compiled, other ones for each device.
    """
    contract = catalog().contract(row.op)
    sweep = [sizes for sizes in contract.sweep[_SHARE[dtype]] if row.allows(sizes)]
    with compile_only(device) as record:
        for sizes in _share_of(sweep, device, every):
            load_target(row)(**_case_arguments(row.op, dtype, tuple(sizes.items())))
        beyond = (*BEYOND_THE_SWEEP.get(row.op, ()), *BEYOND_THE_SWEEP.get(row.name, ()))
        for sizes in _share_of(beyond, device, every):
            load_target(row)(**plain_arguments(row, contract, {**contract.defaults, **sizes}, dtype))
        for sizes in sweep:  # the share may have been of points without work, which launch nothing
            if record.launches:
                break
            load_target(row)(**_case_arguments(row.op, dtype, tuple(sizes.items())))
    return record


def _share_of(points, device, every):
    return points[known_devices().index(device.name) % every :: every] or points[:1]


@functools.lru_cache(maxsize=64)
def _case_arguments(op, dtype, sizes):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{op} {dtype} {sizes}".encode()))
    return case_maker(catalog(), op)(dict(sizes), getattr(torch, dtype), torch.device("cpu"), generator, None).arguments


def compiled_call(row, device, dtype, **sizes):
    """The launches of one call of the row on dense tensors of its contract's default sizes, but for those given."""
    contract = catalog().contract(row.op)
    with compile_only(device) as record:
        load_target(row)(**plain_arguments(row, contract, {**contract.defaults, **sizes}, dtype))
    return record.launches


def plain_arguments(row, contract, sizes, dtype):
    """Arguments of these sizes: dense tensors of zeros, which take memory only where they are touched."""
    tensors = {arg.name: arg for arg in contract.tensors}
    sizes = {**_implied(sizes), **sizes}
    arguments = {}
    for name, parameter in inspect.signature(load_target(row)).parameters.items():
        if name in tensors:
            shape = [_evaluate(dim, sizes) for dim in tensors[name].dims]
            kind = tensors[name].dtype
            arguments[name] = _zeros(shape, getattr(torch, dtype if kind == "compute" else kind))
        elif name in sizes:
            arguments[name] = sizes[name]
        elif name in SCALARS:
            arguments[name] = SCALARS[name]
        else:
            assert parameter.default is not inspect.Parameter.empty, (
                f"{row.name}: no value is known for {name}; add it to SCALARS"
            )
    return arguments


def _zeros(shape, dtype):
    """Zeros whose pages take no memory until they are touched: torch's own touch them."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def _implied(sizes):
    """Sizes that a contract's dims name and its sweep leaves to the case maker."""
    implied = {"n": 20, "max_positions": 4096, "num_table_rows": 256, "num_columns": 64, "max_seqlen_q": sizes.get("q_len")}
    if "intermediate_size" in sizes:
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        group, square = sizes.get("group", 32), 128 if sizes.get("group") else 1
        implied |= {"half_hidden": hidden // 2, "half_inner": inner // 2}
        implied |= {"hidden_groups": -(-hidden // (group or hidden)), "inner_groups": -(-inner // (group or inner))}
        implied |= {"gate_up_scale_rows": -(-2 * inner // square), "down_scale_rows": -(-hidden // square)}
    elif "group" in sizes:
        implied |= {"groups": _width(sizes) // sizes["group"]}
    if "k" in sizes:
        implied |= {"half_k": sizes["k"] // 2, "groups_of_16": sizes["k"] // 16, "groups_of_32": sizes["k"] // 32}
    if "vocab_size" in sizes:
        implied |= {"vocab_words": -(-sizes["vocab_size"] // 32)}
    if "kv_len" in sizes:
        columns = -(-sizes["kv_len"] // sizes["page_size"])
        implied |= {"num_columns": columns, "num_rows": (sizes["num_seqs"] * columns + 1) * sizes["page_size"]}
        implied["num_tokens"] = sizes["num_seqs"] * sizes["q_len"]
    return implied


def _width(sizes):
    """Elements of a row that is quantised."""
    return sizes["k"] if "k" in sizes else sizes["d"]


def _evaluate(dim, sizes):
    """The value of a dim such as "d", "2*d", "num_seqs+1" or "1"."""
    terms = re.split(r"([*+])", dim)
    values = [int(term) if term.isdigit() else sizes[term] for term in terms[::2]]
    value = values[0]
    for sign, other in zip(terms[1::2], values[1:], strict=True):
        value = value * other if sign == "*" else value + other
    return value
