"""The settings of an engine as flags: one for each field of EngineConfig, for every command that starts one; or in a file."""

import argparse
from dataclasses import fields

from rapid_llm.config import DTYPES, GGUF, KV_DTYPES, QUANTIZE, EngineConfig
from rapid_llm.config_file import Settled, engine_settings, read_config_file, settle


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add them as a group of their own."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--model",
        help="a folder in Hugging Face layout, a .gguf file, or a model of the Hugging Face hub by name, org/name or "
        "org/name:file.gguf (a part of the file's name will do, such as Q4_K_M): taken from the hub's cache on this disk, and "
        "downloaded into it where it is not there yet; a path that exists wins over a name "
        "(default: the embedded SmolLM2-135M-Instruct)",
    )
    add_weight_flags(engine)
    engine.add_argument("--max-model-len", type=int, help="longest prompt plus answer, in tokens (default: the model's context)")
    engine.add_argument("--max-kv-tokens", type=int, help="rows of the KV pool (default: from the free memory)")
    engine.add_argument(
        "--kv-dtype", choices=KV_DTYPES, help="keep K and V in a byte an element (default: in the dtype of activations)"
    )
    engine.add_argument(
        "--memory-fraction", type=float, help="share of the free memory that the pool may take (default: 0.9, on a CPU 0.25)"
    )
    engine.add_argument("--max-num-seqs", type=int, help="answers that are computed at once (default: 64)")
    engine.add_argument("--max-batched-tokens", type=int, help="tokens of one step (default: 2048)")
    engine.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        help="keep what was computed for prompts that begin alike, such as the turns of a conversation (default: on)",
    )
    engine.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="the same bits for a request alone and in any batch, at a cost (docs/sampling.md)",
    )
    engine.add_argument(
        "--max-step-ms",
        type=float,
        help="milliseconds that a prompt may hold up the other answers at a time (default: 15 on a GPU, no bound on a CPU)",
    )
    engine.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="replay steps as CUDA graphs, which spares the host its launches (default: on)",
    )


def add_weight_flags(parser: "argparse._ActionsContainer") -> None:
    """Add those that say which weights are loaded and how they are kept, but for the model itself; and the config file."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file with settings by the names of these flags, which win over it (docs/config.md)",
    )
    parser.add_argument("--revision", help="branch, tag or full commit hash of a model that is named (default: main)")
    parser.add_argument(
        "--offline", action=argparse.BooleanOptionalAction, help="never download (HF_HUB_OFFLINE=1 says the same)"
    )
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--quantize", choices=QUANTIZE, help="keep weights in fewer bits, rounded while they are loaded")
    parser.add_argument("--gguf", choices=GGUF, help="weights of a .gguf file: keep their bits, or make numbers of them")


def engine_config(options: argparse.Namespace) -> Settled[EngineConfig]:
    """The settings that a command was given, by flags and in a file.

    Raises: ConfigError.
    """
    in_file = {} if options.config is None else engine_settings(read_config_file(options.config))
    flags = {field.name: getattr(options, field.name, None) for field in fields(EngineConfig)}
    given = {name: value for name, value in flags.items() if value is not None}
    return settle(EngineConfig, in_file, given, options.config, "engine setting")
