"""Mixtures of experts against their float64 twins, on every row that this machine runs."""

import importlib
import math

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.dispatcher.dispatch import load_target
from tests import reference
from tests.kernels.rows_under_test import DTYPES, broken_cases, each_row_of, to

EXPERT_OPS = ("fused_moe", "fused_moe_fp8", "fused_moe_w8a16", "fused_moe_w4a16", "fused_moe_mxfp4")


@each_row_of("route_experts")
def test_route_experts_holds_over_its_whole_sweep(route_experts, device):
    assert broken_cases(route_experts, device) == []


@each_row_of("fused_moe")
def test_fused_moe_holds_over_its_whole_sweep(fused_moe, device):
    assert broken_cases(fused_moe, device) == []


@each_row_of("fused_moe_fp8")
def test_fused_moe_fp8_holds_over_its_whole_sweep(fused_moe_fp8, device):
    assert broken_cases(fused_moe_fp8, device) == []


@each_row_of("fused_moe_w8a16")
def test_fused_moe_w8a16_holds_over_its_whole_sweep(fused_moe_w8a16, device):
    assert broken_cases(fused_moe_w8a16, device) == []


@each_row_of("fused_moe_w4a16")
def test_fused_moe_w4a16_holds_over_its_whole_sweep(fused_moe_w4a16, device):
    assert broken_cases(fused_moe_w4a16, device) == []


@each_row_of("fused_moe_mxfp4")
def test_fused_moe_mxfp4_holds_over_its_whole_sweep(fused_moe_mxfp4, device):
    assert broken_cases(fused_moe_mxfp4, device) == []


def experts_of(count, hidden, inner, device, dtype=torch.float32):
    """gate_up and down whose products are about as large as what goes in."""
    gate_up = torch.randn(count, 2 * inner, hidden, device=device) / hidden**0.5
    return gate_up.to(dtype), (torch.randn(count, hidden, inner, device=device) / inner**0.5).to(dtype)


def routes_of(tokens, count, top_k, device):
    """Distinct experts of each token, and weights that sum to 1."""
    draws = torch.rand(tokens, count, device=device).topk(top_k, dim=1)
    return draws.indices.int(), draws.values / draws.values.sum(1, keepdim=True)


def stored(op, gate_up, down, dtype, by_groups):
    """Experts of random codes in the format of ``op``, of the shapes of ``gate_up`` and ``down``; their scales lie far apart."""
    tensors = {}
    for name, (count, n, k) in (("gate_up", gate_up.shape), ("down", down.shape)):
        device, groups = gate_up.device, k // 32 if by_groups else 1
        scales = (0.5 + torch.rand(count, n, groups, device=device)) / k**0.5
        scales.view(-1)[::2] /= 1000
        if op == "fused_moe":
            tensors[name] = {"gate_up": gate_up, "down": down}[name].to(dtype)
        elif op == "fused_moe_fp8":
            tensors[name] = torch.randn(count, n, k, device=device).to(torch.float8_e4m3fn)
            squares = (0.5 + torch.rand(count, -(-n // 128), -(-k // 128), device=device)) / k**0.5
            tensors[f"{name}_scales"] = squares if by_groups else scales[:, :, 0]
        elif op == "fused_moe_w8a16":
            tensors[name] = torch.randint(-127, 128, (count, n, k), dtype=torch.int8, device=device)
            tensors[f"{name}_scales"] = (scales if by_groups else scales[:, :, 0]) / 64
        else:
            tensors[name] = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, device=device)
        if op == "fused_moe_w4a16":
            tensors[f"{name}_scales"] = scales.to(dtype) / 4
            tensors[f"{name}_zeros"] = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device)
        elif op == "fused_moe_mxfp4":
            tensors[f"{name}_scales"] = torch.randint(120, 126, (count, n, -(-k // 32)), dtype=torch.uint8, device=device)
    return tensors


def every_expert_op(test):
    """Over each row of each op of experts, as ``row``."""
    rows = [parameter for op in EXPERT_OPS for parameter in each_row_of(op).args[1]]
    return pytest.mark.parametrize("row", rows)(test)


def spread(tensor):
    """A view of the same values with other strides everywhere but in the innermost dimension, inside a larger tensor."""
    shape = [size + 3 for size in tensor.shape]
    wide = torch.zeros(shape, device=tensor.device, dtype=torch.uint8 if tensor.element_size() == 1 else tensor.dtype)
    view = wide.view(tensor.dtype)[tuple(slice(1, size + 1) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def assert_mixture(out, expected, op="fused_moe"):
    """Three roundings to the dtype on the way and sums of fp32, against what is of the largest output's size. An activation that
    is rounded to e4m3 may now and then go to its other neighbour."""
    largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 1.0
    atol = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[out.dtype] * largest
    torch.testing.assert_close(
        out.double(), expected, rtol=0, atol=max(atol, 2e-2 * largest) if op == "fused_moe_fp8" else atol, equal_nan=True
    )


@pytest.mark.case("G11")
@every_expert_op
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_groups", [pytest.param(False, id="an-output"), pytest.param(True, id="groups")])
def test_experts_are_read_from_strided_views_and_columns_of_out_alone_are_written(row, dtype, by_groups, device):
    tokens, hidden, inner, op = 5, 64, 32, row.spec.op
    tensors = stored(op, *experts_of(6, hidden, inner, device), dtype, by_groups)
    ids, weights = routes_of(tokens, 6, 3, device)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    buffer = torch.full((tokens, hidden + 9), 7.0, dtype=dtype, device=device)

    views = {name: spread(tensor) for name, tensor in {"x": x, **tensors, "ids": ids, "weights": weights}.items()}
    row(**views, out=buffer[:, :hidden])

    assert_mixture(buffer[:, :hidden], getattr(reference, op)(x, **tensors, ids=ids, weights=weights), op)
    assert (buffer[:, hidden:] == 7.0).all()


@every_expert_op
@pytest.mark.parametrize("tokens", [pytest.param(1, id="one-token"), pytest.param(9, id="many")])
def test_ids_of_nobody_add_nothing_and_are_never_followed(row, tokens, device):
    """Beyond both ends by one and by far, with experts that only they would reach."""
    op, dtype = row.spec.op, torch.float32
    tensors = stored(op, *experts_of(4, 64, 32, device), dtype, by_groups=False)
    foreign = torch.tensor([-1, 4, -2, 2**31 - 1, -(2**31), 5], dtype=torch.int32, device=device)
    ids, weights = routes_of(tokens, 4, 4, device)
    ids = torch.cat((ids, foreign.expand(tokens, -1)), dim=1)[:, torch.randperm(10, device=device)].contiguous()
    weights = torch.rand(tokens, 10, device=device)
    ids[1::2] = -1
    x, out = torch.randn(tokens, 64, device=device), torch.empty(tokens, 64, device=device)

    row(x=x, **tensors, ids=ids, weights=weights, out=out)

    assert_mixture(out, getattr(reference, op)(x, **tensors, ids=ids, weights=weights), op)
    assert (out[1::2] == 0).all()


@every_expert_op
def test_a_nan_spoils_its_own_token_only(row, device):
    op = row.spec.op
    tensors = stored(op, *experts_of(2, 64, 32, device), torch.float32, by_groups=False)
    ids, weights = routes_of(6, 2, 2, device)
    x, out = torch.randn(6, 64, device=device), torch.empty(6, 64, device=device)
    x[2, 5] = math.nan
    row(x=x, **tensors, ids=ids, weights=weights, out=out)
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4, 5]].isfinite().all()


@each_row_of("fused_moe")
@pytest.mark.parametrize("top_k", range(1, 11))
def test_any_number_of_experts_a_token(fused_moe, top_k, device):
    gate_up, down = experts_of(11, 32, 16, device)
    ids, weights = routes_of(3, 11, top_k, device)
    x, out = torch.randn(3, 32, device=device), torch.empty(3, 32, device=device)
    fused_moe(x, gate_up, down, ids, weights, out=out)
    assert_mixture(out, reference.fused_moe(x, gate_up, down, ids, weights))


@each_row_of("fused_moe")
def test_all_tokens_may_go_to_one_expert_and_one_token_to_an_expert_twice(fused_moe, device):
    gate_up, down = experts_of(40, 32, 16, device)
    ids = torch.full((33, 2), 37, dtype=torch.int32, device=device)
    weights = torch.rand(33, 2, device=device)
    x, out = torch.randn(33, 32, device=device), torch.empty(33, 32, device=device)
    fused_moe(x, gate_up, down, ids, weights, out=out)
    assert_mixture(out, reference.fused_moe(x, gate_up, down, ids, weights))


@each_row_of("route_experts")
@each_row_of("fused_moe")
def test_shared_experts_ride_in_the_same_products(route_experts, fused_moe, device):
    """Six experts to choose from and two for everybody, which are halves of one that is twice as wide."""
    gate_up, down = experts_of(8, 32, 16, device)
    x, logits = torch.randn(5, 32, device=device), torch.randn(5, 6, device=device)
    ids = torch.empty(5, 4, dtype=torch.int32, device=device)
    weights, out = torch.empty(5, 4, device=device), torch.empty(5, 32, device=device)
    route_experts(logits, out_ids=ids, out_weights=weights, scale=2.5, num_shared=2)
    fused_moe(x, gate_up, down, ids, weights, out=out)

    routed = reference.fused_moe(x, gate_up[:6], down[:6], ids[:, :2], weights[:, :2])
    gate, up = (half.flatten(0, 1).double() for half in gate_up[6:].chunk(2, dim=1))
    wide = torch.nn.functional.silu(x.double() @ gate.T) * (x.double() @ up.T)
    assert_mixture(out, routed + wide @ torch.cat((down[6], down[7]), dim=1).double().T)
    assert ids[:, 2:].tolist() == [[6, 7]] * 5
    torch.testing.assert_close(weights.sum(1), torch.full((5,), 2.5 + 2.0, device=device))


@each_row_of("route_experts")
@pytest.mark.parametrize("num_experts", [4, 5, 64, 160, 512])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_are_distinct_and_in_falling_order_and_ties_go_to_the_lower_id(route_experts, num_experts, scoring, device):
    top_k = min(num_experts, 10)
    logits = torch.randint(0, 3, (4, num_experts), device=device).float()
    ids = torch.empty(4, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(4, top_k, device=device)
    route_experts(logits, out_ids=ids, out_weights=weights, scoring=scoring)
    order = sorted(range(num_experts), key=lambda expert: (-float(logits[0, expert]), expert))
    assert ids[0].tolist() == order[:top_k]
    assert (weights.diff(dim=1) <= 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(4, device=device))


@each_row_of("route_experts")
def test_a_bias_chooses_and_weighs_nothing(route_experts, device):
    logits, bias = torch.zeros(1, 8, device=device), torch.zeros(8, device=device)
    logits[0, 2] = 3.0
    bias[5], bias[6] = 7.0, 6.0
    ids, weights = torch.empty(1, 3, dtype=torch.int32, device=device), torch.empty(1, 3, device=device)
    route_experts(logits, out_ids=ids, out_weights=weights, scoring="sigmoid", bias=bias, renormalise=False)
    assert ids.tolist() == [[5, 6, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5, 1 / (1 + math.exp(-3.0))]], device=device))


@each_row_of("route_experts")
@pytest.mark.parametrize(("biased", "group"), [pytest.param(False, 0, id="largest"), pytest.param(True, 1, id="two-largest")])
def test_a_group_counts_as_its_largest_or_with_a_bias_as_its_two_largest(route_experts, biased, group, device):
    """Group 0 has the largest score, group 1 the two that are most together."""
    logits = torch.tensor([[3.0, -3.0, -3.0, 1.0, 1.0, -3.0]], device=device)
    bias = torch.zeros(6, device=device) if biased else None
    ids, weights = torch.empty(1, 2, dtype=torch.int32, device=device), torch.empty(1, 2, device=device)
    route_experts(logits, out_ids=ids, out_weights=weights, scoring="sigmoid", bias=bias, num_groups=2, top_groups=1)
    assert ids.tolist() == [[[0, 1], [3, 4]][group]]


@each_row_of("route_experts")
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_rows_of_nothing_but_faults_give_distinct_ids_within_range(route_experts, value, num_groups, device):
    logits = torch.full((2, 12), value, device=device)
    logits[1] = torch.arange(12, device=device)
    ids = torch.full((2, 6), 99, dtype=torch.int32, device=device)
    weights = torch.empty(2, 6, device=device)
    route_experts(logits, out_ids=ids, out_weights=weights, num_groups=num_groups, top_groups=num_groups)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [11, 10, 9, 8, 7, 6]]
    assert weights[0].isnan().all() if math.isnan(value) else torch.equal(weights[0], torch.full_like(weights[0], 1 / 6))
    assert weights[1].isfinite().all()


def forbid_launches(row, monkeypatch):
    """No kernel of a Triton row's module can be launched from here on."""
    if "triton" in row.spec.requires.packages:
        load_target(row.spec)
        module = importlib.import_module(row.spec.target.partition(":")[0])
        for name in ("_sum_kernel", "_quantise_kernel", "_route_kernel", "grouped_product", "pairs_by_expert"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, None)


@pytest.mark.case("G13")
@every_expert_op
def test_experts_of_no_tokens_launch_nothing(row, device, monkeypatch):
    forbid_launches(row, monkeypatch)
    tensors = stored(row.spec.op, *experts_of(4, 64, 32, device), torch.float32, by_groups=False)
    ids, weights = torch.empty(0, 2, dtype=torch.int32, device=device), torch.empty(0, 2, device=device)
    out = torch.empty(0, 64, device=device)
    assert row(x=torch.empty(0, 64, device=device), **tensors, ids=ids, weights=weights, out=out) is out


@pytest.mark.case("G13")
@each_row_of("route_experts")
def test_routes_of_no_tokens_launch_nothing(route_experts, device, monkeypatch):
    forbid_launches(route_experts, monkeypatch)
    weights = torch.empty(0, 2, device=device)
    ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    assert route_experts(torch.empty(0, 4, device=device), out_ids=ids, out_weights=weights) is weights


LOGITS = {"logits": torch.zeros(3, 8), "out_ids": torch.zeros(3, 2, dtype=torch.int32), "out_weights": torch.zeros(3, 2)}


@each_row_of("route_experts")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"logits": torch.zeros(8, 3).t()}, id="transposed-logits"),
        pytest.param({"logits": torch.zeros(3, 8, dtype=torch.float64)}, id="float64"),
        pytest.param({"logits": torch.zeros(3, 1025)}, id="too-many-experts"),
        pytest.param({"out_ids": torch.zeros(3, 2, dtype=torch.int64)}, id="int64-ids"),
        pytest.param({"out_weights": torch.zeros(3, 3)}, id="columns-that-differ"),
        pytest.param({"scoring": "relu"}, id="unknown-scoring"),
        pytest.param({"num_shared": 2}, id="nothing-but-shared"),
        pytest.param({"num_groups": 3}, id="groups-that-do-not-divide"),
        pytest.param({"num_groups": 8, "top_groups": 1}, id="fewer-than-top-k-to-choose-from"),
        pytest.param({"num_groups": 2, "top_groups": 3}, id="more-groups-than-there-are"),
        pytest.param({"bias": torch.zeros(7)}, id="short-bias"),
        pytest.param({"bias": torch.zeros(8).bfloat16()}, id="bias-of-another-dtype"),
    ],
)
def test_route_experts_refuses_what_it_would_misread(route_experts, changed, device):
    refused(route_experts, {**LOGITS, **changed}, device, "out_weights")


CALL = {
    "x": torch.ones(3, 64),
    "ids": torch.zeros(3, 2, dtype=torch.int32),
    "weights": torch.ones(3, 2),
    "out": torch.zeros(3, 64),
}
SHARED_REFUSALS = [
    pytest.param({"x": torch.ones(3, 128)[:, ::2]}, id="every-other-column"),
    pytest.param({"x": torch.ones(3, 32)}, id="x-of-another-width"),
    pytest.param({"ids": torch.zeros(3, 2, dtype=torch.int64)}, id="int64-ids"),
    pytest.param({"ids": torch.zeros(2, 2, dtype=torch.int32)}, id="ids-of-other-tokens"),
    pytest.param({"ids": torch.zeros(2, 3, dtype=torch.int32).t()}, id="transposed-ids"),
    pytest.param({"weights": torch.ones(3, 2).bfloat16()}, id="bf16-weights"),
    pytest.param({"weights": torch.ones(3, 3)}, id="a-weight-too-many"),
    pytest.param({"out": torch.zeros(64, 3).t()}, id="transposed-out"),
    pytest.param({"out": torch.zeros(3, 64).half()}, id="mixed-dtypes"),
    pytest.param({"down": "transposed"}, id="transposed-down"),
    pytest.param({"gate_up": "one expert fewer"}, id="experts-that-differ"),
    pytest.param({"gate_up_scales": "one output fewer"}, id="scales-of-other-outputs"),
    pytest.param({"down_scales": "double"}, id="scales-of-another-dtype"),
    pytest.param({"down_zeros": "none"}, id="zeros-of-one-product"),
]
CHANGES = {
    "transposed": lambda tensor: tensor.transpose(1, 2),
    "one expert fewer": lambda tensor: tensor[1:],
    "one output fewer": lambda tensor: tensor[:, 1:],
    "double": lambda tensor: tensor.double(),
    "none": lambda tensor: None,
}


@every_expert_op
@pytest.mark.parametrize("changed", SHARED_REFUSALS)
def test_experts_are_refused_where_they_would_be_misread(row, changed, device):
    tensors = stored(row.spec.op, *experts_of(4, 64, 32, torch.device("cpu")), torch.float32, by_groups=False)
    arguments = {**CALL, **tensors}
    for name, change in changed.items():
        if name not in arguments:
            pytest.skip(f"{row.spec.op} has no {name}")
        arguments[name] = CHANGES[change](arguments[name]) if isinstance(change, str) else change
    refused(row, arguments, device, "out")


@every_expert_op
def test_another_format_is_refused(row, device):
    others = {op: stored(op, *experts_of(4, 64, 32, torch.device("cpu")), torch.float32, by_groups=False) for op in EXPERT_OPS}
    own = others[row.spec.op]
    for other in others.values():
        swapped = {**own, "gate_up": other["gate_up"], "down": other["down"]}
        if other["gate_up"].dtype == own["gate_up"].dtype or (row.spec.op == "fused_moe_w8a16" and "gate_up_scales" in other):
            continue
        refused(row, {**CALL, **swapped}, device, "out")


def refused(row, arguments, device, written):
    moved = {name: to(device, value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(KernelInputError, match=rf"{row.spec.op}\("):
        row(**moved)
    assert (moved[written] == 0).all()
