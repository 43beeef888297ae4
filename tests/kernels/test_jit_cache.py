"""CUDA sources without a compiler and without a GPU: their binaries on disk, their launch, their part in evidence."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rapid_llm.errors import ConfigError, KernelInputError
from rapid_llm.kernels.device import device_info
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.evidence import EvidenceRecord, evidence_for, latency_key, load_records
from rapid_llm.kernels.dispatcher.ranking import Question, rank
from rapid_llm.kernels.jit import nvrtc, sources
from rapid_llm.kernels.jit.binaries import cuda_binary
from rapid_llm.kernels.jit.driver import CudaDriverError, CudaKernel
from rapid_llm.kernels.jit.nvrtc import Compiled, CudaCompileError, architecture_for, compiler_identity, find_nvrtc
from rapid_llm.kernels.ops.norm.add_rms_norm_cuda import add_rms_norm
from rapid_llm.kernels.provenance import is_installed, source_hash
from rapid_llm.kernels.store import StoreWarning, warn_once
from tests import reference
from tests.kernels.rows_under_test import each_row_of

TWICE = 'extern "C" __global__ void twice(float* x) {\n  x[threadIdx.x] *= 2;\n}\n'
H200, CPU = device_info("h200"), device_info("cpu")


class FakeCompiler:
    """Makes a binary that tells what it was made of, and counts."""

    def __init__(self):
        self.identity, self.runs, self.broken = "nvrtc 13.0", 0, False

    def compile(self, name, text, sm):
        self.runs += 1
        if self.broken:
            raise CudaCompileError(f"{name} does not compile", got="NVRTC_ERROR_COMPILATION", change="correct it")
        return Compiled(f"{self.identity} {sources.OPTIONS} sm{sm} {text}".encode() * 100, ptx="", log="")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "twice.cu").write_text(TWICE, encoding="utf-8")
    fake = FakeCompiler()
    monkeypatch.setattr(sources, "FOLDER", folder)
    monkeypatch.setattr(nvrtc, "compiler_identity", lambda: fake.identity)
    monkeypatch.setattr(nvrtc, "compile_cuda", fake.compile)
    warn_once.cache_clear()
    yield fake
    warn_once.cache_clear()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data" / "jit"


# ---- binaries


def test_a_source_is_compiled_once_and_read_from_then_on(compiler, folder):
    first = cuda_binary("twice.cu", 90)

    assert cuda_binary("twice.cu", 90) == first
    assert compiler.runs == 1
    (path,) = folder.iterdir()
    assert path.name.startswith("twice-sm90-")


@pytest.mark.parametrize("what", ["source", "options", "device", "compiler"])
def test_all_that_goes_into_a_binary_tells_it_from_others(what, compiler, folder, monkeypatch):
    before = cuda_binary("twice.cu", 90)
    if what == "source":
        (sources.FOLDER / "twice.cu").write_text(TWICE.replace("2", "3"), encoding="utf-8")
    elif what == "options":
        monkeypatch.setattr(sources, "OPTIONS", ("--std=c++20",))
    elif what == "compiler":
        compiler.identity = "nvrtc 13.5"

    after = cuda_binary("twice.cu", 120 if what == "device" else 90)

    assert after != before
    assert (compiler.runs, len(list(folder.iterdir()))) == (2, 2)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[:-1], id="cut-short"),
        pytest.param(lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:], id="one-bit"),
        pytest.param(lambda content: content + b"\0", id="longer"),
    ],
)
def test_a_damaged_file_costs_a_compilation_and_one_warning_that_names_it(damage, compiler, folder):
    binary = cuda_binary("twice.cu", 90)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))

    with pytest.warns(StoreWarning, match="is damaged") as caught:
        assert cuda_binary("twice.cu", 90) == binary
    assert cuda_binary("twice.cu", 90) == binary  # pytest makes a second warning an error

    assert str(path) in str(caught[0].message)
    assert (compiler.runs, path.read_bytes()) == (2, whole)


def test_a_file_that_cannot_be_read_is_compiled_anew(compiler, folder):
    binary = cuda_binary("twice.cu", 90)
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()

    with pytest.warns(StoreWarning) as caught:
        assert cuda_binary("twice.cu", 90) == binary

    assert ["cannot be read" in str(entry.message) for entry in caught] == [True, False]
    assert "cannot be written" in str(caught[1].message)
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_costs_a_warning_and_leaves_nothing(compiler, folder, monkeypatch):
    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.warns(StoreWarning, match=r"cannot be written \(disk full\)"):
        binary = cuda_binary("twice.cu", 90)

    assert binary.startswith(b"nvrtc 13.0")
    assert list(folder.iterdir()) == []


def test_callers_at_once_all_get_the_whole_binary(compiler, folder):
    with ThreadPoolExecutor(8) as pool:
        binaries = set(pool.map(lambda _: cuda_binary("twice.cu", 90), range(64)))

    assert binaries == {cuda_binary("twice.cu", 90)}
    assert len(list(folder.iterdir())) == 1


def test_what_does_not_compile_is_not_kept(compiler, folder):
    compiler.broken = True
    with pytest.raises(CudaCompileError, match=r"twice\.cu does not compile"):
        cuda_binary("twice.cu", 90)
    assert not folder.exists()

    compiler.broken = False
    assert cuda_binary("twice.cu", 90).startswith(b"nvrtc 13.0")


@pytest.mark.parametrize("name", ["thrice.cu", "../twice.cu", "twice"])
def test_a_source_that_is_not_there_is_refused_by_the_nearest_name(name, compiler):
    with pytest.raises(ConfigError, match=r"perhaps 'twice\.cu'"):
        cuda_binary(name, 90)


# ---- the compiler's library


def _library(folder, name):
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"")
    return folder / name


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without NVRTC, as far as can be told from its import path and its variables."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(nvrtc, "_SYSTEM_FOLDERS", ())
    for name in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    find_nvrtc.cache_clear()
    yield tmp_path
    find_nvrtc.cache_clear()


def test_a_wheel_is_taken_before_a_toolkit(bare, monkeypatch):
    toolkit = _library(bare / "toolkit" / "lib64", "libnvrtc.so.12")
    monkeypatch.setenv("CUDA_HOME", str(bare / "toolkit"))
    assert find_nvrtc() == toolkit

    find_nvrtc.cache_clear()
    _library(bare / "site" / "nvidia" / "cublas" / "lib", "libcublas.so.13")
    wheel = _library(bare / "site" / "nvidia" / "cu13" / "lib", "libnvrtc.so.13")
    (wheel.parent / "libnvrtc-builtins.so.13.0").write_bytes(b"")
    (wheel.parent / "libnvrtc.alt.so.13").write_bytes(b"")
    assert find_nvrtc() == wheel


def test_a_machine_without_nvrtc_says_what_to_install(bare):
    assert not is_installed("nvrtc")
    with pytest.raises(ConfigError, match="pip install nvidia-cuda-nvrtc"):
        compiler_identity()


def test_a_row_in_cuda_counts_as_installed_where_the_library_is(bare):
    _library(bare / "site" / "nvidia" / "cu13" / "lib", "libnvrtc.so.13")
    assert is_installed("nvrtc")


def test_a_library_that_is_another_file_is_another_compiler(bare):
    library = _library(bare / "site" / "nvidia" / "cu13" / "lib", "libnvrtc.so.13")
    before = compiler_identity()
    library.write_bytes(b"another")
    assert compiler_identity() != before


def test_a_device_newer_than_the_compiler_gets_ptx_of_the_newest_before_it():
    assert architecture_for(90, (80, 90, 120)) == "sm_90"
    assert architecture_for(103, (80, 90, 120)) == "compute_90"
    assert architecture_for(130, (80, 90, 120)) == "compute_120"
    with pytest.raises(ConfigError, match="got sm70, wanted one of sm80, sm90"):
        architecture_for(70, (80, 90))


def test_the_folder_imports_without_torch():
    modules = [f"rapid_llm.kernels.jit.{file.stem}" for file in Path(nvrtc.__file__).parent.glob("*.py")]
    code = f"import sys; sys.modules.update(torch=None, triton=None); [__import__(module) for module in {modules!r}]"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


# ---- the launch


class FakeDriver:
    """Reads the arguments of a launch back as the real driver does: from the addresses it is given, by each one's type."""

    def __init__(self, *types):
        self.types, self.answers, self.launches, self.made_current = types, [], [], []

    def launch(self, function, *shape_and_more):
        *shape, shared, stream, pointers, extra = shape_and_more
        places = (ctypes.c_void_p * len(self.types)).from_address(pointers)
        values = [kind.from_address(place).value for kind, place in zip(self.types, places, strict=True)]
        aligned = all(place % ctypes.sizeof(kind) == 0 for kind, place in zip(self.types, places, strict=True))
        self.launches.append((function, shape, shared, stream, values, extra, aligned, pointers))
        return self.answers.pop(0) if self.answers else 0

    def make_current(self, device):
        self.made_current.append(device)

    def check(self, code, call):
        raise CudaDriverError(f"{call} failed", got=str(code), change="look")


def _kernel(driver, layout):
    return CudaKernel(driver, 7, layout, 0, stream_of=lambda device: 500 + device, current_device=lambda: 0)


def test_a_launch_hands_every_argument_over_in_its_own_type():
    driver = FakeDriver(ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float, ctypes.c_void_p)

    _kernel(driver, "PiqfP")(3, 64, 1 << 60, -5, -(1 << 40), 0.5, 16)

    ((function, shape, shared, stream, values, extra, aligned, _),) = driver.launches
    assert (function, shape, shared, stream, extra, aligned) == (7, [3, 1, 1, 64, 1, 1], 0, 500, None, True)
    assert values == [1 << 60, -5, -(1 << 40), 0.5, 16]


def test_every_thread_has_arguments_of_its_own():
    driver = FakeDriver(ctypes.c_int)
    kernel = _kernel(driver, "i")
    kernel(1, 32, 1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(kernel, 1, 32, 2).result()

    (_, _, _, _, first, _, _, here), (_, _, _, _, second, _, _, there) = driver.launches
    assert (first, second) == ([1], [2])
    assert here != there


def test_a_thread_without_a_context_gets_one_and_launches():
    driver = FakeDriver(ctypes.c_int)
    driver.answers = [201]

    _kernel(driver, "i")(1, 32, 9)

    assert driver.made_current == [0]
    assert [launch[4] for launch in driver.launches] == [[9], [9]]


@pytest.mark.parametrize("answers", [pytest.param([700], id="a-fault"), pytest.param([201, 201], id="no-context-at-all")])
def test_a_launch_that_is_refused_raises(answers):
    driver = FakeDriver(ctypes.c_int)
    driver.answers = list(answers)
    with pytest.raises(CudaDriverError, match=f"cuLaunchKernel failed: got {answers[-1]}"):
        _kernel(driver, "i")(1, 32, 9)


@pytest.mark.case("G11")
def test_the_cuda_row_refuses_tensors_of_a_cpu():
    x, residual = torch.ones(3, 64), torch.zeros(3, 64)
    with pytest.raises(KernelInputError, match="wanted tensors on a CUDA device"):
        add_rms_norm(x, residual, torch.ones(64), out=x, eps=1e-5)
    assert (residual == 0).all()


# ---- evidence and rank

KERNEL = 'CUDA_SOURCE = "twice.cu"\n\n\ndef double(x, *, out):\n    return out\n'


def test_an_edit_of_the_cuda_source_voids_the_evidence(world, compiler):
    row = world.row("nvrtc.double", target=world.module("kernel_twice", KERNEL))
    world.passed(row)
    source = sources.FOLDER / "twice.cu"

    def state():
        return evidence_for(row, CPU, triton=None, here=True, records=load_records())

    assert state().state == "verified_here"
    source.write_text("// Twice x.\n\n" + TWICE.replace("  x[", "    x["), encoding="utf-8")
    assert state().state == "verified_here"
    source.write_text(TWICE.replace("2", "3"), encoding="utf-8")
    assert "no passing run of its source" in state().why_not
    source.unlink()
    assert "not there to be hashed" in state().why_not


def test_the_options_are_part_of_the_hash_and_of_no_other_modules(world, compiler, monkeypatch):
    cuda, plain = world.module("kernel_twice", KERNEL), world.module("kernel_plain")
    before = source_hash(cuda), source_hash(plain)

    monkeypatch.setattr(sources, "OPTIONS", ("--use_fast_math",))

    assert source_hash(cuda) != before[0]
    assert source_hash(plain) == before[1]


def test_a_cuda_source_that_a_module_imports_counts_too(tmp_path, compiler):
    ops = "rapid_llm.kernels.ops"
    texts = {f"{ops}.norm.rms": f"from {ops}.norm import launch", f"{ops}.norm.launch": KERNEL}

    def find(module):
        path = tmp_path / f"{module}.py"
        if module in texts:
            path.write_text(texts[module], encoding="utf-8")
            return path
        return None

    before = source_hash(f"{ops}.norm.rms:f", find=find)
    (sources.FOLDER / "twice.cu").write_text(TWICE.replace("2", "3"), encoding="utf-8")

    assert source_hash(f"{ops}.norm.rms:f", find=find) != before


def _passed(row, **fields):
    return EvidenceRecord(
        row=row.name,
        op=row.op,
        source_hash=source_hash(row.target),
        device="h200",
        toolchain={"torch": "2.11.0", "triton": "3.6", "python": "3.12.3"},
        cases={"count": 1, "ids": ["a"]},
        errors={},
        command="",
        commit="",
        date="2026-11-29T00:00:00Z",
        **fields,
    )


@pytest.mark.parametrize(
    ("latencies", "first"),
    [
        pytest.param({}, "triton.add_rms_norm", id="nothing-measured"),
        pytest.param({"triton": 3.0, "nvrtc": 3.5}, "triton.add_rms_norm", id="measured-slower"),
        pytest.param({"triton": 3.0, "nvrtc": 2.5}, "nvrtc.add_rms_norm", id="measured-faster"),
    ],
)
def test_the_cuda_row_serves_only_where_it_was_measured_to_be_faster(latencies, first):
    bucket = latency_key(catalog().contract("add_rms_norm"), "bfloat16", {"num_tokens": 1, "d": 4096})
    records = []
    for backend in ("triton", "nvrtc"):
        row = catalog().row("add_rms_norm", f"{backend}.add_rms_norm")
        measured = {bucket: latencies[backend]} if latencies else {}
        records.append(_passed(row, latencies_us=measured))

    ranking = rank(Question("add_rms_norm", H200, "bfloat16", {"d": 4096}, here=False), catalog(), records)

    assert ranking.eligible[0].row.name == first


# ---- on a GPU

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available() or find_nvrtc() is None, reason="needs a GPU and NVRTC")


def _inputs():
    x, residual = (torch.randn(4, 4096, device="cuda").bfloat16() for _ in range(2))
    return x, residual, torch.randn(4096, device="cuda").bfloat16()


@on_a_gpu
def test_the_cuda_row_can_be_captured_and_replayed():
    x, residual, weight = _inputs()
    out, before = torch.empty_like(x), residual.clone()
    add_rms_norm(x, residual, weight, out=out, eps=1e-5)  # loads it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_rms_norm(x, residual, weight, out=out, eps=1e-5)
    residual.copy_(before)
    out.zero_()

    graph.replay()

    expected_residual, _ = reference.add_rms_norm(x, before, weight, eps=1e-5)
    torch.testing.assert_close(residual.double(), expected_residual, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(out.double(), reference.rms_norm(residual, weight, eps=1e-5), rtol=2**-8, atol=1e-6)


@on_a_gpu
def test_the_cuda_row_runs_in_a_thread_that_used_no_gpu_before():
    x, residual, weight = _inputs()
    out = torch.empty_like(x)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(add_rms_norm, x, residual, weight, out=out, eps=1e-5).result()

    torch.cuda.synchronize()
    torch.testing.assert_close(out.double(), reference.rms_norm(residual, weight, eps=1e-5), rtol=2**-8, atol=1e-6)


@on_a_gpu
def test_the_cuda_row_is_among_those_that_the_ops_tests_run():
    names = [parameter.values[0].spec.name for parameter in each_row_of("add_rms_norm").args[1]]
    assert "nvrtc.add_rms_norm" in names
