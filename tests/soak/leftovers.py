"""Objects that live as long as a request may, counted: none may outlive what asked for them."""

import gc
from collections import Counter

from rapid_llm.engine.output import RequestOutput
from rapid_llm.engine.request import Request
from rapid_llm.engine.stream import OutputStream, StreamedAnswer
from rapid_llm.engine.text import TextRequest

KINDS = (Request, TextRequest, OutputStream, StreamedAnswer, RequestOutput)


def living() -> Counter:
    """How many of each kind are reachable in this process."""
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in KINDS)


def check_none_left(before: Counter) -> None:
    """Raise AssertionError where there are more than before."""
    if left := living() - before:
        raise AssertionError(f"objects are left behind: {dict(left)}")
