"""The ``rapid-llm`` command. Parsing imports no torch; a subcommand imports what it needs."""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from rapid_llm.entrypoints import (
    bench_cli,
    checkpoint_cli,
    completion_cli,
    doctor,
    generation_cli,
    kernels_cli,
    models_cli,
    serve_cli,
)
from rapid_llm.entrypoints.bytecode import keep_bytecode
from rapid_llm.errors import RapidError
from rapid_llm.version import __version__

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="rapid-llm", description="Run a language model, and see which kernels do it and why.")
    parser.add_argument("--version", action="version", version=f"rapid-llm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for part in (generation_cli, serve_cli, bench_cli, models_cli, checkpoint_cli, kernels_cli, doctor, completion_cli):
        part.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 when something was refused, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # An error's traceback is asked for wherever the flag stands.
    debug = "--debug" in arguments
    options = build_parser().parse_args([argument for argument in arguments if argument != "--debug"])
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        keep_bytecode()
        return run(options)
    except RapidError as error:
        if debug:
            traceback.print_exc()
        print(f"rapid-llm: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left: nothing to say, and nobody to say it to
        sys.stderr.close()
        return EXIT_REFUSED
