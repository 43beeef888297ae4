"""Names of models and the hub's cache on this disk: what counts as whole, what wins, and that no name leads anywhere else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rapid_llm.checkpoint.gguf import GgufCheckpoint
from rapid_llm.checkpoint.hub import Absent, ModelName, cache_folder, find_model, offline_switch, parse_model_name
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.errors import CheckpointError, ConfigError
from tests.checkpoint.hub_server import files_of, put_in_cache
from tests.checkpoint.writers import llama_gguf, llama_tensors, write_folder

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no switch set, and a working folder that holds nothing."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return files_of(write_folder(tmp_path_factory.mktemp("single"), tokenizer={}))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return files_of(write_folder(tmp_path_factory.mktemp("sharded"), tokenizer={}, num_shards=2))


@pytest.fixture(scope="module")
def gguf():
    return llama_gguf(llama_tensors()).to_bytes()


def refusal_of(*arguments, error=CheckpointError, **options):
    with pytest.raises(error) as refusal:
        find_model(*arguments, **options)
    return str(refusal.value)


# --- names ---


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", ModelName("org/name")),
        ("0_org-x/Na.me-1_", ModelName("0_org-x/Na.me-1_")),
        ("org/name:m.Q8_0.gguf", ModelName("org/name", file="m.Q8_0.gguf")),
        ("org/name:sub/dir/m (1).gguf", ModelName("org/name", file="sub/dir/m (1).gguf")),
        ("org/name:Q4_K_M", ModelName("org/name", tag="Q4_K_M")),
    ],
)
def test_a_name_is_a_repository_and_perhaps_a_file(text, name):
    assert parse_model_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "/name", "org/", "a/b/c", "org/name:", ":x", "org /name", "org/na\tme", "org/name\n", "örg/name"),
        *(
            "../name",
            "org/..",
            "./name",
            "org/.",
            "org/.hidden",
            "org/name.",
            "-org/name",
            "o..g/name",
            "org/na--me",
            "org/name.git",
        ),
        *("org\\name/x", "org/name:/etc/x.gguf", "org/name:../x.gguf", "org/name:a/../x.gguf", "org/name:a//x.gguf"),
        *(
            "org/name:./x.gguf",
            "org/name:a\\..\\x.gguf",
            "org/name:x\0.gguf",
            "org/name:a/b",
            "org/name:..",
            "org/name:model.bin",
        ),
        *("org/name:model.safetensors", "o" * 97 + "/name", "org/" + "n" * 97, "org/name:Q4:K"),
    ],
)
def test_what_is_no_name_is_refused_and_the_refusal_shows_it(text):
    with pytest.raises(CheckpointError) as refusal:
        parse_model_name(text)
    assert repr(text[:200]) in str(refusal.value)
    assert "org/name:file.gguf" in str(refusal.value)


@given(
    st.one_of(
        st.text(alphabet="ab.-_:/\\~Q4\0 ", max_size=24),
        st.text(max_size=24),
        st.from_regex(r"[\w.-]{1,6}/[\w.-]{1,6}(:[\w./ -]{1,12}(\.gguf)?)?", fullmatch=True),
    )
)
@example("a/b:c/../../../x.gguf")
def test_no_name_leads_out_of_its_folder_of_the_cache(text):
    from huggingface_hub.utils import validate_repo_id

    try:
        name = parse_model_name(text)
    except CheckpointError:
        return
    assert str(name) == text
    validate_repo_id(name.repo)  # and none is accepted that the hub would not have
    root = "/cache/models--" + name.repo.replace("/", "--") + "/snapshots/commit/"
    assert Path(name.folder).name == name.folder
    assert os.path.normpath(f"/cache/{name.folder}/snapshots/commit/{name.file or 'x'}").startswith(root)


@given(
    st.text(alphabet="ab/:.~g\\", max_size=12), st.none() | st.text(alphabet="a0./\\~", min_size=1, max_size=12), st.booleans()
)
def test_any_text_is_a_path_a_name_or_refused(text, revision, offline):
    try:
        found = find_model(text, revision, offline=offline)
    except (CheckpointError, ConfigError):
        return
    assert isinstance(found, Absent) or found == Path(text)


# --- where the cache is ---


CACHES = [
    {},
    {"XDG_CACHE_HOME": "/xdg"},
    {"HF_HOME": "/home-of-hf", "XDG_CACHE_HOME": "/xdg"},
    {"HF_HOME": "~/hf"},
    {"HF_HOME": "$ROOT/hf"},
    {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"},
    {"HF_HUB_CACHE": "/new", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"},
    {"HF_HUB_CACHE": "~$ROOT/new"},
]
SWITCHES = [
    {},
    {"HF_HUB_OFFLINE": "1"},
    {"HF_HUB_OFFLINE": "yes"},
    {"HF_HUB_OFFLINE": "0"},
    {"HF_HUB_OFFLINE": "2"},
    {"TRANSFORMERS_OFFLINE": "True"},
    {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"},
    {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "on"},
]
ASK_LIBRARY = """
import importlib, json, os, sys
from huggingface_hub import constants
told = []
for variables in json.loads(sys.argv[1]):
    for name in json.loads(sys.argv[2]):
        os.environ.pop(name, None)
    os.environ.update(variables)
    importlib.reload(constants)
    told.append([constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE])
print(json.dumps(told))
"""


def test_cache_and_offline_variables_mean_what_the_library_says(monkeypatch):
    monkeypatch.setenv("ROOT", "/root-of-all")
    arguments = [json.dumps(CACHES + SWITCHES), json.dumps(VARIABLES)]
    done = subprocess.run([sys.executable, "-c", ASK_LIBRARY, *arguments], capture_output=True, text=True, check=True)
    for variables, (folder, is_offline) in zip(CACHES + SWITCHES, json.loads(done.stdout), strict=True):
        with monkeypatch.context() as patch:
            for name in VARIABLES:
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            assert str(cache_folder()) == folder, variables
            assert bool(offline_switch()) == is_offline, variables


def test_an_empty_variable_counts_as_not_set(monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "")
    monkeypatch.setenv("HF_HOME", "/hf")
    assert cache_folder() == Path("/hf/hub")


# --- what is whole ---


def test_a_cached_model_is_found_by_branch_tag_and_commit(cache, single, sharded):
    main = put_in_cache(cache, "org/name", single, "main")
    other = put_in_cache(cache, "org/name", sharded, "v1.0", "refs/pr/1")
    assert find_model("org/name") == find_model("org/name", "main") == find_model("org/name", main.name) == main
    assert find_model("org/name", "v1.0") == find_model("org/name", "refs/pr/1") == other
    assert find_model("org/name", other.name, offline=True) == other
    for snapshot in (main, other):
        assert isinstance(open_checkpoint(snapshot), SafetensorsCheckpoint)
    assert isinstance(find_model("org/name", "v2"), Absent)
    assert isinstance(find_model("org/other"), Absent)


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (":m-Q8_0.gguf", "m-Q8_0.gguf"),
        (":low/m-Q4_K_M.gguf", "low/m-Q4_K_M.gguf"),
        (":Q4_K_M", "low/m-Q4_K_M.gguf"),
        (":q8", "m-Q8_0.gguf"),
        (":m-Q4_K_M.gguf", None),
        (":F16", None),
        (":low", None),
    ],
)
def test_a_gguf_file_is_found_by_its_path_or_a_part_of_its_name(cache, gguf, choice, found):
    snapshot = put_in_cache(cache, "org/name", {"m-Q8_0.gguf": gguf, "low/m-Q4_K_M.gguf": gguf}, "main")
    if found:
        assert find_model(f"org/name{choice}") == snapshot / found
        assert isinstance(open_checkpoint(snapshot / found), GgufCheckpoint)
    else:
        assert isinstance(find_model(f"org/name{choice}"), Absent)
        assert f"offline, and missing: {choice[1:] if '.gguf' in choice else 'a .gguf file with'}" in refusal_of(
            f"org/name{choice}", offline=True
        )


def test_a_part_of_several_names_is_refused_with_all_of_them(cache, gguf):
    put_in_cache(cache, "org/name", {"m-Q8_0.gguf": gguf, "n-q8_0.gguf": gguf}, "main")
    told = refusal_of("org/name:Q8_0")
    assert "m-Q8_0.gguf, n-q8_0.gguf" in told
    assert "name it, as org/name:m-Q8_0.gguf" in told


def test_a_snapshot_with_one_gguf_and_no_safetensors_is_that_file(cache, gguf, single):
    snapshot = put_in_cache(cache, "org/name", {"sub/m.gguf": gguf, "config.json": b"{}"}, "main")
    assert find_model("org/name") == snapshot / "sub/m.gguf"
    both = put_in_cache(cache, "org/both", {"m.gguf": gguf, **single}, "main")
    assert find_model("org/both") == both
    assert find_model("org/both:m.gguf") == both / "m.gguf"
    put_in_cache(cache, "org/two", {"a.gguf": gguf, "b.gguf": gguf}, "main")
    assert isinstance(find_model("org/two"), Absent)


ALL = ("config.json", "tokenizer.json", "tokenizer_config.json", INDEX, *SHARDS)


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        pytest.param(ALL, ("every file",), id="nothing"),
        pytest.param([INDEX, *SHARDS], ("*.safetensors",), id="weights"),
        pytest.param(SHARDS[1:], SHARDS[1:], id="a-shard"),
        pytest.param(SHARDS, SHARDS, id="all-shards"),
        pytest.param([INDEX], (INDEX,), id="index"),
        pytest.param([INDEX, SHARDS[1]], (INDEX,), id="index-and-a-shard"),
        pytest.param(["config.json"], ("config.json",), id="config"),
        pytest.param(["tokenizer.json"], ("tokenizer.json",), id="tokenizer"),
        pytest.param([name for name in ALL if name != "config.json"], ("tokenizer.json", "*.safetensors"), id="all-but-config"),
    ],
)
def test_a_snapshot_that_lacks_something_is_not_used_and_the_refusal_lists_it(cache, sharded, without, missing):
    snapshot = put_in_cache(cache, "org/name", sharded, "main")
    for name in without:
        (snapshot / name).unlink()
    assert find_model("org/name") == Absent(ModelName("org/name"), "main", cache, missing)
    told = refusal_of("org/name", offline=True)
    assert f"org/name (revision main) is not whole in {cache}: got offline, and missing: {', '.join(missing)};" in told


def test_a_link_to_a_blob_that_is_not_whole_yet_is_no_file(cache, single):
    snapshot = put_in_cache(cache, "org/name", single, "main")
    blob = (snapshot / "model.safetensors").resolve()
    blob.rename(blob.with_suffix(".12345678.incomplete"))
    assert find_model("org/name").missing == ("*.safetensors",)


def test_what_lies_there_as_plain_files_counts_too(cache, single):
    snapshot = put_in_cache(cache, "org/name", single, "main")
    for name in single:
        (snapshot / name).resolve().replace(snapshot / name)
    assert find_model("org/name") == snapshot


def test_an_unreferenced_commit_is_named_offline_and_not_taken(cache, single, sharded):
    whole = put_in_cache(cache, "org/name", single)
    put_in_cache(cache, "org/name", {"config.json": sharded["config.json"]}, "main")
    assert isinstance(find_model("org/name"), Absent)
    assert f"or take revision {whole.name}, which is there." in refusal_of("org/name", offline=True)


@pytest.mark.parametrize(
    "ref",
    [b"../../../secret", b"", b"main", b"\xff\xfe", b"0" * 39, b"0" * 40 + b"/.."],
    ids=["leads-out", "empty", "name", "binary", "short", "long"],
)
def test_a_ref_that_is_no_commit_is_not_followed(cache, tmp_path, single, ref):
    snapshot = put_in_cache(cache, "org/name", single, "main")
    write_folder(tmp_path / "secret", tokenizer={})
    (snapshot.parents[1] / "refs" / "main").write_bytes(ref)
    assert isinstance(find_model("org/name"), Absent)
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name + "\n")
    assert find_model("org/name") == snapshot


# --- paths win ---


@pytest.mark.parametrize("text", ["org/name", "./org/name"])
def test_a_folder_here_wins_over_the_cache(cache, single, text):
    put_in_cache(cache, "org/name", single, "main")
    write_folder(Path("org/name"), tokenizer={})
    assert find_model(text) == Path(text)
    assert find_model(text, offline=True) == Path(text)
    told = refusal_of("org/name:m.gguf")
    assert "org/name is a path here, which wins over the hub: got org/name:m.gguf; name the file, as org/name/FILE.gguf" in told


@pytest.mark.parametrize(
    "text",
    ["name", "./org/name", "../org/name", "/org/name", "~/name", "~org/name", "a/b/c", "org/name/", "name.gguf", "org/m.gguf"],
)
def test_what_is_written_as_a_path_is_never_looked_up(cache, single, text):
    for repo in ("org/name", "org/m.gguf"):
        put_in_cache(cache, repo, single, "main")
    assert find_model(text, offline=True) == Path(text)
    assert find_model(Path("org/name"), offline=True) == Path("org/name")
    if not text.startswith("~"):
        with pytest.raises(CheckpointError, match="no such file or folder"):
            open_checkpoint(find_model(text))


@pytest.mark.parametrize("model", ["./org/name", "here.gguf", Path("org/name")], ids=str)
def test_a_revision_of_a_path_is_refused(model):
    assert "revision has no effect on a path" in refusal_of(model, "v1", error=ConfigError)


@pytest.mark.parametrize(
    "revision", ["", "..", "../x", "a/../b", "/etc", "a//b", "a/", "a\\b", "x\0", "a b", "x" * 256, "~"], ids=repr
)
def test_a_revision_that_cannot_be_one_is_refused(cache, single, revision):
    put_in_cache(cache, "org/name", single, "main")
    assert "revision cannot be used" in refusal_of("org/name", revision, error=ConfigError)


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_the_refusal_names_the_switch_that_is_on(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert f"got {name}, and missing: every file" in refusal_of("org/name")


def test_finding_imports_neither_torch_nor_the_library(cache, single):
    put_in_cache(cache, "org/name", single, "main")
    code = (
        "import sys; sys.modules.update(torch=None, huggingface_hub=None, transformers=None)\n"
        "from rapid_llm.checkpoint.hub import find_model; print(find_model('org/name'), type(find_model('org/other')).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Absent\n")
