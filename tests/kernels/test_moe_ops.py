"""Mixtures of experts against their float64 twins, on every row that this machine runs."""

from tests.kernels.rows_under_test import broken_cases, each_row_of


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
