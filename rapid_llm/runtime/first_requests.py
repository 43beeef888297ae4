"""Made-up requests that ask for everything: run once before the first real ones, so that nothing is left for torch to load.

Libraries load a kernel when it is first used, as torch does for what is done beside the project's own kernels: to count tokens,
to look back at them, to rank a distribution. A plan here goes through the same code as any other.
"""

from collections.abc import Iterator
from dataclasses import replace

from rapid_llm.step import FOREVER, Adjust, Chunk, Edit, PageUpdate, SlotSetup, StepPlan

_PROMPT = (0, 1, 2)
_EDITS = (Edit(0, -1.0), Edit(1, 1.0, until=FOREVER - 1), Edit(2, float("-inf"), prefix=(1,)))
_NOTHING = SlotSetup(slot=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logprobs=-1)
_EVERYTHING = replace(
    _NOTHING,
    temperature=1.0,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    logprobs=1,
    processed=True,
    prompt_logprobs=1,
    adjust=Adjust(1.1, 0.1, 0.1, _EDITS, prompt_len=len(_PROMPT) - 1),
    token_ids=_PROMPT,
)


def first_requests(slots: int, vocab_size: int) -> Iterator[StepPlan]:
    """A prompt of three tokens in each of at most two slots, two steps of decoding, vectors of it, and slots that are as before.

    They lie in page 0, which must be free, as all pages are before the first request.
    """
    numbers = range(min(slots, 2))
    yield StepPlan(
        slots=[replace(_EVERYTHING, slot=number) for number in numbers],
        pages=[PageUpdate(number, 0, (0,)) for number in numbers],
        prefills=[Chunk(number, 0, _PROMPT, samples=True, targets=_PROMPT[1:]) for number in numbers],
    )
    everyone = b"\xff" * (4 * -(-vocab_size // 32))
    for mask in (everyone, b""):
        start = len(_PROMPT) + (not mask)
        yield StepPlan(decodes=[Chunk(number, start, (), samples=True, mask=mask) for number in numbers])
    for pooling in ("mean", "last"):
        yield StepPlan(
            slots=[replace(_NOTHING, slot=number, pooling=pooling) for number in numbers],
            prefills=[Chunk(number, 0, _PROMPT, samples=False, pools=True) for number in numbers],
        )
    yield StepPlan(
        slots=[replace(_NOTHING, slot=number) for number in numbers],
        prefills=[Chunk(number, 0, _PROMPT, samples=True) for number in numbers],
    )
