"""Grammars: what a request's answer may be, compiled and followed beside the steps, by llguidance (no torch, no text half).

Compiling and masks are the work of threads, which let go of Python's lock while they do it; the engine asks what has come of it.
A mask has a bit for each id of the vocabulary, little end first, and travels with the step's plan.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rapid_llm.checkpoint.source import CheckpointSource
from rapid_llm.config import Grammar
from rapid_llm.engine.tokenizer import Tokenizer, end_ids
from rapid_llm.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPILE_SECONDS = 5.0
"""Longest that a request waits for its grammar, in seconds. llguidance's own limits end most of what would take longer."""
CACHED = 64
"""Compiled grammars that are kept, the newest used."""
_SHOWN = 300  # characters of what is wrong with a grammar
_JSON = {"whitespace_pattern": r"[ \n\t\r]{1,32}"}  # models that lose their way write blanks without an end


class Vocabulary(NamedTuple):
    """What a grammar needs to know of a model's tokens.

    Attributes:
        tokens: the bytes of each id of the model; none for an id that stands for nothing.
        special_ids: tokens that no text holds; a grammar has them by name.
        end_ids: the model's end-of-text ids.
        encode: text to ids, nothing put around it.
    """

    tokens: list[bytes]
    special_ids: frozenset[int]
    end_ids: frozenset[int]
    encode: Callable[[str], list[int]]


def model_vocabulary(source: CheckpointSource, tokenizer: Tokenizer | None = None) -> Vocabulary:
    """The vocabulary of an open checkpoint; ``tokenizer`` where there is one already."""
    known = tokenizer or Tokenizer.from_checkpoint(source)
    tokens = [known.bytes_of([token], skip_special_tokens=False) for token in range(source.config.vocab_size)]
    return Vocabulary(tokens, known.special_ids, end_ids(source, known), partial(known.encode, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow.

    Attributes:
        mask: a bit for each id, in whole words of 32.
        is_complete: nothing may: the answer is at its end.
        problem: why the grammar cannot go on; empty where it can.
    """

    mask: bytes = b""
    is_complete: bool = False
    problem: str = ""


class Grammars:
    """Compiles, and keeps what it has compiled. Safe to use from several threads.

    Args:
        vocabulary: makes the model's vocabulary. It is called for the first grammar, in a thread: a start pays nothing for it.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._compiling = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._following = ThreadPoolExecutor(2, thread_name_prefix="mask")
        self._cache: OrderedDict[Grammar, Future[Way]] = OrderedDict()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._vocabulary = vocabulary
        self._tokens: Future[_Tokens] | None = None

    def compile(self, grammar: Grammar) -> "Future[Way]":
        """The grammar at its beginning, to be copied; the future's exception is a RequestError that says what is wrong."""
        with self._lock:
            found = self._cache.get(grammar)
            if found is None:
                if self._tokens is None:
                    self._tokens = self._compiling.submit(lambda: _Tokens(self._vocabulary()))
                tokens = self._tokens
                found = self._cache[grammar] = self._compiling.submit(lambda: tokens.result().way(grammar))
                found.add_done_callback(self._tell)
                while len(self._cache) > CACHED:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(grammar)
            return found

    def check(self, grammar: Grammar) -> None:
        """Compile and wait for it.

        Raises: RequestError when it cannot be used, or takes too long.
        """
        try:
            self.compile(grammar).result(COMPILE_SECONDS)
        except TimeoutError as error:
            raise _too_slow(grammar) from error

    def follow(self, grammar: Grammar, *, may_end: bool) -> "Constraint":
        """One answer's way through a grammar, from its beginning; ``may_end`` as in ``Way.copy``."""
        return Constraint(self, grammar, may_end=may_end)

    def submit(self, job: "Callable[[], Allowed]") -> "Future[Allowed]":
        """Have a thread do what a constraint needs."""
        future = self._following.submit(job)
        future.add_done_callback(self._tell)
        return future

    def await_news(self, seconds: float) -> None:
        """Wait until something is done that was not when this was called last, or for so long."""
        self._news.wait(seconds)
        self._news.clear()

    def _tell(self, _: "Future[Any]") -> None:
        self._news.set()


class Constraint:
    """How far one answer has come in its grammar.

    Attributes:
        is_compiled: whether the first mask has been told.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar, *, may_end: bool) -> None:
        self._grammars, self._grammar, self._may_end = grammars, grammar, may_end
        self._compiled = grammars.compile(grammar)
        self._deadline = time.monotonic() + COMPILE_SECONDS
        self._way: Way | None = None
        self._job: Future[Allowed] | None = None
        self.is_compiled = False

    def take(self, token_id: int) -> None:
        """Go on behind a token that was allowed."""
        if self._way is not None:
            self._job = self._grammars.submit(partial(self._way.after, token_id))

    @property
    def is_ready(self) -> bool:
        """Whether ``poll`` has something to tell."""
        return self._job is not None and self._job.done()

    def poll(self) -> Allowed | None:
        """What may follow; None while it is not known, and once it has been told.

        Raises: RequestError when the grammar cannot be used, or is not compiled in time.
        """
        if self._way is None and self._compiled.done():
            self._way = self._compiled.result().copy(may_end=self._may_end)
            self._job = self._grammars.submit(self._way.allowed)
        if self._job is None or not self._job.done():
            if not self.is_compiled and time.monotonic() > self._deadline:
                raise _too_slow(self._grammar)
            return None
        allowed, self._job, self.is_compiled = self._job.result(), None, True
        return allowed


class _Tokens:
    """The vocabulary as llguidance has it. Its one end-of-text id is one more than the model has: rules say which ids may end."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        size = len(vocabulary.tokens)
        self.num_bytes = 4 * -(-size // 32)
        self.all_ids = _bits(range(size))
        self.end_ids = _bits(token for token in vocabulary.end_ids if token < size)
        self.end_mark = 1 << size
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(_Wrapped(vocabulary)), n_vocab=size + 1, eos_token=[size])

    def way(self, grammar: Grammar) -> "Way":
        """Compile.

        Raises: RequestError when the grammar cannot be used.
        """
        from llguidance import LLMatcher

        try:
            source = _source(grammar, LLMatcher)
        except ValueError as error:
            raise _refused(grammar, str(error)) from error
        matcher = LLMatcher(self.tokenizer, source, log_level=0)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return Way(matcher, self, may_end=True)


class _Wrapped:
    """What TokenizerWrapper asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = len(vocabulary.tokens)
        self.eos_token_id, self.bos_token_id = size, None
        self.tokens = [*vocabulary.tokens, b"<end of the answer>"]
        self.special_token_ids = sorted((vocabulary.special_ids | vocabulary.end_ids | {size}) & set(range(size + 1)))
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class Way:
    """A place in a grammar; one thread at a time has it."""

    def __init__(self, matcher: "LLMatcher", tokens: _Tokens, *, may_end: bool) -> None:
        self._matcher, self._tokens, self._may_end = matcher, tokens, may_end

    def copy(self, *, may_end: bool) -> "Way":
        """Another that is here; ``may_end``: whether an end of text is allowed where the grammar may go on as well."""
        return Way(self._matcher.deep_copy(), self._tokens, may_end=may_end)

    def after(self, token_id: int) -> Allowed:
        """Go on behind a token, and say what may follow it."""
        self._matcher.consume_token(token_id)
        return self.allowed()

    def allowed(self) -> Allowed:
        """Where only the end may follow, the answer is complete, and nobody needs to sample it."""
        matcher, tokens = self._matcher, self._tokens
        if matcher.is_stopped() and not matcher.is_error():
            return Allowed(is_complete=True)
        found = int.from_bytes(matcher.compute_bitmask(), "little") if not matcher.is_error() else 0
        if matcher.is_error():
            return Allowed(problem=matcher.get_error()[:_SHOWN])
        mask = found & tokens.all_ids
        if not mask:
            return Allowed(is_complete=True) if found & tokens.end_mark else Allowed(problem="no token may follow")
        if found & tokens.end_mark and self._may_end:
            mask |= tokens.end_ids
        return Allowed(mask.to_bytes(tokens.num_bytes, "little"))


def _source(grammar: Grammar, library: "type[LLMatcher]") -> str:
    match grammar.kind:
        case "json_schema":
            return library.grammar_from_json_schema(grammar.source, defaults=_JSON)  # type: ignore[arg-type]
        case "json_object":
            return library.grammar_from_json_schema('{"type": "object"}', defaults=_JSON)  # type: ignore[arg-type]
        case "regex":
            return library.grammar_from_regex(grammar.source)
        case _:
            return library.grammar_from_lark(grammar.source)


def _bits(ids: Iterable[int]) -> int:
    """One number with a bit for each id."""
    bits = bytearray()
    for token in ids:
        bits.extend(bytes(max(token // 8 + 1 - len(bits), 0)))
        bits[token // 8] |= 1 << token % 8
    return int.from_bytes(bits, "little")


def _refused(grammar: Grammar, reason: str) -> RequestError:
    change = f"correct the {grammar.kind}"
    got = " ".join(reason.split())[:_SHOWN]
    return RequestError(f"grammar: the {grammar.kind} cannot be used", param="grammar", got=got, change=change)


def _too_slow(grammar: Grammar) -> RequestError:
    got, wanted = f"more than {COMPILE_SECONDS:g} s", "less"
    change = f"make the {grammar.kind} simpler, or send it again when the engine has less to do"
    problem = f"grammar: the {grammar.kind} takes too long to compile"
    return RequestError(problem, param="grammar", got=got, wanted=wanted, change=change)
