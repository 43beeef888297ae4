"""``rapid-llm models``: which checkpoints are served, from the tables that decide it."""

import argparse

from rapid_llm.models.registry import ARCHITECTURES, Architecture
from rapid_llm.models.rope_scaling import GGUF_ROPE_TYPES, ROPE_TYPES

_HEADER = ("architecture", "Hugging Face class", "GGUF architecture", "biases", "norms of q and k", "experts")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "models", help="list the model families and file formats that are served", description="What can be loaded."
    )
    parser.add_argument("--markdown", action="store_true", help="print docs/models.md")
    parser.set_defaults(run=run_models)


def run_models(options: argparse.Namespace) -> int:
    """Print the support matrix."""
    print(to_markdown() if options.markdown else to_text(), end="")
    return 0


def to_text() -> str:
    """The matrix for a terminal."""
    rows = [_HEADER, *(_row(each) for each in ARCHITECTURES)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    label = max(len(name) for name in _facts())
    return "\n".join([*lines, "", *(f"{name:<{label}}  {text}" for name, text in _facts().items())]) + "\n"


def to_markdown() -> str:
    """docs/models.md."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(_row(each) for each in ARCHITECTURES)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    facts = "\n".join(f"- **{name}**: {text}" for name, text in _facts().items())
    return (
        "# Models that are served\n\n"
        "Written by `rapid-llm models --markdown` from the tables that decide it; a test compares. What is not named here is\n"
        "refused, with the name of the file and of the key, tensor or type that was in the way.\n\n"
        f"{table}\n\n{facts}\n"
    )


def _row(each: Architecture) -> tuple[str, ...]:
    return (
        each.name,
        ", ".join(each.hf_names),
        each.gguf_name or "(written as llama)",
        _biases(each),
        "yes" if each.qk_norm else "no",
        "yes" if each.experts else "no",
    )


def _biases(each: Architecture) -> str:
    parts = {"q, k, v": each.qkv_bias, "o": each.o_bias, "mlp": each.mlp_bias}
    always = [name for name, has in parts.items() if has]
    by_config = [name for name, has in parts.items() if has is None]
    texts = [", ".join(always)] if always else []
    if by_config:
        texts.append(f"{', '.join(by_config)} by config.json")
    return "; ".join(texts) or "none"


def _facts() -> dict[str, str]:
    from rapid_llm.checkpoint.ggml_types import BLOCK_TYPES
    from rapid_llm.checkpoint.safetensors import DTYPES
    from rapid_llm.engine.gguf_tokenizer import TOKENIZERS

    return {
        "safetensors": f"one file or shards with their index; {', '.join(DTYPES)}",
        "GGUF": f"one file; {', '.join(BLOCK_TYPES)}. Quantised tensors are dequantised as they are loaded",
        "tokenizers": f"tokenizer.json; in GGUF files {TOKENIZERS}",
        "rope types": f"config.json: {', '.join(ROPE_TYPES)} (dynamic up to the original context); "
        f"GGUF: {', '.join(GGUF_ROPE_TYPES)}, and llama3's tensor of divisors",
        "experts": "chosen by a softmax; a tensor each or a layer's in one stack; dense layers among sparse ones; "
        "shared experts are refused",
        "heads": "any even dimension (on a GPU up to 256), any number of query heads to a key-value head",
        "output head": "tied or its own, by what the file holds",
        "sliding windows": "refused where shorter than the context; set max_model_len to the window",
        "not loaded": "pickles, code from a repository, quantised safetensors, multimodal models",
    }
