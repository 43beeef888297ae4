"""The table of RAPID_* variables: typed values, and nothing that is silently ignored."""

import pytest

from rapid_llm.envs import data_folder, environment, known_variables
from rapid_llm.errors import ConfigError


def test_without_variables_every_entry_has_its_default():
    env = environment({"HOME": "/root", "PATH": "/bin"})

    assert env.data_dir is None
    assert env.kernels == {}


def test_values_arrive_typed(tmp_path):
    env = environment({"RAPID_DATA_DIR": str(tmp_path), "RAPID_KERNELS": " swiglu=torch.swiglu , rope = torch.rope,"})

    assert env.data_dir == tmp_path
    assert env.kernels == {"swiglu": "torch.swiglu", "rope": "torch.rope"}


def test_an_empty_value_counts_as_not_set():
    assert environment({"RAPID_DATA_DIR": "", "RAPID_KERNELS": " "}) == environment({})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        pytest.param("RAPID_KERNELS", "swiglu", "op=row", id="no-equals-sign"),
        pytest.param("RAPID_KERNELS", "swiglu=", "op=row", id="no-row"),
        pytest.param("RAPID_KERNELS", "=torch.swiglu", "op=row", id="no-op"),
        pytest.param("RAPID_KERNELS", "a=b,a=c", "stands twice", id="one-op-twice"),
        pytest.param("RAPID_DATA_DIR", __file__, "this is a file", id="a-file-as-folder"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_with_its_name(name, value, told):
    with pytest.raises(ConfigError, match=name) as caught:
        environment({name: value})

    assert told in str(caught.value)


def test_an_unknown_name_is_refused_and_the_nearest_is_named():
    with pytest.raises(ConfigError, match=r"RAPID_KERNEL.*perhaps 'RAPID_KERNELS'"):
        environment({"RAPID_KERNEL": "swiglu=torch.swiglu"})


def test_the_data_folder_is_the_one_that_the_variable_names(tmp_path, monkeypatch):
    monkeypatch.setenv("RAPID_DATA_DIR", str(tmp_path / "not-there-yet"))

    assert data_folder() == tmp_path / "not-there-yet"


def test_every_variable_says_what_it_does():
    assert all(len(summary) > 20 for summary in known_variables().values())
