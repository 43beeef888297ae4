"""Prefill in Gluon, compiled for the one Triton and the one architecture that it is of: what each of its warps was made to do."""

import re
import subprocess
from itertools import groupby

import pytest
import triton

from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher.catalog import catalog
from tests.compile.launches import compiled_call, why_not_compiled

ROW = next(row for row in catalog().all_rows() if row.name == "gluon.flashattention2_nopad")
H200 = device_info("h200")


@pytest.fixture(autouse=True, scope="module")
def _of_this_triton():
    if why_not := why_not_compiled(ROW, H200):
        pytest.skip(f"{ROW.name} {why_not}")


def only_launch(dtype="bfloat16", **sizes):
    """The launch of a call, the merge of splits left out."""
    [launch] = [launch for launch in compiled_call(ROW, H200, dtype, **sizes) if launch.kernel != "_merge_kernel"]
    return launch


def instructions(launch, folder):
    """The names of the machine's instructions, in their order."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(launch.cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\w+)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("dtype", ROW.dtypes)
def test_no_consumer_spills_and_no_producer_multiplies(dtype, tmp_path):
    """In the binary the code of one consumer comes before the producer's and that of the other behind it."""
    parts = {"HGMMA": "product", "UTMALDG": "producer", "STL": "producer", "LDL": "producer"}
    found = [parts[name] for name in instructions(only_launch(dtype), tmp_path) if name in parts]
    assert [part for part, _ in groupby(found)] == ["product", "producer", "product"]


def test_keys_and_queries_are_copied_by_the_memory_engine():
    launch = only_launch()
    boxes = 4 + 2 * 2 * 128 // 16  # parts and halves of the queries; K and V, halves, pages of a tile
    assert launch.ptx.count("cp.async.bulk.tensor.2d") == boxes
    assert "wgmma.mma_async" in launch.ptx
    assert "setmaxnreg" in launch.ptx


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_shared_memory_is_what_the_row_requires(page_size):
    assert only_launch(page_size=page_size).shared == ROW.requires.min_smem


@pytest.mark.parametrize(("num_seqs", "programs"), [(1, 128), (64, 132)])
def test_as_many_programs_are_launched_as_there_are_items_or_multiprocessors(num_seqs, programs):
    """Four tiles of 32 heads, or more than a card has room for."""
    assert only_launch(num_seqs=num_seqs).grid == (programs, 1, 1)
