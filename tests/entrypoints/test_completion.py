"""Shell completion: the scripts, run in the shells that this machine has, offer what the parsers take."""

import argparse
import shutil
import subprocess
import sys

import pytest

from rapid_llm.entrypoints import cli, completion_cli


def shell(name):
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for name in completion_cli.SHELLS:
        command = [sys.executable, "-m", "rapid_llm", "completion", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        (folder / name).write_text(done.stdout)
    return folder


def commands(parser, path=()):
    """Every command without commands of its own, by the words that lead to it."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield path, parser
    for action in groups:
        for name, command in action.choices.items():
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(cli.build_parser()))


def in_bash(scripts, *words, cwd=None):
    code = 'source "$1"; shift; COMP_WORDS=(rapid-llm "$@"); COMP_CWORD=$#; _shtab_rapid_llm; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", code, "bash", str(scripts / "bash"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout.split()


def in_fish(scripts, line):
    code = f"source {scripts / 'fish'}; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
    return [offer.split("\t")[0] for offer in done.stdout.splitlines()]


@shell("bash")
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_bash_offers_every_flag_of_every_command(scripts, path):
    shown = [action for action in COMMANDS[path]._actions if action.help != argparse.SUPPRESS]
    flags = {flag for action in shown for flag in action.option_strings if flag.startswith("--")}
    assert set(in_bash(scripts, *path, "--")) == flags


@shell("bash")
def test_bash_offers_commands_choices_and_files(scripts, tmp_path):
    assert {"serve", "chat", "generate", "bench", "doctor"} <= set(in_bash(scripts, ""))
    assert in_bash(scripts, "ser") == ["serve"]
    assert in_bash(scripts, "bench", "") == ["serve"]
    assert set(in_bash(scripts, "serve", "--kv-dtype", "")) == set(
        COMMANDS["serve",]._option_string_actions["--kv-dtype"].choices
    )
    (tmp_path / "settings.toml").touch()
    assert in_bash(scripts, "serve", "--config", "sett", cwd=tmp_path) == ["settings.toml"]


@shell("fish")
def test_fish_offers_commands_and_flags(scripts):
    assert in_fish(scripts, "rapid-llm ser") == ["serve"]
    assert "--max-num-seqs" in in_fish(scripts, "rapid-llm serve --max-n")
    assert in_fish(scripts, "rapid-llm completion ba") == ["bash"]


@shell("zsh")
def test_zsh_reads_its_script(scripts):
    done = subprocess.run(["zsh", "-n", str(scripts / "zsh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = (scripts / "zsh").read_text()
    assert text.startswith("#compdef rapid-llm")
    assert "--max-num-seqs" in text
