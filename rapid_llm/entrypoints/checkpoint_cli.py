"""``rapid-llm verify-checkpoint``: is it the model, or is it us? Layers as they serve against what the file holds."""

import argparse

from rapid_llm.entrypoints.engine_flags import add_weight_flags, engine_config


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "verify-checkpoint",
        help="compare a model's layers, as they serve, with what its file holds",
        description="Load MODEL, run sampled layers through the kernels that serve, and compare with float64 products of the "
        "file's own values. Ends with 1 when a layer is off, holds values that are not numbers, or mostly zeros.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as in generate --model (default: the embedded one)")
    add_weight_flags(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run_verify_checkpoint)


def run_verify_checkpoint(options: argparse.Namespace) -> int:
    """Print a line a layer; 1 when something is wrong."""
    config = engine_config(options).config
    from rapid_llm.checkpoint.locate import locate
    from rapid_llm.entrypoints.verify_checkpoint import check_checkpoint

    count = wrong = 0
    for check in check_checkpoint(locate(config), config):
        count += 1
        wrong += bool(check.problems)
        print(check.to_text(), flush=True)
    print(f"{count} layers checked, {wrong} with problems")
    return 1 if wrong else 0
