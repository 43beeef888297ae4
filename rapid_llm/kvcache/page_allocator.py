"""Which pages of the KV pool are free. Bookkeeping only: no page's content is seen here."""

from collections import deque
from collections.abc import Sequence


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1; each is free or owned, never both.

    Freed pages go to the back of the queue, so a page rests as long as it can before it is used again.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._owned = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages, or None (and take nothing) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._owned[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. ValueError when one is not owned, in which case none is given back."""
        for page in pages:
            if not (0 <= page < self.num_pages and self._owned[page]):
                raise ValueError(f"page {page} is freed but nobody owns it")
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is freed twice in one call: {sorted(pages)}")
        for page in pages:
            self._owned[page] = 0
        self._free.extend(pages)
