"""Every CUDA C++ source, compiled for each device that its row claims. Needs NVRTC (see the Makefile), no GPU and no headers."""

import importlib
import re

import pytest

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.jit.nvrtc import CudaCompileError, compile_cuda, find_nvrtc, supported_architectures
from rapid_llm.kernels.jit.sources import FOLDER, read_source
from rapid_llm.kernels.testing.compile_only import load_bits

pytestmark = pytest.mark.skipif(find_nvrtc() is None, reason="there is no NVRTC on this machine")

ROWS = [row for row in catalog().all_rows() if "nvrtc" in row.requires.packages]
REGISTERS = 65_536  # of a multiprocessor, on every device since sm80


def _module(row):
    return importlib.import_module(row.target.partition(":")[0])


def _claimed():
    """One parameter a row and compute capability."""
    for row in ROWS:
        devices = [device_info(name) for name in catalog().contract(row.op).devices]
        for sm in sorted({device.sm for device in devices if not row.requires.unmet(device)}):
            yield pytest.param(row, sm, id=f"{row.name}-sm{sm}")


def _resources(log):
    """Of each kernel that ptxas tells of: (bytes of stack, bytes spilled, registers) of a thread."""
    pattern = r"properties for (\w+)\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores.*\n.*Used (\d+) registers"
    told = re.findall(pattern, log)
    return {name: tuple(int(number) for number in numbers) for name, *numbers in told}


def _ptx_by_kernel(ptx):
    parts = re.split(r"\.visible \.entry (\w+)\(", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_source_is_launched_by_a_row():
    assert {_module(row).CUDA_SOURCE for row in ROWS} == {file.name for file in FOLDER.glob("*.cu")}


def test_a_source_includes_nothing():
    for file in FOLDER.glob("*.cu"):
        assert "#include" not in re.sub("//.*", "", file.read_text()), file


@pytest.mark.case("D1")
@pytest.mark.case("C6")
@pytest.mark.parametrize(("row", "sm"), list(_claimed()))
def test_a_source_compiles_without_spills_and_loads_128_bits_at_a_time(row, sm):
    module = _module(row)

    compiled = compile_cuda(module.CUDA_SOURCE, read_source(module.CUDA_SOURCE), sm, options=("--ptxas-options=-v",))

    assert compiled.image.startswith(b"\x7fELF")
    assert f".target sm_{sm}" in compiled.ptx
    wanted = set(module.FUNCTIONS.values())
    assert {str(dtype).removeprefix("torch.") for dtype in module.FUNCTIONS} == set(row.dtypes)
    resources, texts = _resources(compiled.log), _ptx_by_kernel(compiled.ptx)
    assert set(resources) == set(texts) == wanted, compiled.log
    for name in wanted:
        stack, spilled, registers = resources[name]
        assert (stack, spilled) == (0, 0), name
        assert 0 < registers <= REGISTERS // module.MAX_THREADS, name
        assert name.encode() in compiled.image
        assert max(load_bits(texts[name])) == 128, name
        assert "st.global.v4" in texts[name], name


def test_a_source_that_is_wrong_is_refused_with_the_compilers_words():
    text = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= two; }'
    with pytest.raises(CudaCompileError, match=r"(?s)twice\.cu does not compile for sm_90.*twice\.cu\(1\).*\"two\" is undefined"):
        compile_cuda("twice.cu", text, 90)


def test_a_device_that_the_compiler_does_not_know_gets_ptx():
    newest = max(supported_architectures())

    compiled = compile_cuda("twice.cu", 'extern "C" __global__ void twice(float* x) { *x *= 2; }', newest + 100)

    assert f".target sm_{newest}" in compiled.ptx
    assert compiled.image == compiled.ptx.encode() + b"\0"  # the driver reads up to the zero


def test_a_device_before_all_that_the_compiler_knows_is_refused():
    with pytest.raises(ConfigError, match="got sm30"):
        compile_cuda("twice.cu", "", 30)
