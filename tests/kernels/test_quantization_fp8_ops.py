"""quantize_fp8 and fp8_gemm against their float64 twins, on every row that this machine runs."""

from tests.kernels.rows_under_test import broken_cases, each_row_of


@each_row_of("quantize_fp8")
def test_quantize_fp8_holds_over_its_whole_sweep(quantize_fp8, device):
    assert broken_cases(quantize_fp8, device) == []


@each_row_of("fp8_gemm")
def test_fp8_gemm_holds_over_its_whole_sweep(fp8_gemm, device):
    assert broken_cases(fp8_gemm, device) == []
