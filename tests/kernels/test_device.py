"""The device table, and what is read of this machine."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from rapid_llm.errors import ConfigError
from rapid_llm.kernels import device as devices
from rapid_llm.kernels.device import current_device, device_info, is_this_machine, known_devices, probe_device


@pytest.fixture(autouse=True)
def _fresh_caches():
    current_device.cache_clear()
    probe_device.cache_clear()
    yield
    current_device.cache_clear()
    probe_device.cache_clear()


@pytest.fixture
def torch_with_gpus(monkeypatch):
    def install(*properties, cuda="13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])

    return install


def _properties(name, major, minor, smem):
    return SimpleNamespace(name=name, major=major, minor=minor, shared_memory_per_block_optin=smem)


@pytest.mark.parametrize(
    ("name", "sm", "smem", "fp8"),
    [
        ("h200", 90, 232_448, True),
        ("h100", 90, 232_448, True),
        ("a100", 80, 166_912, False),
        ("rtx3090", 86, 101_376, False),
        ("rtx4090", 89, 101_376, True),
        ("l40s", 89, 101_376, True),
        ("b200", 100, 232_448, True),
        ("rtx5090", 120, 101_376, True),
        ("t4", 75, 65_536, False),
        ("cpu", None, None, False),
    ],
)
def test_the_table_holds_the_facts_that_choices_hang_on(name, sm, smem, fp8):
    info = device_info(name)

    assert (info.name, info.sm, info.smem, info.native_fp8) == (name, sm, smem, fp8)
    assert name in known_devices()


def test_an_unknown_device_is_refused_and_the_nearest_is_named():
    with pytest.raises(ConfigError, match=r"'h20'.*perhaps 'h200'"):
        device_info("h20")


def test_without_a_gpu_the_current_device_is_the_cpu(torch_with_gpus):
    torch_with_gpus()

    assert current_device(None) == current_device("cpu") == device_info("cpu")
    assert devices.sm_version() is None
    assert devices.smem_limit() is None
    assert devices.has_native_fp8() is False


def test_a_card_of_the_table_is_known_by_its_title(torch_with_gpus):
    torch_with_gpus(_properties("NVIDIA H200", 9, 0, 232_448))

    assert current_device(None) == current_device("cuda") == device_info("h200")
    assert (devices.sm_version(), devices.smem_limit(), devices.has_native_fp8()) == (90, 232_448, True)


def test_another_card_gets_a_name_of_its_own_and_what_the_driver_says(torch_with_gpus):
    torch_with_gpus(_properties("NVIDIA H200", 9, 0, 232_448), _properties("NVIDIA GeForce RTX 4090 Laptop GPU", 8, 9, 101_000))

    info = current_device("cuda:1")

    assert (info.name, info.sm, info.smem, info.native_fp8) == ("nvidia-geforce-rtx-4090-laptop-gpu", 89, 101_000, True)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        pytest.param("cuda", "sees 0 CUDA devices", id="no-gpu"),
        pytest.param("cuda:3", "sees 0 CUDA devices", id="no-such-index"),
        pytest.param("gpu", "cuda, cuda:N or cpu", id="no-such-kind"),
        pytest.param("cuda:x", "cuda, cuda:N or cpu", id="no-index"),
    ],
)
def test_a_device_that_is_not_there_is_refused(kind, told, torch_with_gpus):
    torch_with_gpus()

    with pytest.raises(ConfigError, match=told):
        current_device(kind)


def test_a_torch_build_for_other_makers_has_no_cuda_device(torch_with_gpus):
    torch_with_gpus(_properties("AMD Instinct MI300X", 9, 4, 65_536), cuda=None)

    assert current_device(None).type == "cpu"
    with pytest.raises(ConfigError, match="no such GPU"):
        current_device("cuda")


@pytest.fixture
def nvidia_smi(monkeypatch):
    def install(answer):
        def run(command, **_):
            if isinstance(answer, Exception):
                raise answer
            return subprocess.CompletedProcess(command, 0, stdout=answer)

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(devices.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
        monkeypatch.setattr(devices.subprocess, "run", run)

    return install


@pytest.mark.parametrize(
    ("answer", "name", "smem"),
    [
        pytest.param("NVIDIA H200, 9.0\nNVIDIA H200, 9.0\n", "h200", 232_448, id="known"),
        pytest.param("NVIDIA RTX A6000, 8.6\n", "nvidia-rtx-a6000", 101_376, id="not-in-the-table"),
        pytest.param("NVIDIA Future, 13.0\n", "nvidia-future", 101_376, id="not-yet-made"),
        pytest.param("\n", "cpu", None, id="nothing"),
        pytest.param("NVIDIA-SMI has failed\n", "cpu", None, id="a-complaint"),
        pytest.param(subprocess.TimeoutExpired("nvidia-smi", 20), "cpu", None, id="no-answer"),
        pytest.param(subprocess.CalledProcessError(9, "nvidia-smi"), "cpu", None, id="failure"),
    ],
)
def test_the_probe_reads_nvidia_smi_and_else_says_cpu(answer, name, smem, nvidia_smi):
    nvidia_smi(answer)

    assert (probe_device().name, probe_device().smem) == (name, smem)


def test_hidden_gpus_are_not_probed(nvidia_smi, monkeypatch):
    nvidia_smi("NVIDIA H200, 9.0\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert probe_device().name == "cpu"


def test_only_the_probed_gpu_and_the_cpu_are_this_machine(nvidia_smi):
    nvidia_smi("NVIDIA H200, 9.0\n")

    assert is_this_machine(device_info("h200"))
    assert is_this_machine(device_info("cpu"))
    assert not is_this_machine(device_info("a100"))
