"""Downloads by the real huggingface_hub, from a hub on localhost: what is fetched, what never is, and what every refusal says."""

import json
import sys
import threading
import traceback

import pytest

from rapid_llm.checkpoint import hub_download
from rapid_llm.checkpoint.gguf import GgufCheckpoint
from rapid_llm.checkpoint.hub import Absent, find_model
from rapid_llm.checkpoint.hub_download import download
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.checkpoint.safetensors import SafetensorsCheckpoint
from rapid_llm.errors import CheckpointError
from tests.checkpoint.hub_server import HubServer, files_of, point_client_at, put_in_cache
from tests.checkpoint.writers import llama_config, llama_gguf, llama_tensors, write_folder

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
TOKEN = "hf_" + "abcdefgh" * 4
NEVER = {
    "pytorch_model.bin": b"PK\x03\x04",
    "training_args.bin": b"PK\x03\x04",
    "optimizer.pt": b"PK\x03\x04",
    "modeling_llama.py": b"print('code')",
    "consolidated.safetensors": b"the same weights again",
    "original/model.safetensors": b"and again",
    "README.md": b"words",
    "m.gguf": b"GGUF",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = HubServer()
    point_client_at(server.url, monkeypatch, tmp_path)
    yield server
    server.close()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return files_of(write_folder(tmp_path_factory.mktemp("single"), tokenizer={}, generation={"temperature": 0.5}))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return files_of(write_folder(tmp_path_factory.mktemp("sharded"), tokenizer={}, num_shards=2))


@pytest.fixture(scope="module")
def gguf():
    return llama_gguf(llama_tensors()).to_bytes()


def fetch(model, revision=None, progress=None):
    """What LLM does with a name: the path, downloaded if it must be."""
    found = find_model(model, revision)
    return download(found, progress) if isinstance(found, Absent) else found


def refusal_of(model, revision=None):
    """The refusal's text. Neither it nor its traceback shows the token."""
    with pytest.raises(CheckpointError) as refusal:
        fetch(model, revision)
    assert TOKEN not in "".join(traceback.format_exception(refusal.value))
    return str(refusal.value)


# --- what is fetched ---


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_model_is_downloaded_once_and_then_works_with_the_hub_gone(hub, cache, request, layout, capfd, monkeypatch):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # the client would draw its bars even where nobody looks
    files = request.getfixturevalue(layout)
    commit = hub.add("org/name", files | NEVER)
    path = fetch("org/name")
    assert path == cache / "models--org--name" / "snapshots" / commit
    assert files_of(path) == files
    assert sorted(hub.fetched()) == sorted(files)
    assert isinstance(open_checkpoint(path), SafetensorsCheckpoint)
    hub.close()
    asked = list(hub.asked)
    assert fetch("org/name") == fetch("org/name", commit) == find_model("org/name", offline=True) == path
    assert hub.asked == asked
    assert capfd.readouterr() == ("", "")


def test_the_token_reaches_the_hub(hub, single):
    hub.add("org/name", single)
    fetch("org/name")
    assert f"Bearer {TOKEN}" in hub.tokens


def test_only_what_is_missing_is_fetched(hub, cache, sharded):
    hub.add("org/name", sharded)
    snapshot = put_in_cache(cache, "org/name", sharded, "main")
    for name in (SHARDS[1], "tokenizer.json"):
        (snapshot / name).resolve().unlink()
        (snapshot / name).unlink()
    assert fetch("org/name") == snapshot
    assert hub.fetched() == ["tokenizer.json", SHARDS[1]]
    assert files_of(snapshot) == sharded


def test_a_cut_download_goes_on_where_it_stopped(hub, cache, sharded):
    hub.add("org/name", sharded)
    hub.refusals[SHARDS[1]] = (410, "")  # one that the client does not wait and ask again for
    assert "org/name could not be downloaded: got status 410" in refusal_of("org/name")
    assert find_model("org/name").missing == (SHARDS[1],)
    hub.refusals.clear()
    hub.asked.clear()
    assert isinstance(open_checkpoint(fetch("org/name")), SafetensorsCheckpoint)
    assert hub.fetched() == [SHARDS[1]]


def test_revisions_are_kept_apart(hub, single, sharded):
    hub.add("org/name", single)
    tagged = hub.add("org/name", sharded, "v1.0")
    assert files_of(fetch("org/name", "v1.0")) == sharded
    assert files_of(fetch("org/name")) == single
    hub.close()
    assert fetch("org/name", "v1.0") == fetch("org/name", tagged) != fetch("org/name")


def test_a_commit_that_is_there_by_its_hash_gets_its_branch_noted(hub, single):
    commit = hub.add("org/name", single)
    path = fetch("org/name", commit)
    assert isinstance(find_model("org/name"), Absent)
    hub.asked.clear()
    assert fetch("org/name") == path
    assert hub.fetched() == []
    hub.close()
    assert fetch("org/name") == path


@pytest.mark.parametrize(
    ("choice", "fetched"),
    [
        (":m-Q8_0.gguf", "m-Q8_0.gguf"),
        (":Q4_K_M", "low/m-Q4_K_M.gguf"),
        (":low/m-Q4_K_M.gguf", "low/m-Q4_K_M.gguf"),
        (":whole", "whole-00001-of-00001.gguf"),
    ],
)
def test_of_a_named_gguf_only_that_file_is_fetched(hub, gguf, single, choice, fetched):
    files = {"m-Q8_0.gguf": gguf, "low/m-Q4_K_M.gguf": gguf, "whole-00001-of-00001.gguf": gguf, **single}
    hub.add("org/name", files)
    path = fetch(f"org/name{choice}")
    assert path.as_posix().endswith(f"/{fetched}")
    assert hub.fetched() == [fetched]
    assert isinstance(open_checkpoint(path), GgufCheckpoint)
    hub.close()
    assert fetch(f"org/name{choice}") == path


def test_a_repository_with_one_gguf_and_no_safetensors_is_that_file(hub, gguf):
    hub.add("org/name", {"config.json": b"{}", "README.md": b"words", "m.gguf": gguf})
    assert isinstance(open_checkpoint(fetch("org/name")), GgufCheckpoint)
    assert hub.fetched() == ["m.gguf"]


# --- what is refused, before anything large is fetched ---


def without(files, *names):
    return {name: data for name, data in files.items() if name not in names}


REFUSED = [
    pytest.param(
        lambda own: without(own, "model.safetensors") | {"pytorch_model.bin": b"PK", "x.pt": b"PK"},
        "org/name",
        "pickles, which are code and never fetched: pytorch_model.bin, x.pt",
        id="pickles-only",
    ),
    pytest.param(lambda own: {"model.bin": b"", "README.md": b""}, "org/name", "never fetched: model.bin", id="nothing-else"),
    pytest.param(lambda own: {"README.md": b""}, "org/name", "no weights of a kind that is read", id="no-weights"),
    pytest.param(lambda own: without(own, "config.json"), "org/name", "no config.json in it", id="no-config"),
    pytest.param(lambda own: without(own, "tokenizer.json"), "org/name", "no tokenizer.json in it", id="no-tokenizer"),
    pytest.param(
        lambda own: {"a.gguf": b"GGUF", "b/c.gguf": b"GGUF"},
        "org/name",
        "several .gguf files: got a.gguf, b/c.gguf, wanted one; name it, as org/name:a.gguf",
        id="several-ggufs",
    ),
    pytest.param(
        lambda own: {"a-Q8.gguf": b"", "b-q8.gguf": b""}, "org/name:Q8", "got a-Q8.gguf, b-q8.gguf", id="part-of-several"
    ),
    pytest.param(lambda own: {"a.gguf": b"GGUF"}, "org/name:b.gguf", "has no b.gguf: got a.gguf", id="no-such-gguf"),
    pytest.param(lambda own: own, "org/name:Q8", "has no Q8: got no .gguf file in it", id="no-gguf"),
    pytest.param(lambda own: {"m-00001-of-00003.gguf": b"GGUF"}, "org/name", "one of 3 parts", id="split-gguf"),
    pytest.param(
        lambda own: without(own, "model.safetensors") | {"a.safetensors": b"", "b.safetensors": b""},
        "org/name",
        "no model.safetensors.index.json in it",
        id="several-safetensors-without-an-index",
    ),
    pytest.param(
        lambda own: without(own, "model.safetensors") | {"model-00001-of-00002.safetensors": b""},
        "org/name",
        "no model.safetensors.index.json in it",
        id="a-shard-without-an-index",
    ),
    pytest.param(
        lambda own: without(own, "model.safetensors") | {INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'},
        "org/name",
        "no ../x.safetensors in it",
        id="index-that-leads-out",
    ),
    pytest.param(
        lambda own: {"../x.gguf": b"GGUF", "a/../../y.gguf": b"GGUF"}, "org/name", "no weights", id="names-that-lead-out"
    ),
]


@pytest.mark.parametrize(("make", "model", "words"), REFUSED)
def test_a_repository_that_cannot_be_served_is_refused(hub, single, make, model, words):
    hub.add("org/name", make(single))
    assert words in refusal_of(model)
    assert set(hub.fetched()) <= {"config.json", INDEX}


def test_a_model_that_cannot_run_is_refused_before_its_weights_come(hub, single):
    hub.add("org/name", single | {"config.json": json.dumps(llama_config(model_type="no_such_model")).encode()})
    assert "no_such_model" in refusal_of("org/name")
    assert hub.fetched() == ["config.json"]


def test_a_repository_that_changes_meanwhile_is_refused_and_right_the_next_time(hub, single, sharded):
    hub.add("org/name", single)

    def change(path):
        if path.startswith("/org/name/resolve"):
            hub.add("org/name", sharded)

    hub.before = change
    assert "org/name changed while it was fetched" in refusal_of("org/name")
    assert files_of(fetch("org/name")) == sharded


# --- what the hub refuses ---


@pytest.mark.parametrize(
    ("part", "status", "code", "words"),
    [
        ("/api/models", 401, "RepoNotFound", "the hub shows no model org/name, and there is no such path here: got status 401"),
        ("/api/models", 404, "RepoNotFound", "if the model is private, set HF_TOKEN or run `hf auth login`"),
        ("/api/models", 404, "", "the hub shows no model org/name"),
        (
            "/api/models",
            403,
            "",
            "the hub does not give org/name to this user: got status 403; ask for access on the model's page",
        ),
        ("/api/models", 404, "RevisionNotFound", "org/name has no revision 'main'"),
        ("/api/models", 429, "", "could not be downloaded: got status 429"),
        ("/resolve/", 403, "GatedRepo", "ask for access on the model's page, then set HF_TOKEN or run `hf auth login`"),
        ("/resolve/", 401, "GatedRepo", "the hub does not give org/name to this user"),
        ("/resolve/", 401, "", "the hub refuses the token: got status 401"),
        ("/resolve/", 404, "EntryNotFound", "the hub shows no model"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(hub, single, part, status, code, words):
    hub.add("org/name", single)
    hub.refusals[part] = (status, code)
    assert words in refusal_of("org/name")


def test_a_repository_that_is_not_there_says_so(hub):
    assert "the hub shows no model org/nothing" in refusal_of("org/nothing")


def test_a_revision_that_is_not_there_says_so(hub, single):
    hub.add("org/name", single)
    assert "org/name has no revision 'v9': got status 404; correct the revision." in refusal_of("org/name", "v9")


def test_without_a_network_the_refusal_says_what_needs_none(hub):
    hub.close()
    told = refusal_of("org/name")
    assert "org/name could not be downloaded: got Connect" in told
    assert "or name a path; a model that is whole in the cache needs no network." in told


def test_an_error_text_with_a_token_in_it_is_shown_without():
    told = hub_download._one_line(ValueError(f"Illegal header value b'Bearer {TOKEN}'\n{TOKEN} again"))
    assert told == "Illegal header value b'[secret] [secret] again"


def test_a_cache_that_cannot_be_written_says_so(hub, monkeypatch, single):
    import huggingface_hub

    hub.add("org/name", single)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    assert "cannot be written: got No space left on device; free it or set HF_HUB_CACHE." in refusal_of("org/name")


def test_without_the_library_the_refusal_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    told = refusal_of("org/name")
    assert "got no huggingface_hub to download it with, and missing: every file" in told
    assert "run `pip install 'rapid-llm[hub]'`, or name a path." in told


# --- progress ---


def test_progress_tells_bytes_of_all_that_is_fetched(hub, sharded, monkeypatch):
    monkeypatch.setattr(hub_download, "_PROGRESS_SECONDS", 0.001)
    hub.add("org/name", sharded)
    seen, first_is_told = [], threading.Event()
    first_is_there = len(sharded["tokenizer.json"]) + len(sharded["tokenizer_config.json"]) + len(sharded[SHARDS[0]])

    def progress(done, total, seconds):
        seen.append((done, total, seconds))
        if done == first_is_there:
            first_is_told.set()

    # The last file comes once the ones before it were told of.
    hub.before = lambda path: first_is_told.wait(60) if path.endswith(SHARDS[1]) else None
    fetch("org/name", progress=progress)
    total = first_is_there + len(sharded[SHARDS[1]])
    assert first_is_told.is_set()
    assert {entry[1] for entry in seen} == {total}
    assert [entry[0] for entry in seen] == sorted(entry[0] for entry in seen)
    assert seen[-1][0] == total
    assert all(entry[2] >= 0 for entry in seen)


def test_progress_counts_only_this_download(hub, cache, sharded):
    hub.add("org/name", sharded)
    snapshot = put_in_cache(cache, "org/name", sharded, "main")
    (snapshot / SHARDS[1]).resolve().unlink()
    (snapshot / SHARDS[1]).unlink()
    (snapshot.parents[1] / "blobs" / "left-over.incomplete").write_bytes(b"x" * 1000)
    seen = []
    fetch("org/name", progress=lambda *entry: seen.append(entry))
    assert seen[-1][:2] == (len(sharded[SHARDS[1]]),) * 2


def test_ctrl_c_ends_download_and_progress_at_once(hub, single, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import are_progress_bars_disabled

    download_file = huggingface_hub.hf_hub_download

    def interrupted(repo, file, **options):
        if file == "model.safetensors":
            raise KeyboardInterrupt
        return download_file(repo, file, **options)

    hub.add("org/name", single)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("org/name", progress=lambda *_: None)
    assert "download progress" not in [thread.name for thread in threading.enumerate()]
    assert not are_progress_bars_disabled("huggingface_hub.http_get")
