"""Cases of the embeddings family."""

import torch

from rapid_llm.kernels.ops.embeddings.rows import VOCAB_EMBEDDING
from rapid_llm.kernels.ops.interfaces import Sizes
from rapid_llm.kernels.reference import embeddings as reference
from rapid_llm.kernels.verify.buffers import Stage
from rapid_llm.kernels.verify.case import Case, CaseMaker, Check


def _vocab_embedding(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, generator: torch.Generator, hard: str | None
) -> Case:
    num_tokens, vocab_size, hidden_size = sizes["num_tokens"], sizes["vocab_size"], sizes["hidden_size"]
    stage = Stage(VOCAB_EMBEDDING, sizes, dtype, device)
    token_ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    token_ids[-1:] = vocab_size - 1
    if hard == "padding_ids":
        token_ids[::2] = -1
    ids = stage.place("ids", token_ids)
    weight = stage.place("weight", torch.randn(vocab_size, hidden_size, generator=generator))
    out = stage.unwritten("out", (num_tokens, hidden_size))
    check = Check("out", lambda: out, reference.vocab_embedding(ids, weight), rtol=0.0, atol=0.0)  # a copy is exact
    return Case(hard or "random", {"ids": ids, "weight": weight, "out": out}, [check, *stage.guards()])


CASES: dict[str, CaseMaker] = {"vocab_embedding": _vocab_embedding}
