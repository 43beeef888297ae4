"""Which class runs which architecture. Torch-free: a class is named as a string and imported when a model is built."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """One row of the support matrix.

    Attributes:
        name: what ModelConfig.architecture holds.
        hf_names: values of "architectures" in a Hugging Face config.json.
        gguf_name: value of "general.architecture" in a GGUF file.
        target: "module:class".
    """

    name: str
    hf_names: tuple[str, ...]
    gguf_name: str
    target: str

    def load(self) -> Any:
        """Import the class."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)


ARCHITECTURES = (Architecture("llama", ("LlamaForCausalLM",), "llama", "rapid_llm.models.llama:LlamaForCausalLM"),)


def architecture(name: str) -> Architecture:
    """The row called ``name``; KeyError when there is none (the checkpoint reader has refused it by then)."""
    return {row.name: row for row in ARCHITECTURES}[name]
