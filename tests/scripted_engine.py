"""An engine that says what its prompt tells it to: "SAY[[...]]" is answered by "...", then the end of the text.

What is banned it cannot say: the likeliest of the tokens that are allowed comes in its place. Of a prompt the last such words
count. As a process, with text that its model's tokenizer writes: ``python -m tests.scripted_engine FD``, as
``rapid_llm.entrypoints.engine_process`` is started. Preempted sequences begin anew, so a pool should hold all of them.
"""

import re
import socket
import sys
from functools import partial

from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.engine.process import serve
from rapid_llm.engine.tokenizer import Tokenizer, end_ids
from rapid_llm.entrypoints import engine_process

COMMAND = (sys.executable, "-m", "tests.scripted_engine")
_LOUD = 1e4
_SCRIPT = re.compile(r"SAY\[\[(.*?)\]\]", re.DOTALL)


def script(engine, tokenizer, end_id):
    """Have an engine without a prefix cache say what its prompts tell it to; returns it."""
    assert engine.scheduler.pages.cache is None, "build it with prefix_cache=False"
    worker = engine.worker
    worker.sampler = ScriptedSampler(worker.sampler, tokenizer, end_id)
    worker.submit = partial(_noting, worker.sampler, worker.submit)
    return engine


def say(text):
    """A prompt that is answered by ``text``."""
    return f"SAY[[{text}]]"


class ScriptedSampler:
    """Raises the logit of the token that is to come in each row."""

    def __init__(self, sampler, tokenizer, end_id):
        self._sampler, self._tokenizer, self._end_id = sampler, tokenizer, end_id
        self._prompts, self._scripts = {}, {}

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def note(self, plan):
        for setup in plan.slots:
            self._prompts[setup.slot], self._scripts[setup.slot] = [], None
        for chunk in plan.chunks:
            if self._scripts[chunk.slot] is None:
                self._prompts[chunk.slot] += chunk.token_ids
                if chunk.samples:
                    self._scripts[chunk.slot] = self._script_of(self._prompts[chunk.slot])

    def _script_of(self, prompt):
        said = _SCRIPT.findall(self._tokenizer.decode(prompt, skip_special_tokens=False))
        ids = self._tokenizer.encode(said[-1], add_special_tokens=False) if said else []
        return dict(enumerate(ids, start=len(prompt)))

    def __call__(self, logits, slots, positions, drawn=None, masks=None):
        logits = logits.clone()
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            logits[row, self._scripts[slot].get(position, self._end_id)] = _LOUD
        return self._sampler(logits, slots, positions, None, masks)


def _noting(sampler, submit, plan):
    sampler.note(plan)
    return submit(plan)


def build(start, ledger, report):
    source = open_checkpoint(start.path)
    tokenizer = Tokenizer.from_checkpoint(source)
    return script(engine_process.build(start, ledger, report), tokenizer, min(end_ids(source, tokenizer)))


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1])), build))
