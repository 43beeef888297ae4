"""Calls of real sizes: tensors as an engine holds them, in as many sets as keep a cache from helping."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.measure.timer import Call, sets_for
from rapid_llm.kernels.ops.interfaces import Sizes

Arguments = dict[str, Any]

_SEED = 20_261_129
_WIPED = -7  # no token's id
_TOLERANCE = {"float32": 2e-4, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative error (of norms) that two right results of sums in another order keep well within."""
_ROUNDED = {"fused_moe_fp8": 3e-2}
"""The same for ops that round to e4m3 on their way, where a difference may send a number to its other neighbour."""


@dataclass(frozen=True)
class Workload:
    """One op at one set of sizes.

    Attributes:
        op, dtype, sizes, variant: what is called; ``variant`` names values that sizes do not tell (how to sample).
        sets: arguments of the call, one mapping for each set of buffers.
        set_bytes: what the tensors of one set take.
    """

    op: str
    dtype: str
    sizes: Sizes
    variant: str
    sets: tuple[Arguments, ...]
    set_bytes: int
    pristine: Mapping[tuple[int, str], torch.Tensor]

    def calls(self, function: Callable[..., Any]) -> list[Call]:
        """The call on each set."""
        return [lambda arguments=arguments: function(**arguments) for arguments in self.sets]  # type: ignore[misc]

    def reset(self) -> None:
        """Bring tensors that the op reads and writes back to what they were."""
        for (number, name), values in self.pristine.items():
            self.sets[number][name].copy_(values)

    def outputs(self, function: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """What the call leaves in the tensors it writes, on the first set, which is as it was afterwards."""
        self.reset()  # a timed run before this one may have left its results
        arguments, names = self.sets[0], _written(self.op)
        pools = {name: arguments[name].clone() for name in names if (0, name) not in self.pristine}
        for name in pools:
            arguments[name].fill_(_WIPED)  # what a call before this one left there must not pass for its own
        function(**arguments)
        results = {name: arguments[name].clone() for name in names}
        self.reset()
        for name, values in pools.items():
            arguments[name].copy_(values)
        return results

    def difference(self, function: Callable[..., Any], expected: Mapping[str, torch.Tensor]) -> str:
        """Why the call's results are not ``expected``; empty where they are."""
        for name, result in self.outputs(function).items():
            wanted = expected[name]
            if not result.is_floating_point():
                if not torch.equal(result, wanted):
                    return f"{name}: {int((result != wanted).sum())} of {result.numel()} values differ"
                continue
            error = (result.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
            allowed = _ROUNDED.get(self.op, _TOLERANCE[self.dtype])
            if not float(error) <= allowed:
                return f"{name}: relative error {float(error):.2e}, at most {allowed:.0e}"
        return ""


def workload(
    op: str, sizes: Sizes, dtype: str, *, variant: str = "", device: str = "cuda", max_sets: int | None = None
) -> Workload:
    """Make the tensors of one call.

    Args:
        op, sizes: by the op's contract, all of its sizes.
        dtype: compute dtype, as torch names it.
        variant: of ``variants(op)``; "" is the first.
        max_sets: fewer sets than the cache asks for (1 where nothing is timed).
    Raises: ConfigError on an op without a maker here.
    """
    if op not in _MAKERS:
        raise ConfigError("this op has no workload", got=op, wanted=", ".join(_MAKERS), change="add it to measure/workloads.py")
    contract = catalog().contract(op)
    cost = contract.cost(sizes, getattr(torch, dtype).itemsize)
    count = min(sets_for(cost.read + cost.written), max_sets or 1 << 30)
    make = _Maker(torch.device(device), getattr(torch, dtype), count, variant or variants(op)[0])
    sets = tuple(_MAKERS[op](make, dict(sizes)))
    read_and_written = [
        name
        for name in _written(op)
        if name not in ("out", "scales", "out_ids", "out_weights", "out_logprobs", "k_pool", "v_pool", "page_table")
    ]
    pristine = {(number, name): entry[name].clone() for number, entry in enumerate(sets) for name in read_and_written}
    return Workload(op, dtype, dict(sizes), make.variant, sets, cost.read + cost.written, pristine)


def variants(op: str) -> tuple[str, ...]:
    """Names of the kinds of values that an op's time depends on beside its sizes."""
    return ("greedy", "temperature", "top_p", "top_k_top_p") if op == "sample" else ("",)


def _written(op: str) -> list[str]:
    return [tensor.name for tensor in catalog().contract(op).tensors if tensor.written]


class _Maker:
    """Random tensors of one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, count: int, variant: str) -> None:
        self.device, self.dtype, self.count, self.variant = device, dtype, count, variant
        self.generator = torch.Generator(device).manual_seed(_SEED)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(generator=self.generator).mul_(scale)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def bytes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=self.generator, device=self.device, dtype=torch.uint8)

    def scales(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).abs_().add_(0.5).mul_(0.01)

    def e4m3(self, *shape: int) -> torch.Tensor:
        return (self.bytes(*shape) % 16 + 48).view(torch.float8_e4m3fn)  # 0.5 to 1.875

    def ids(self, count: int, high: int) -> torch.Tensor:
        return torch.randint(0, max(high, 1), (count,), generator=self.generator, device=self.device, dtype=torch.int32)

    def shuffled(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device).to(torch.int32)

    def full(self, count: int, value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=self.device)


def _swiglu(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, d = s["num_tokens"], s["d"]
    return [{"gate_up": make.normal(tokens, 2 * d), "out": make.empty(tokens, d)} for _ in range(make.count)]


def _rms_norm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, d = s["num_tokens"], s["d"]
    weight = make.normal(d)
    return [{"x": make.normal(tokens, d), "weight": weight, "out": make.empty(tokens, d), "eps": 1e-6} for _ in range(make.count)]


def _add_rms_norm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    shape = (s["num_tokens"], s["d"])
    return [entry | {"residual": make.normal(*shape)} for entry in _rms_norm(make, s)]


def _rope(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, heads, kv_heads, dim = s["num_tokens"], s["num_heads"], s["num_kv_heads"], s["head_dim"]
    angles = torch.rand(8192, s["rotary_dim"] // 2, generator=make.generator, device=make.device)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    sets = []
    for _ in range(make.count):
        projected = make.normal(tokens, heads + 2 * kv_heads, dim)  # q and k as they leave the fused projection
        q, k = projected[:, :heads], projected[:, heads : heads + kv_heads]
        sets.append({"q": q, "k": k, "positions": make.ids(tokens, 8192), "cos_sin": table})
    return sets


def _rope_kv_write(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, heads, kv_heads, dim, rows = s["num_tokens"], s["num_heads"], s["num_kv_heads"], s["head_dim"], s["num_rows"]
    angles = torch.rand(8192, dim // 2, generator=make.generator, device=make.device)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    pool = make.empty(rows, 2 * kv_heads, dim).zero_()
    sets = []
    for _ in range(make.count):
        projected = make.normal(tokens, heads + 2 * kv_heads, dim)
        sets.append(
            {
                "q": projected[:, :heads],
                "k": projected[:, heads : heads + kv_heads],
                "v": projected[:, heads + kv_heads :],
                "positions": make.ids(tokens, 8192),
                "cos_sin": table,
                "slot_mapping": make.shuffled(rows)[:tokens].clone(),
                "k_pool": pool[:, :kv_heads],
                "v_pool": pool[:, kv_heads:],
            }
        )
    return sets


def _qk_norm_rope_kv_write(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    norms = {"q_weight": make.normal(s["head_dim"]), "k_weight": make.normal(s["head_dim"]), "eps": 1e-6}
    return [entry | norms for entry in _rope_kv_write(make, s)]


def _vocab_embedding(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    weight = make.normal(s["vocab_size"], s["hidden_size"])
    return [
        {
            "ids": make.ids(s["num_tokens"], s["vocab_size"]),
            "weight": weight,
            "out": make.empty(s["num_tokens"], s["hidden_size"]),
        }
        for _ in range(make.count)
    ]


def _gather_columns(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    order = torch.randperm(s["k"], generator=make.generator, device=make.device).to(torch.int32)
    return [
        {"x": make.normal(s["num_tokens"], s["k"]), "order": order, "out": make.empty(s["num_tokens"], s["k"])}
        for _ in range(make.count)
    ]


def _dense_gemm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, n, k = s["num_tokens"], s["n"], s["k"]
    return [
        {"x": make.normal(tokens, k), "weight": make.normal(n, k, scale=k**-0.5), "out": make.empty(tokens, n)}
        for _ in range(make.count)
    ]


def _w8a16_gemm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, n, k = s["num_tokens"], s["n"], s["k"]
    return [
        {
            "x": make.normal(tokens, k),
            "weight": make.bytes(n, k).view(torch.int8),
            "scales": make.scales(n, _groups(s)).float(),
            "out": make.empty(tokens, n),
        }
        for _ in range(make.count)
    ]


def _w4a16_gemm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, n, k = s["num_tokens"], s["n"], s["k"]
    return [
        {
            "x": make.normal(tokens, k),
            "weight": make.bytes(n, k // 2),
            "scales": make.scales(n, _groups(s)),
            "zeros": make.empty(n, _groups(s), dtype=torch.uint8).fill_(8),  # as peers have it, who take codes less 8
            "out": make.empty(tokens, n),
        }
        for _ in range(make.count)
    ]


def _nvfp4_gemm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    n, groups = s["n"], s["k"] // 16
    scales = {"global_scales": make.scales(n).float()}
    return [{**entry, **scales, "scales": make.e4m3(n, groups)} for entry in _fp4_products(make, s)]


def _mxfp4_gemm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    return [{**entry, "scales": make.bytes(s["n"], s["k"] // 32) % 8 + 116} for entry in _fp4_products(make, s)]


def _fp4_products(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, n, k = s["num_tokens"], s["n"], s["k"]
    return [
        {"x": make.normal(tokens, k), "weight": make.bytes(n, k // 2), "out": make.empty(tokens, n)} for _ in range(make.count)
    ]


def _quantize_nvfp4(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, k = s["num_tokens"], s["k"]
    return [
        {
            "x": make.normal(tokens, k),
            "global_scale": make.full(1, 2.0**-8, torch.float32),
            "out": make.empty(tokens, k // 2, dtype=torch.uint8),
            "scales": make.empty(tokens, k // 16, dtype=torch.float8_e4m3fn),
        }
        for _ in range(make.count)
    ]


def _groups(s: dict[str, int]) -> int:
    """Scales of an output: one where the group does not divide k."""
    return 1 if s["k"] % s["group"] else s["k"] // s["group"]


def _route_experts(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, experts, top_k = s["num_tokens"], s["num_experts"], s["top_k"]
    return [
        {
            "logits": make.normal(tokens, experts),
            "out_ids": make.empty(tokens, top_k, dtype=torch.int32),
            "out_weights": make.empty(tokens, top_k, dtype=torch.float32),
        }
        for _ in range(make.count)
    ]


def _moe(make: _Maker, s: dict[str, int], experts: Arguments) -> list[Arguments]:
    """Calls of the same experts, who are many: each set has tokens of its own that go to others of them."""
    tokens, top_k = s["num_tokens"], s["top_k"]
    sets = []
    for _ in range(make.count):
        draws = torch.rand(tokens, s["num_experts"], generator=make.generator, device=make.device)
        chosen = draws.topk(top_k, dim=1)
        sets.append(
            {
                "x": make.normal(tokens, s["hidden_size"]),
                **experts,
                "ids": chosen.indices.to(torch.int32),
                "weights": chosen.values / chosen.values.sum(1, keepdim=True),
                "out": make.empty(tokens, s["hidden_size"]),
            }
        )
    return sets


def _moe_shapes(s: dict[str, int]) -> dict[str, tuple[int, int, int]]:
    """[experts, n, k] of both weights."""
    experts, hidden, inner = s["num_experts"], s["hidden_size"], s["intermediate_size"]
    return {"gate_up": (experts, 2 * inner, hidden), "down": (experts, hidden, inner)}


def _moe_groups(k: int, group: int) -> int:
    """Scales of an output: one where there is no group or it does not divide k."""
    return 1 if not group or k % group else k // group


def _fused_moe(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    return _moe(make, s, {name: make.normal(*shape, scale=shape[2] ** -0.5) for name, shape in _moe_shapes(s).items()})


def _fused_moe_fp8(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    experts: Arguments = {}
    for name, (count, n, k) in _moe_shapes(s).items():
        experts[name] = (make.bytes(count, n, k) & 0xBF).view(torch.float8_e4m3fn)  # no NaN
        kept = (count, -(-n // 128), -(-k // 128)) if s["group"] else (count, n)
        experts[f"{name}_scales"] = make.scales(*kept).float() * 4
    return _moe(make, s, experts)


def _fused_moe_w8a16(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    experts: Arguments = {}
    for name, (count, n, k) in _moe_shapes(s).items():
        experts[name] = make.bytes(count, n, k).view(torch.int8)
        experts[f"{name}_scales"] = make.scales(count, n, _moe_groups(k, s["group"])).float() / 32
    return _moe(make, s, experts)


def _fused_moe_w4a16(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    experts: Arguments = {}
    for name, (count, n, k) in _moe_shapes(s).items():
        groups = _moe_groups(k, s["group"])
        experts[name] = make.bytes(count, n, k // 2)
        experts[f"{name}_scales"] = make.scales(count, n, groups)
        experts[f"{name}_zeros"] = make.bytes(count, n, groups) & 15
    return _moe(make, s, experts)


def _fused_moe_mxfp4(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    experts: Arguments = {}
    for name, (count, n, k) in _moe_shapes(s).items():
        experts[name] = make.bytes(count, n, k // 2)
        experts[f"{name}_scales"] = make.bytes(count, n, -(-k // 32)) % 3 + 120
    return _moe(make, s, experts)


def _quantize_fp8(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    return [
        {"x": make.normal(s["num_tokens"], s["k"]), **_e4m3_out(make, s["num_tokens"], s["k"], s["group"])}
        for _ in range(make.count)
    ]


def _e4m3_out(make: _Maker, tokens: int, width: int, group: int) -> Arguments:
    """What a quantiser writes."""
    scales = make.empty(tokens, -(-width // group), dtype=torch.float32)
    return {"out": make.empty(tokens, width, dtype=torch.float8_e4m3fn), "scales": scales if group < width else scales[:, 0]}


def _add_rms_norm_fp8(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    return [entry | _e4m3_out(make, s["num_tokens"], s["d"], s["group"]) for entry in _add_rms_norm(make, s)]


def _swiglu_fp8(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, d = s["num_tokens"], s["d"]
    return [{"gate_up": make.normal(tokens, 2 * d), **_e4m3_out(make, tokens, d, s["group"])} for _ in range(make.count)]


def _fp8_gemm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, n, k, group = s["num_tokens"], s["n"], s["k"], s["group"]
    scales: dict[str, tuple[int, ...]] = {"x_scales": (tokens,), "weight_scales": (n,)}
    if group < k:
        scales = {"x_scales": (tokens, -(-k // group)), "weight_scales": (-(-n // group), -(-k // group))}
    return [
        {
            name: make.normal(rows, k, scale=50.0).clamp_(-448, 448).to(torch.float8_e4m3fn)
            for name, rows in (("x", tokens), ("weight", n))
        }
        | {name: make.scales(*shape).float() for name, shape in scales.items()}
        | {"out": make.empty(tokens, n)}
        for _ in range(make.count)
    ]


def _quantize_int8(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, k = s["num_tokens"], s["k"]
    return [
        {
            "x": make.normal(tokens, k),
            "out": make.empty(tokens, k, dtype=torch.int8),
            "scales": make.empty(tokens, dtype=torch.float32),
        }
        for _ in range(make.count)
    ]


def _int8_gemm(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, n, k = s["num_tokens"], s["n"], s["k"]
    return [
        {name: make.bytes(rows, k).view(torch.int8) for name, rows in (("x", tokens), ("weight", n))}
        | {name: make.scales(rows).float() for name, rows in (("x_scales", tokens), ("weight_scales", n))}
        | {"out": make.empty(tokens, n)}
        for _ in range(make.count)
    ]


def _update_kv_buffer(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    tokens, heads, dim, rows = s["num_tokens"], s["num_kv_heads"], s["head_dim"], s["num_rows"]
    pool = make.empty(rows, 2 * heads, dim).zero_()
    sets = []
    for _ in range(make.count):
        projected = make.normal(tokens, 2 * heads, dim)
        slots = make.shuffled(rows)[:tokens].clone()
        sets.append(
            {
                "k": projected[:, :heads],
                "v": projected[:, heads:],
                "slot_mapping": slots,
                "k_pool": pool[:, :heads],
                "v_pool": pool[:, heads:],
            }
        )
    return sets


def _update_kv_buffer_fp8(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    sets = _update_kv_buffer(make, s)
    pool = make.empty(s["num_rows"], 2 * s["num_kv_heads"], s["head_dim"], dtype=torch.uint8).zero_().view(torch.float8_e4m3fn)
    pools = {"k_pool": pool[:, : s["num_kv_heads"]], "v_pool": pool[:, s["num_kv_heads"] :]}
    return [entry | pools | _pool_scales(make, s) for entry in sets]


def _pool_scales(make: _Maker, s: dict[str, int]) -> Arguments:
    """Of numbers of size 1, which end where e4m3 does a hundred times as far out."""
    return {name: make.scales(s["num_kv_heads"]).float() for name in ("k_scale", "v_scale")}


def _update_kv_index(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    rows, columns, updates = s["num_table_rows"], s["num_columns"], s["num_updates"]
    table = make.empty(rows, columns, dtype=torch.int32).zero_()
    sets = []
    for _ in range(make.count):
        cells = torch.randperm(rows * columns, generator=make.generator, device=make.device)[:updates]
        sets.append(
            {
                "page_table": table,
                "table_rows": (cells // columns).to(torch.int32),
                "columns": (cells % columns).to(torch.int32),
                "pages": make.ids(updates, 1 << 20),
            }
        )
    return sets


def _pool(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    """K and V of every sequence in the shuffled pages of a pool of their own in each set."""
    seqs, page = s["num_seqs"], s["page_size"]
    columns = -(-max(s["kv_len"], 1) // page)
    sets = []
    for _ in range(make.count):
        pool = make.normal(seqs * columns * page, 2 * s["num_kv_heads"], s["head_dim"])
        sets.append(
            {
                "k_pool": pool[:, : s["num_kv_heads"]],
                "v_pool": pool[:, s["num_kv_heads"] :],
                "page_table": make.shuffled(seqs * columns).view(seqs, columns),
                "table_rows": torch.arange(seqs, dtype=torch.int32, device=make.device),
                "seq_lens": make.full(seqs, s["kv_len"], torch.int32),
                "page_size": page,
                "sm_scale": s["head_dim"] ** -0.5,
            }
        )
    return sets


def _flash_decoding(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    shape = (s["num_seqs"], s["num_heads"], s["head_dim"])
    return [entry | {"q": make.normal(*shape), "out": make.empty(*shape)} for entry in _pool(make, s)]


def _flashattention2_nopad(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    shape = (s["num_seqs"] * s["q_len"], s["num_heads"], s["head_dim"])
    ends = torch.arange(s["num_seqs"] + 1, dtype=torch.int32, device=make.device) * s["q_len"]
    others = {"cu_seqlens_q": ends, "max_seqlen_q": s["q_len"]}
    return [entry | others | {"q": make.normal(*shape), "out": make.empty(*shape)} for entry in _pool(make, s)]


def _fp8_pools(make: _Maker, s: dict[str, int], sets: list[Arguments]) -> list[Arguments]:
    """The same calls with their pools in e4m3."""
    scales = _pool_scales(make, s)

    def rounded(pool: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (pool / scale[:, None]).clamp_(-448, 448).to(torch.float8_e4m3fn)

    for entry in sets:  # one by one: all of them at once, twice, may not fit
        both = torch.cat([rounded(entry.pop(f"{name}_pool"), scales[f"{name}_scale"]) for name in ("k", "v")], 1)
        heads = s["num_kv_heads"]
        entry.update(scales | {"k_pool": both[:, :heads], "v_pool": both[:, heads:]})
    return sets


def _flash_decoding_fp8(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    return _fp8_pools(make, s, _flash_decoding(make, s))


def _flashattention2_nopad_fp8(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    return _fp8_pools(make, s, _flashattention2_nopad(make, s))


_SAMPLED = {
    # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_p": (0.8, 0, 0.9, 0.0),
    "top_k_top_p": (0.8, 50, 0.9, 0.0),
}


def _sample(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    seqs = s["num_seqs"]
    temperature, top_k, top_p, min_p = _SAMPLED[make.variant]
    return [
        {
            "logits": make.normal(seqs, s["vocab_size"], scale=3.0),
            "temperature": make.full(seqs, temperature, torch.float32),
            "top_k": make.full(seqs, top_k, torch.int32),
            "top_p": make.full(seqs, top_p, torch.float32),
            "min_p": make.full(seqs, min_p, torch.float32),
            "seeds": torch.arange(seqs, device=make.device),
            "positions": make.ids(seqs, 8192),
            "out_ids": make.empty(seqs, dtype=torch.int32),
        }
        for _ in range(make.count)
    ]


def _top_logprobs(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    seqs, columns = s["num_seqs"], 6
    return [
        {
            "logits": make.normal(seqs, s["vocab_size"], scale=3.0),
            "token_ids": make.ids(seqs, s["vocab_size"]),
            "out_ids": make.empty(seqs, columns, dtype=torch.int32),
            "out_logprobs": make.empty(seqs, columns, dtype=torch.float32),
        }
        for _ in range(make.count)
    ]


def _adjust_logits(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    seqs, vocabulary, edits = s["num_seqs"], s["vocab_size"], s["num_edits"]
    places = torch.randperm(seqs * vocabulary, generator=make.generator, device=make.device)[:edits].int()
    return [
        {
            "logits": make.normal(seqs, vocabulary, scale=3.0),
            "counts": make.ids(s["table_rows"] * vocabulary, 3).view(s["table_rows"], vocabulary),
            "count_rows": make.ids(seqs, s["table_rows"]),
            "repetition": make.full(seqs, 1.1, torch.float32),
            "presence": make.full(seqs, 0.5, torch.float32),
            "frequency": make.full(seqs, 0.25, torch.float32),
            "edit_rows": places // vocabulary,
            "edit_ids": places % vocabulary,
            "edit_values": make.full(edits, -5.0, torch.float32),
            "out": make.empty(seqs, vocabulary, dtype=torch.float32),
        }
        for _ in range(make.count)
    ]


def _mask_logits(make: _Maker, s: dict[str, int]) -> list[Arguments]:
    seqs, vocabulary, words = s["num_seqs"], s["vocab_size"], -(-s["vocab_size"] // 32)
    return [
        {
            "logits": make.normal(seqs, vocabulary, scale=3.0),
            # All bits: what they say takes no time, and results are compared as finite numbers.
            "masks": make.full(s["num_masks"] * words, -1, torch.int32).view(s["num_masks"], words),
            "mask_rows": make.ids(seqs, s["num_masks"]),
            "out": make.empty(seqs, vocabulary, dtype=torch.float32),
        }
        for _ in range(make.count)
    ]


_MAKERS: dict[str, Callable[[_Maker, dict[str, int]], list[Arguments]]] = {
    "swiglu": _swiglu,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "qk_norm_rope_kv_write": _qk_norm_rope_kv_write,
    "vocab_embedding": _vocab_embedding,
    "dense_gemm": _dense_gemm,
    "w8a16_gemm": _w8a16_gemm,
    "w4a16_gemm": _w4a16_gemm,
    "route_experts": _route_experts,
    "fused_moe": _fused_moe,
    "fused_moe_fp8": _fused_moe_fp8,
    "fused_moe_w8a16": _fused_moe_w8a16,
    "fused_moe_w4a16": _fused_moe_w4a16,
    "fused_moe_mxfp4": _fused_moe_mxfp4,
    "quantize_fp8": _quantize_fp8,
    "fp8_gemm": _fp8_gemm,
    "add_rms_norm_fp8": _add_rms_norm_fp8,
    "swiglu_fp8": _swiglu_fp8,
    "quantize_int8": _quantize_int8,
    "int8_gemm": _int8_gemm,
    "nvfp4_gemm": _nvfp4_gemm,
    "mxfp4_gemm": _mxfp4_gemm,
    "quantize_nvfp4": _quantize_nvfp4,
    "gather_columns": _gather_columns,
    "update_kv_buffer": _update_kv_buffer,
    "update_kv_buffer_fp8": _update_kv_buffer_fp8,
    "update_kv_index": _update_kv_index,
    "flash_decoding": _flash_decoding,
    "flash_decoding_fp8": _flash_decoding_fp8,
    "flashattention2_nopad": _flashattention2_nopad,
    "flashattention2_nopad_fp8": _flashattention2_nopad_fp8,
    "sample": _sample,
    "top_logprobs": _top_logprobs,
    "adjust_logits": _adjust_logits,
    "mask_logits": _mask_logits,
}
