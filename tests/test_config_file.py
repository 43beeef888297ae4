"""A config file: the same names and the same errors as flags and keywords, and what was settled can be told."""

import math
import tomllib

import pytest

from rapid_llm.config import EngineConfig
from rapid_llm.config_file import read_config_file, settle
from rapid_llm.errors import ConfigError


def written(tmp_path, text):
    file = tmp_path / "rapid.toml"
    file.write_text(text)
    return str(file)


def test_values_reach_the_config_and_keywords_win(tmp_path):
    file = written(tmp_path, 'model = "org/name"\nmax_num_seqs = 7\nmax_step_ms = inf\noffline = true\n[server]\nport = 9000\n')
    config = EngineConfig.from_file(file, max_num_seqs=8)
    assert config == EngineConfig(model="org/name", max_num_seqs=8, max_step_ms=math.inf, offline=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_seq = 7", r"unknown engine setting in .*rapid.toml 'max_num_seq': .*; did you mean max_num_seqs."),
        ("max_num_seqs = 0", "max_num_seqs is out of range: got 0, wanted an integer >= 1; raise it."),
        ('memory_fraction = "half"', "memory_fraction is out of range: got 'half'"),
        ("model = 7", "model is of the wrong type: got 7, wanted a string"),
        ("device = [1]", "device is of the wrong type"),
        ("offline = 1", "offline is out of range: got 1, wanted True or False"),
        ("max_num_seqs: 7", r"rapid.toml is no TOML: got .*line 1"),
        ("[engine]\nmax_num_seqs = 7", "unknown engine setting in .* 'engine'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_file(written(tmp_path, text))


def test_a_file_that_is_not_there_or_no_text_is_refused_by_path(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.toml: got No such file"):
        EngineConfig.from_file(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no TOML"):
        read_config_file(tmp_path / "binary.toml")


def test_what_was_settled_is_printed_as_a_config_file_with_the_source_of_each_value():
    settled = settle(EngineConfig, {"max_num_seqs": 7, "max_step_ms": math.inf}, {"model": 'a "b"'}, "x.toml", "engine setting")
    text = settled.to_toml()
    assert {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in text.splitlines()}.items() >= {
        'model = "a \\"b\\""': "flag",
        "max_num_seqs = 7": "x.toml",
        "max_batched_tokens = 2048": "default",
        "# device is chosen at the start": "default",
    }.items()
    assert EngineConfig(**tomllib.loads(text)) == settled.config
