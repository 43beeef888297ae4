"""Which pages of the KV pool are free and who counts on the others. Bookkeeping only: no page's content is seen here."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1 and counts the holders of each.

    A page that nobody holds is free, and is one of two kinds: blank, or kept (``keep``), which somebody may come back for
    (``hold``). Blank pages are handed out first, in the order they were given back, so a page rests as long as it can before it
    is used again; then kept ones, least recently held first. Every operation is O(1) a page.

    Attributes:
        on_reuse: called with each kept page that is handed out anew, before it is.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_reuse: Callable[[int], None] = lambda page: None
        self._blank: deque[int] = deque(range(num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages
        self._kept = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._blank) + len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages for one holder, or None (and take nothing) when fewer are free."""
        if count > self.num_free:
            return None
        pages = [self._blank.popleft() if self._blank else self._reuse() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to each page. ValueError when one is neither held nor kept, in which case none is."""
        for page in pages:
            if not (self._holders[page] or self._kept[page]):
                raise ValueError(f"page {page} is to be shared but nobody holds it and its content is not kept")
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take a holder from each page of a sequence. ValueError when one has none, in which case none is taken.

        The end of a sequence is used anew before its beginning, which more of those to come may share.
        """
        for page in pages:
            if not (0 <= page < self.num_pages and self._holders[page]):
                raise ValueError(f"page {page} is given back but nobody holds it")
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is given back twice in one call: {sorted(pages)}")
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0 and self._kept[page]:
                self._idle[page] = None
            elif self._holders[page] == 0:
                self._blank.append(page)

    def keep(self, page: int) -> None:
        """Let a held page be found again once nobody holds it."""
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """Take ``keep`` back."""
        self._kept[page] = 0
        if page in self._idle:
            del self._idle[page]
            self._blank.append(page)

    def _reuse(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self.on_reuse(page)
        self._kept[page] = 0
        return page
