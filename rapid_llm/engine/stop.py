"""Stop strings over text that comes in pieces: held back is only what may still become one of them."""

from collections.abc import Iterable

from rapid_llm.errors import RequestError


class StopChecker:
    """Watches one growing text for the stop string that is complete first.

    Where two are complete at the same character, the longer one counts, since it began earlier. So the result depends on the text
    alone, never on how it was cut into pieces.

    Args:
        stops: any number of non-empty strings.

    Raises:
        RequestError: an empty stop string, which would end every answer before it began.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._first_characters = {automaton.pattern[0] for automaton in self._automata}
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns: the text that is safe to show, and the stop string that ended it, if one did. After that nothing more comes.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None  # as of most tokens: no stop string has begun, and none begins here
        whole = self._held + text
        for place, character in enumerate(text, start=len(self._held) + 1):
            complete = [automaton.pattern for automaton in self._automata if automaton.step(character)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return whole[: place - len(self.matched)], self.matched
        safe = len(whole) - max((automaton.state for automaton in self._automata), default=0)
        self._held = whole[safe:]
        return whole[:safe], None

    def finish(self) -> str:
        """The text that was held back, when nothing more comes."""
        text, self._held = self._held, ""
        return text


class _Automaton:
    """Knuth, Morris and Pratt (1977): ``state`` is the length of the longest prefix of ``pattern`` that the text ends with."""

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise RequestError("a stop string is empty", wanted="at least one character", change="leave it out")
        self.pattern, self.state = pattern, 0
        self._fallback = [0]  # of a prefix: its longest proper prefix that is also its end
        for character in pattern[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def step(self, character: str) -> bool:
        """Follow one character; True when the pattern is complete."""
        self.state = self._next(self.state, character)
        return self.state == len(self.pattern)

    def _next(self, state: int, character: str) -> int:
        while state and (state == len(self.pattern) or self.pattern[state] != character):
            state = self._fallback[state - 1]
        return state + 1 if self.pattern[state] == character else 0
