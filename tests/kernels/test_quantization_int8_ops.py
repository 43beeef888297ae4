"""quantize_int8 and int8_gemm against their float64 twins, on every row that this machine runs."""

from tests.kernels.rows_under_test import broken_cases, each_row_of


@each_row_of("quantize_int8")
def test_quantize_int8_holds_over_its_whole_sweep(quantize_int8, device):
    assert broken_cases(quantize_int8, device) == []


@each_row_of("int8_gemm")
def test_int8_gemm_holds_over_its_whole_sweep(int8_gemm, device):
    assert broken_cases(int8_gemm, device) == []
