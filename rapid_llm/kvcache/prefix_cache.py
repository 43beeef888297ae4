"""Which pages hold the K and V of tokens that were seen before, so that a prompt that begins like another is not computed again.

A page is known by its ids and by the content before it: the key is (serial of the page before, ids of the page). Serials are
given out once and never again, and ids are compared by the dictionary itself, so a hit is exact: there is no hash to trust. What
was computed on top of a page that is forgotten can no longer be reached either, which a hash of tokens alone would not give.

The idea of finding pages by the chain before them is vLLM's (automatic prefix caching) and SGLang's (https://arxiv.org/abs/2312.07104).
"""

from array import array
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from rapid_llm.config import PAGE_SIZE
from rapid_llm.kvcache.page_allocator import PageAllocator

_PAGE_BYTES = 4 * PAGE_SIZE
_READ_AT_ONCE = 64  # pages whose ids are turned into bytes together: most lookups end at the first, or far behind it
PageKey = tuple[int, bytes]
"""What a page is known by."""


class Prefix(NamedTuple):
    """The beginning of a sequence that the cache knows: whole pages, and the serial of the last one (0 before the first)."""

    num_pages: int = 0
    serial: int = 0


class PrefixCache:
    """Finds pages by what they hold. Pages enter full and are never written again; free ones leave when they are needed."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        allocator.on_reuse = self._forget
        self._pages: dict[PageKey, int] = {}
        self._contents: dict[int, tuple[int, PageKey]] = {}  # page: its serial and its key
        self._live = {Prefix().serial}
        self._serials = count(1)

    @property
    def num_pages(self) -> int:
        """Pages that can be found, held or free."""
        return len(self._contents)

    def match(self, ids: Sequence[int], prefix: Prefix, most: int) -> tuple[list[int], Prefix]:
        """The pages that go on from ``prefix`` of ``ids``, at most up to page ``most``, and the prefix that they make.

        Nobody holds them for the caller: call PageAllocator.hold before anything is allocated.
        """
        pages: list[int] = []
        at, serial = prefix
        while at < most:
            content = _bytes(ids, at, min(at + _READ_AT_ONCE, most))
            for start in range(0, len(content), _PAGE_BYTES):
                page = self._pages.get((serial, content[start : start + _PAGE_BYTES]))
                if page is None:
                    return pages, Prefix(at, serial)
                pages.append(page)
                at, serial = at + 1, self._contents[page][0]
        return pages, Prefix(at, serial)

    def insert(self, ids: Sequence[int], pages: Sequence[int], prefix: Prefix, end: int) -> Prefix:
        """Let pages ``prefix.num_pages`` to ``end`` of a sequence be found, all full; the prefix that they make.

        Where the cache knows a page of the same content, that one stays. Where what comes before is forgotten, nothing enters.
        """
        while prefix.num_pages < end and (key := self.next_key(ids, prefix)):
            page = pages[prefix.num_pages]
            known = self._pages.setdefault(key, page)
            if known == page:
                self._contents[page] = (next(self._serials), key)
                self._live.add(self._contents[page][0])
                self._allocator.keep(page)
            prefix = Prefix(prefix.num_pages + 1, self._contents[known][0])
        return prefix

    def next_key(self, ids: Sequence[int], prefix: Prefix) -> PageKey | None:
        """What the page after ``prefix`` is known by; None when ``ids`` do not fill it, or what comes before it is forgotten."""
        if (prefix.num_pages + 1) * PAGE_SIZE > len(ids) or prefix.serial not in self._live:
            return None
        return prefix.serial, _bytes(ids, prefix.num_pages, prefix.num_pages + 1)

    def forget(self, pages: Sequence[int]) -> None:
        """Let none of ``pages`` be found again, nor anything that was computed on top of them."""
        for page in pages:
            if page in self._contents:
                self._forget(page)
                self._allocator.drop(page)

    def _forget(self, page: int) -> None:
        serial, key = self._contents.pop(page)
        del self._pages[key]
        self._live.remove(serial)


def _bytes(ids: Sequence[int], page: int, end: int) -> bytes:
    """The ids of some of a sequence's pages, in the least memory that can be compared: 4 bytes each."""
    return array("i", ids[page * PAGE_SIZE : end * PAGE_SIZE]).tobytes()
