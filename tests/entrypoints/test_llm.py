"""LLM as its users call it, over a tiny random checkpoint."""

import json
import threading

import pytest

import rapid_llm
from rapid_llm import LLM, CheckpointError, ConfigError, RequestError, SamplingParams
from tests.checkpoint.hub_server import HubServer, files_of, point_client_at, put_in_cache
from tests.tiny_model import END_ID, VOCAB_SIZE, edit_json, expected_logits, save_checkpoint, tiny_llama, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), max_kv_tokens=1024, max_num_seqs=4)


def test_public_names_are_these():
    assert rapid_llm.__all__ == [
        "LLM",
        "AsyncLLM",
        "SamplingParams",
        "Grammar",
        "PoolingParams",
        "EngineConfig",
        "RequestOutput",
        "CompletionOutput",
        "Logprob",
        "RapidError",
        "ConfigError",
        "CheckpointError",
        "RequestError",
        "NoKernelError",
        "KernelInputError",
        "EngineDiedError",
        "ProtocolError",
        "__version__",
    ]
    for name in rapid_llm.__all__:
        assert getattr(rapid_llm, name)


def test_text_ids_and_lists_of_either_give_one_output_each(llm):
    [alone] = llm.generate("hello", GREEDY)
    ids = alone.prompt_token_ids
    outputs = llm.generate([ids, "hello", "other"], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs[:2]] == [alone.outputs[0].token_ids] * 2
    assert outputs[0].prompt is None
    assert outputs[2].prompt == "other"
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 3


def test_more_prompts_than_slots_and_a_mixed_list_of_params(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=3 + i, ignore_eos=True) for i in range(9)]
    outputs = llm.generate([f"prompt {i}" for i in range(9)], params)
    for i, output in enumerate(outputs):
        assert len(output.outputs[0].token_ids) == 3 + i
        [alone] = llm.generate(f"prompt {i}", params[i])
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def collect_last_step(engine):
    """On a GPU the step after a request's last may be under way when its answer is complete."""
    if engine.has_work:
        engine.step()


def test_stream_adds_up_to_generate(llm):
    [expected] = llm.generate("tell me ✓", GREEDY)
    text = ""
    for output in llm.stream("tell me ✓", GREEDY):
        text += output.outputs[0].delta
        assert output.outputs[0].text == text
    assert text == expected.outputs[0].text
    assert output.finished


def test_leaving_a_stream_frees_what_it_held(llm):
    engine = llm._engine
    for _ in llm.stream("hello", SamplingParams(temperature=0.0, ignore_eos=True)):
        break
    # the generator is closed as soon as nobody holds it
    collect_last_step(engine)
    assert not engine.has_work
    assert engine.scheduler.allocator.num_free == engine.config.num_pages
    assert not llm._live


def test_a_stream_that_nobody_begins_to_read_holds_nothing(llm):
    llm.stream("hello", GREEDY)
    assert not llm._engine.has_work
    assert not llm._live


def test_a_stream_has_all_its_text_when_another_ends_it(llm):
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    stream = llm.stream("hello", GREEDY)
    first = next(stream)
    said = first.outputs[0].text
    llm.generate("another, which is longer", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))

    items = [first, *stream]

    assert [item.finished for item in items] == [False, True]
    assert "".join(item.outputs[0].delta for item in items) == items[-1].outputs[0].text == whole.text
    assert (first.outputs[0].text, len(first.outputs[0].token_ids)) == (said, 1), "an item changed after it was given"


def test_streams_and_threads_share_steps_and_keep_their_own_text(llm):
    [expected] = llm.generate("a first prompt", GREEDY)
    stream = llm.stream("a first prompt", GREEDY)
    next(stream)
    results = {}

    def ask(name):
        results[name] = llm.generate(name, GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(f"thread {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    [*_, last] = stream
    for thread in threads:
        thread.join()
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    for name, ids in results.items():
        assert llm.generate(name, GREEDY)[0].outputs[0].token_ids == ids


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=16, ignore_eos=True)
    [alone] = llm.generate("hello", params)
    crowd = llm.generate(
        ["x", "hello", "something longer"], [SamplingParams(max_tokens=20), params, SamplingParams(max_tokens=7)]
    )
    assert crowd[1].outputs[0].token_ids == alone.outputs[0].token_ids
    [other] = llm.generate("hello", SamplingParams(temperature=1.0, seed=12, max_tokens=16, ignore_eos=True))
    assert other.outputs[0].token_ids != alone.outputs[0].token_ids


@pytest.mark.case("H10")
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.7, "seed": 3},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 1.7, "seed": 3, "top_k": 2},
        {"temperature": 1.7, "seed": 3, "top_p": 0.1},
        {"temperature": 1.7, "seed": 3, "min_p": 0.9},
    ],
    ids=["temperature", "seed", "top_k", "top_p", "min_p"],
)
def test_every_sampling_value_changes_the_text(llm, changes):
    base = {"max_tokens": 48, "ignore_eos": True, "temperature": 1.7, "seed": 3}
    if changes == {"temperature": 1.7, "seed": 3}:
        base["temperature"] = 0.3
    [plain] = llm.generate("hello", SamplingParams(**base))
    [changed] = llm.generate("hello", SamplingParams(**base | changes))
    assert plain.outputs[0].token_ids != changed.outputs[0].token_ids


def test_top_k_one_is_greedy(llm):
    [greedy] = llm.generate("hello", GREEDY)
    [top1] = llm.generate("hello", SamplingParams(temperature=2.0, top_k=1, max_tokens=12, ignore_eos=True))
    assert top1.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_stop_strings_cut_the_text_and_free_the_request(llm):
    [full] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    text = full.outputs[0].text
    stop = text[10:14]
    end = text.index(stop)
    [output] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=["no such text", stop]))
    assert output.outputs[0].text == text[:end]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert len(output.outputs[0].token_ids) < 40
    collect_last_step(llm._engine)
    assert not llm._engine.has_work


def test_stop_ids_end_the_answer_and_are_not_part_of_it(llm):
    [full] = llm.generate("hello", GREEDY)
    ids = full.outputs[0].token_ids
    stop = ids[5]
    [output] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]))
    assert output.outputs[0].token_ids == ids[: ids.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_logprobs_list_the_chosen_token_and_the_likeliest(llm):
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=6, ignore_eos=True, logprobs=3)
    [output] = llm.generate("hello", params)
    answer = output.outputs[0]
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        ranked = sorted((item for item in entry.values() if item.rank), key=lambda item: item.rank)
        assert [item.rank for item in ranked] == [1, 2, 3]
        assert ranked[0].logprob >= ranked[1].logprob >= ranked[2].logprob
        assert token in entry
        assert all(item.logprob <= 0 for item in entry.values())
    [plain] = llm.generate("hello", SamplingParams(temperature=1.5, seed=1, max_tokens=6, ignore_eos=True))
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].token_ids == answer.token_ids


def test_a_small_pool_serves_many_requests_with_the_same_ids(folder, llm):
    prompts = [f"prompt number {i} of several" for i in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    small = LLM(str(folder), max_kv_tokens=112, max_num_seqs=4)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in small.generate(prompts, params)] == expected
    assert small._engine.scheduler.allocator.num_free == 7


def test_plain_params_fill_the_rest_of_the_context(llm):
    [output] = llm.generate("x" * 200, SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 256


@pytest.mark.case("J5")
@pytest.mark.parametrize("source", ["config", "generation_config", "generation_config list", "tokenizer", "none of the others"])
def test_every_source_of_end_ids_ends_an_answer(tmp_path, source):
    folder = save_checkpoint(tiny_llama(), tmp_path)
    probe = LLM(str(folder), max_kv_tokens=256)
    [output] = probe.generate("hello", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    ids = output.outputs[0].token_ids
    end = ids[4]
    edit_json(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if source == "config":
        edit_json(folder / "config.json", eos_token_id=end)
    elif source == "generation_config":
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    elif source == "generation_config list":
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{END_ID}, {end}], "temperature": 0.5}}')
    elif source == "tokenizer":
        edit_json(folder / "tokenizer_config.json", eos_token=probe.tokenizer.token_text(end))
    else:
        (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    llm = LLM(str(folder), max_kv_tokens=256)
    [output] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=8))
    if source == "none of the others":
        assert output.outputs[0].token_ids == ids
    else:
        assert output.outputs[0].token_ids == ids[: ids.index(end)]
        assert output.outputs[0].finish_reason == "stop"
        [ignored] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        assert ignored.outputs[0].token_ids == ids


def test_chat_takes_its_sampling_values_from_generation_config(tmp_path):
    folder = save_checkpoint(tiny_llama(), tmp_path)
    recommended = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.2, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    llm = LLM(str(folder), max_kv_tokens=256)
    params = llm.default_chat_params()
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.5, 0.9, 7, 1.2)
    messages = [{"role": "user", "content": "hi"}]
    seeded = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=5, max_tokens=9)
    [one], [two] = llm.chat(messages, seeded), llm.chat([messages], seeded)
    assert one.outputs[0].text == two.outputs[0].text
    assert one.prompt == "<|user|>hi<|end|><|assistant|>"


REFUSED = [
    pytest.param("", "empty", id="empty-text"),
    pytest.param([""], "empty", id="list-of-empty-text"),
    pytest.param([], "empty", id="no-ids"),
    pytest.param([[]], "empty", id="list-of-no-ids"),
    pytest.param([[VOCAB_SIZE]], "out of the vocabulary", id="id-past-the-vocabulary"),
    pytest.param([[-1]], "out of the vocabulary", id="negative-id"),
    pytest.param([1, 2, 2**40], "out of the vocabulary", id="huge-id"),
    pytest.param("x" * 256, "longer than the context", id="as-long-as-the-context"),
    pytest.param("x" * 2560, "longer than the context", id="ten-contexts"),
    pytest.param(5, "wrong type", id="a-number"),
    pytest.param(b"bytes", "wrong type", id="bytes"),
    pytest.param([1.5, 2], "wrong type", id="fractions"),
    pytest.param([["a", "b"]], "wrong type", id="nested-texts"),
    pytest.param([True, False], "wrong type", id="booleans"),
]


@pytest.mark.case("I12")
@pytest.mark.case("I8")
@pytest.mark.parametrize(("prompt", "words"), REFUSED)
def test_a_bad_prompt_is_refused_and_the_engine_goes_on(llm, prompt, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompt, GREEDY)
    assert not llm._engine.has_work
    assert len(llm.generate("fine", GREEDY)[0].outputs[0].token_ids) == 12


def test_one_bad_prompt_of_several_runs_none(llm):
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["fine", ""], GREEDY)
    assert not llm._engine.has_work


def test_an_answer_past_the_context_is_refused_not_clamped(llm):
    with pytest.raises(RequestError, match="lower max_tokens"):
        llm.generate("x" * 200, SamplingParams(max_tokens=57))
    assert len(llm.generate("x" * 200, SamplingParams(max_tokens=56, ignore_eos=True))[0].outputs[0].token_ids) == 56


def test_a_request_larger_than_the_pool_is_refused_and_smaller_ones_run(folder):
    llm = LLM(str(folder), max_kv_tokens=64)
    with pytest.raises(RequestError, match="does not fit the KV pool"):
        llm.generate("x" * 40, SamplingParams(max_tokens=26))
    assert len(llm.generate("x" * 40, SamplingParams(max_tokens=25, ignore_eos=True))[0].outputs[0].token_ids) == 25


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "x"}], ["x"], [{"role": "user", "content": 3}]])
def test_bad_messages_are_refused(llm, messages):
    with pytest.raises(RequestError):
        llm.chat(messages)


def test_params_that_do_not_match_the_prompts_are_refused(llm):
    with pytest.raises(RequestError, match="params do not match"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_length": 10}, "max_model_len"),
        ({"max_model_len": 257}, "made for"),
        ({"max_model_len": 0}, "max_model_len is out of range"),
        ({"dtype": "float8"}, "float32"),
        ({"device": "tpu"}, "cpu | cuda"),
        ({"device": "cuda"}, "cuda"),
        ({"max_kv_tokens": 10**15}, "does not fit"),
        ({"memory_fraction": 1.5}, "memory_fraction"),
        ({"revision": "main"}, "revision has no effect on a path"),
        ({"revision": ""}, "revision cannot be used"),
        ({"revision": 1}, "revision cannot be used"),
        ({"offline": 1}, "True or False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_setting_that_cannot_be_honoured_is_refused(folder, options, words, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        LLM(str(folder), **{"device": "cpu", **options})


def test_a_window_shorter_than_the_context_is_refused_by_name(tmp_path):
    folder = str(save_checkpoint(tiny_model("mistral", sliding_window=48), tmp_path))
    with pytest.raises(ConfigError, match=r"sliding_window 48 is shorter than the context.*set max_model_len to 48"):
        LLM(folder, device="cpu")
    assert LLM(folder, device="cpu", max_model_len=48).generate("hello", GREEDY)[0].finished


def test_dynamic_rope_ends_at_the_original_context(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    folder = str(save_checkpoint(tiny_model("llama", rope_parameters=rope), tmp_path))
    with pytest.raises(ConfigError, match=r"max_model_len is too long.*at most 256"):
        LLM(folder, device="cpu", max_model_len=257)


def test_a_revision_of_the_embedded_model_is_refused():
    with pytest.raises(ConfigError, match=r"revision has no effect without a model: got v1, wanted .*; name the model"):
        LLM(revision="v1")


def test_a_model_is_found_by_name_and_start_up_says_where(folder, llm, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = put_in_cache(tmp_path, "org/tiny", files_of(folder), "main")
    named = LLM("org/tiny", max_kv_tokens=256, offline=True)
    assert named.generate("hello", GREEDY)[0].outputs[0].token_ids == llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    phases = [phase.name for phase in named.ledger.phases]
    assert "find model" in phases
    assert "download" not in phases
    assert f"org/tiny: {snapshot}" in named.ledger.notes


def test_a_download_is_a_phase_of_its_own_and_reports_its_bytes(folder, tmp_path, monkeypatch):
    hub, seen = HubServer(), []
    try:
        hub.add("org/tiny", files_of(folder), "v1")
        point_client_at(hub.url, monkeypatch, tmp_path)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        llm = LLM("org/tiny", max_kv_tokens=256, revision="v1", download_progress=lambda *entry: seen.append(entry))
    finally:
        hub.close()
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 12
    [download] = [phase for phase in llm.ledger.phases if phase.name == "download"]
    [opened] = [phase for phase in llm.ledger.phases if phase.name == "open checkpoint"]
    assert download.end <= opened.start
    done, total, seconds = seen[-1]
    assert done == total > (folder / "model.safetensors").stat().st_size
    assert seconds > 0


@pytest.mark.case("J1")
@pytest.mark.parametrize(
    ("config_ties", "head", "expected"),
    [
        (True, "absent", "embedding"),
        (True, "equal", "embedding"),
        (True, "different", "own"),
        (False, "different", "own"),
        (False, "equal", "embedding"),
        (False, "absent", "refused"),
    ],
)
def test_the_file_decides_about_the_head(tmp_path, config_ties, head, expected):
    tied = head != "different"
    oracle = tiny_llama(tie_word_embeddings=tied)
    if head == "equal":
        oracle = tiny_llama(tie_word_embeddings=False)
        oracle.lm_head.weight.data = oracle.model.embed_tokens.weight.data.clone()
    folder = save_checkpoint(oracle, tmp_path)
    edit_json(folder / "config.json", tie_word_embeddings=config_ties)
    if expected == "refused":
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            LLM(str(folder))
        return
    llm = LLM(str(folder), max_kv_tokens=256)
    [output] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    rows = expected_logits(oracle, ids[:-1])[len(output.prompt_token_ids) - 1 :]
    assert rows.argmax(-1).tolist() == output.outputs[0].token_ids
