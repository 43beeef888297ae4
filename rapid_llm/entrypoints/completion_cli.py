"""``rapid-llm completion SHELL``: a script that completes this command line, made from its parsers."""

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
_PATHS = frozenset({"FILE", "FOLDER", "MODEL", "--model", "--prompts"})
"""Arguments, by metavar or flag, that may be paths."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes this command in a shell",
        description="Print a script that completes this command in a shell. bash: source <(rapid-llm completion bash); "
        "zsh: rapid-llm completion zsh > a file _rapid-llm in a folder of $fpath; "
        "fish: rapid-llm completion fish > ~/.config/fish/completions/rapid-llm.fish",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run_completion)


def run_completion(options: argparse.Namespace) -> int:
    """Print it."""
    import shtab

    from rapid_llm.entrypoints.cli import build_parser

    parser = build_parser()
    for action in _actions(parser):
        if _PATHS & {str(action.metavar), *action.option_strings}:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
