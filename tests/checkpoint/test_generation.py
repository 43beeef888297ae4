import logging
from pathlib import Path

import pytest

from rapid_llm.checkpoint.generation import GenerationDefaults
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.errors import CheckpointError
from tests.checkpoint.writers import write_folder

FILE = Path("generation_config.json")


def test_values_are_taken_and_absent_ones_are_none():
    raw = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": [1, 2], "transformers_version": "5"}
    assert GenerationDefaults.from_hf(raw, FILE) == GenerationDefaults(0.6, 0.9, 40, eos_token_ids=(1, 2))
    assert GenerationDefaults.from_hf({}, FILE) == GenerationDefaults()


def test_do_sample_false_asks_for_greedy_decoding():
    assert GenerationDefaults.from_hf({"do_sample": False, "temperature": 0.6}, FILE).temperature == 0.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 3.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("eos_token_id", -1),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", {"id": 1}),
    ],
)
def test_a_value_out_of_range_is_refused_by_key_and_file(key, value):
    with pytest.raises(CheckpointError, match=rf"generation_config.json: key '{key}'"):
        GenerationDefaults.from_hf({key: value}, FILE)


def test_sampling_values_that_are_not_applied_are_logged_by_name(caplog):
    with caplog.at_level(logging.WARNING):
        GenerationDefaults.from_hf({"typical_p": 0.9, "num_beams": 1, "no_repeat_ngram_size": 3}, FILE)
    assert "not applied by this version: no_repeat_ngram_size, typical_p" in caplog.text


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        pytest.param(None, (), id="no-file"),
        pytest.param({}, (), id="no-key"),
        pytest.param({"eos_token_id": None}, (), id="null"),
        pytest.param({"eos_token_id": 7}, (7,), id="int"),
        pytest.param({"eos_token_id": [7, 8]}, (7, 8), id="list"),
    ],
)
def test_end_ids_of_generation_config_come_in_every_form(tmp_path, generation, expected):
    assert open_checkpoint(write_folder(tmp_path, generation=generation)).generation.eos_token_ids == expected
