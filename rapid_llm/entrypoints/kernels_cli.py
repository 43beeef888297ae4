"""``rapid-llm kernels list | explain | verify | tune``. List and explain need no torch; handlers return exit codes."""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from rapid_llm.errors import ConfigError
from rapid_llm.kernels.device import DeviceInfo, device_info, is_this_machine, known_devices, probe_device

if TYPE_CHECKING:
    from rapid_llm.kernels.measure.tuner import Measured, Tuned
    from rapid_llm.kernels.ops.interfaces import Sizes
    from rapid_llm.kernels.verify.runner import VerifyResult

_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``kernels`` and its commands. Each sets ``run``: a handler from the parsed arguments to an exit code."""
    parser = subparsers.add_parser("kernels", help="which kernel rows there are, which serves, and why")
    commands = parser.add_subparsers(dest="kernels_command", required=True, metavar="COMMAND")
    devices = f"{', '.join(known_devices())}; default: this machine's"

    listing = commands.add_parser("list", help="every row and the state of its evidence")
    listing.add_argument("--device", metavar="NAME", help=devices)
    listing.add_argument("--json", action="store_true", help="one object a row, in an array")
    listing.set_defaults(run=run_list)

    explaining = commands.add_parser("explain", help="which row serves an op, why, and why no other does")
    explaining.add_argument("op", metavar="OP")
    explaining.add_argument("--device", metavar="NAME", help=devices)
    explaining.add_argument("--dtype", help="compute dtype; default: float32 on a CPU, bfloat16 on a GPU")
    explaining.add_argument("--shape", metavar="k=v,...", default="", help="sizes of the call; the contract fills in the rest")
    explaining.add_argument("--json", action="store_true", help="one object")
    explaining.set_defaults(run=run_explain)

    tuning = commands.add_parser(
        "tune",
        help="search this card's fastest tiles and measure its rows",
        description="Search the fastest tiles for this card at the sizes of models people serve, then measure every verified "
        "row. Both are kept in the user's store, and every later start uses them. Nothing else should run on the card meanwhile.",
    )
    tuning.add_argument("--op", action="append", metavar="OP", help="only this op; may be given again")
    tuning.add_argument("--dtype", default="bfloat16", help="compute dtype (default: bfloat16)")
    tuning.add_argument("--only", choices=("tiles", "rows"), help="only the search, or only the measurement")
    tuning.add_argument(
        "--recheck",
        action="store_true",
        help="try only the tiles that are kept for any version of a kernel, beside the heuristic's: after an edit that leaves "
        "the shape of its work; buckets without any are searched",
    )
    tuning.add_argument("--compile-shard", metavar="I/N", help=argparse.SUPPRESS)  # how the command starts itself
    tuning.set_defaults(run=run_tune)

    verifying = commands.add_parser("verify", help="run the rows of this machine against the references and keep what passed")
    verifying.add_argument("--op", action="append", metavar="OP", help="only this op; may be given again")
    verifying.set_defaults(run=run_verify)


def run_list(arguments: argparse.Namespace) -> int:
    """Print every row, by op."""
    rows = list_rows(_device(arguments.device))
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    cells = [(row["op"], row["name"], row["state"].replace("_", " "), "; ".join(row["unmet"])) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    for *columns, unmet in cells:
        text = "  ".join(f"{cell:<{width}}" for cell, width in zip(columns, widths, strict=True))
        print(f"{text}  {unmet}".rstrip())
    return 0


def list_rows(device: DeviceInfo) -> list[dict[str, Any]]:
    """One object a row: op, name, evidence state on ``device``, needs that it does not meet, and the row's own facts."""
    from rapid_llm.kernels.dispatcher.catalog import catalog
    from rapid_llm.kernels.dispatcher.evidence import evidence_for, load_records
    from rapid_llm.kernels.provenance import triton_minor

    records, triton, here = load_records(), triton_minor(), is_this_machine(device)
    return [
        {
            "op": row.op,
            "name": row.name,
            "state": evidence_for(row, device, triton=triton, here=here, records=records).state,
            "device": device.name,
            "unmet": row.requires.unmet(device),
            "target": row.target,
            "dtypes": list(row.dtypes),
            "phase": row.phase,
            "priority": row.priority,
            "fallback": row.fallback,
        }
        for row in catalog().all_rows()
    ]


def run_explain(arguments: argparse.Namespace) -> int:
    """Print one explanation. An op that no row serves is an answer too."""
    from rapid_llm.kernels.dispatcher.explain import explain

    dtype = _DTYPE_ALIASES.get(arguments.dtype, arguments.dtype)
    explanation = explain(arguments.op, device=_device(arguments.device), dtype=dtype, sizes=parse_shape(arguments.shape))
    print(json.dumps(explanation.to_json(), indent=1) if arguments.json else explanation.to_text())
    return 0


def parse_shape(text: str) -> dict[str, int]:
    """``"num_tokens=7,d=1536"`` as sizes. Raises: ConfigError on anything else."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not name or not (value.isascii() and value.isdigit()) or name in sizes:
            wanted = "name=integer pairs with commas between, each name once"
            raise ConfigError("cannot read --shape", got=repr(part), wanted=wanted, change="write it as num_tokens=7,d=1536")
        sizes[name] = int(value)
    return sizes


def run_verify(arguments: argparse.Namespace) -> int:
    """Run rows and print one line each; 1 when a case failed."""
    from rapid_llm.kernels.device import current_device
    from rapid_llm.kernels.verify.runner import verify

    results = verify(arguments.op, current_device(None))
    for result in results:
        print(_verify_text(result))
    return 1 if any(result.failures for result in results) else 0


def run_tune(arguments: argparse.Namespace) -> int:
    """Search and measure, a line a step with an estimate of the rest."""
    from rapid_llm.kernels.dispatcher.catalog import catalog

    device = probe_device()
    if device.type != "cuda":
        raise ConfigError("tiles are searched on a GPU", got=device.name, wanted="a CUDA device", change="run it on that machine")
    from rapid_llm.kernels.measure import tuner

    dtype = _DTYPE_ALIASES.get(arguments.dtype, arguments.dtype)
    ops = [catalog().contract(op).op for op in arguments.op or catalog().contracts]
    tiled = tuner.tunable(arguments.op if arguments.only == "tiles" else None)
    tiled, recheck = [op for op in tiled if op in ops], arguments.recheck
    if arguments.compile_shard:
        shard, shards = map(int, arguments.compile_shard.split("/"))
        return 0 if sum(tuner.compile_op(op, device, dtype, shard, shards, recheck=recheck) for op in tiled) else 1
    _verify_first(ops, device)
    if arguments.only != "rows" and tiled:
        _compile_first(tiled, dtype, recheck)
        clock = tuner.Clock(sum(tuner.count_buckets(op, device, dtype) for op in tiled))
        for op in tiled:
            stores = []
            for each in tuner.tune_op(op, device, dtype, recheck=recheck):
                stores.append(tuner.store_tiles(device, [each]))  # at once: a search that is stopped was not for nothing
                print(f"{clock.step()}: {_tuned_text(each)}", flush=True)
            print(f"{len(stores)} buckets of {op} in {stores[-1] if stores else 'no store'}", flush=True)
    if arguments.only != "tiles":
        _measure(ops, device, dtype)
    return 0


def _verify_first(ops: list[str], device: DeviceInfo) -> None:
    """A time counts beside evidence only, so rows that were never run here are."""
    from rapid_llm.kernels.measure import tuner
    from rapid_llm.kernels.verify.runner import verify

    unknown = [op for op in ops if not tuner.is_verified_here(op, device)]
    if unknown:
        print(f"verifying the rows of {', '.join(unknown)} first", flush=True)
        for result in verify(unknown, device):
            print(_verify_text(result), flush=True)


def _measure(ops: list[str], device: DeviceInfo, dtype: str) -> None:
    from rapid_llm.kernels.measure import tuner
    from rapid_llm.kernels.measure.serving import serving_sizes

    clock = tuner.Clock(sum(len(serving_sizes(op)) for op in ops))
    for op in ops:
        measured: list[Measured] = []
        for sizes in serving_sizes(op):
            results = tuner.measure_rows(op, device, dtype, sizes)
            measured += results
            print(f"{clock.step()}: {op} {_shape_text(sizes)}  {_times_text(results)}", flush=True)
        tuner.store_latencies(device, measured)


def _compile_first(ops: list[str], dtype: str, recheck: bool) -> None:
    """Compile all candidates by as many processes as there are cores: most of a search's time otherwise."""
    start, count = time.perf_counter(), max(min(os.cpu_count() or 1, 16), 1)
    named = [part for op in ops for part in ("--op", op)]
    named += ["--recheck"] if recheck else []
    command = [sys.executable, "-m", "rapid_llm", "kernels", "tune", "--dtype", dtype, *named, "--compile-shard"]
    print(f"compiling the candidates in {count} processes", flush=True)
    workers = [subprocess.Popen([*command, f"{shard}/{count}"], stdout=subprocess.DEVNULL) for shard in range(count)]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


def _tuned_text(each: "Tuned") -> str:
    entry = each.entry
    knobs = " ".join(f"{name}={value}" for name, value in entry["tile"].items())
    gain = "" if entry["heuristic_us"] is None else f", {entry['heuristic_us'] / entry['us']:.2f}x of the heuristic's"
    refused = f", {len(each.refused)} refused" if each.refused else ""
    return f"{entry['op']} {entry['bucket']}: {knobs}, {entry['us']:.2f} us{gain} ({each.tried} tried{refused})"


def _shape_text(sizes: "Sizes") -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def _times_text(results: "list[Measured]") -> str:
    texts = []
    for each in results:
        variant = f" {each.variant}" if each.variant else ""
        time = each.problem if each.timing is None else f"{each.timing.us:.2f} us"
        texts.append(f"{each.row}{variant} {time}")
    return ", ".join(texts) or "no verified row"


def _verify_text(result: "VerifyResult") -> str:
    name = f"{result.op}  {result.row}"
    if result.skipped:
        return f"skipped  {name}: {'; '.join(result.skipped)}"
    if result.failures:
        lines = [f"\n    {failure.case}: {failure.problem}" for failure in result.failures]
        return f"FAILED   {name}: {len(result.failures)} of {len(result.cases)} cases{''.join(lines)}"
    if not result.cases:
        return f"no case  {name}: nothing in the contract's sweep is within the row's limits"
    errors = ", ".join(f"{dtype} {worst['max_abs']:.2g}" for dtype, worst in result.errors.items())
    return f"passed   {name}: {len(result.cases)} cases in {result.seconds:.1f} s, largest error {errors}"


def _device(name: str | None) -> DeviceInfo:
    return device_info(name) if name else probe_device()
