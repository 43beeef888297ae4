"""The pool is refused when a kernel that reads it could not address all of it."""

from dataclasses import replace

import pytest

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.runtime.kv_pool import check_bound

ROW = catalog().rows["flash_decoding"][0]
ELEMENTS = 2 * 8 * 128  # of one row: 8 KV heads of 128, K and V


@pytest.mark.case("A1")
@pytest.mark.parametrize(
    ("num_rows", "int64_rows", "fits"),
    [
        (2**31 // ELEMENTS, False, True),
        (2**31 // ELEMENTS + 1, False, False),
        (2**31 // ELEMENTS + 1, True, True),
        (2**31, True, True),
        (2**31 + 1, True, False),
    ],
    ids=["last-row-of-int32", "first-row-past-int32", "same-with-int64", "last-id", "first-id-past-int32"],
)
def test_the_bound_is_the_one_the_kernels_declare(num_rows, int64_rows, fits):
    readers = [replace(ROW, int64_rows=True), replace(ROW, name="the.narrow.one", int64_rows=int64_rows)]
    if fits:
        check_bound(num_rows, ELEMENTS, readers)
    else:
        with pytest.raises(ConfigError, match=r"the KV pool is too large: got .* rows, wanted at most .*; lower max_kv_tokens"):
            check_bound(num_rows, ELEMENTS, readers)
