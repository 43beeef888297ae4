"""The pages of running requests: given, shared, found again by what they hold, and taken back."""

from collections.abc import Iterable

from rapid_llm.config import PAGE_SIZE, pages_for
from rapid_llm.engine.request import Request
from rapid_llm.kvcache.page_allocator import PageAllocator
from rapid_llm.kvcache.prefix_cache import Prefix, PrefixCache


class RequestPages:
    """Keeps ``pages``, ``prefix`` and what it found of ``num_computed`` of each request.

    Attributes:
        cache: None where nothing is to be found again.
        num_admitted_tokens, num_cached_tokens: tokens of the requests that were started so far, and how many of them were found.
    """

    def __init__(self, allocator: PageAllocator, prefix_cache: bool) -> None:
        self.allocator = allocator
        self.cache = PrefixCache(allocator) if prefix_cache else None
        self.num_admitted_tokens = self.num_cached_tokens = 0

    def start(self, request: Request, reserve: int) -> bool:
        """Give a request pages for all its tokens, those found among them; False when that would leave less than ``reserve``."""
        hits, prefix = self._match(request)
        self.allocator.hold(hits)
        missing = pages_for(request.num_tokens) - len(hits)
        pages = self.allocator.allocate(missing) if missing + reserve <= self.allocator.num_free else None
        if pages is None:
            self.allocator.release(hits)
            return False
        request.pages = hits + pages
        self.num_admitted_tokens += request.num_tokens
        self._found(request, prefix)
        return True

    def grow(self, request: Request) -> bool:
        """Give a request a page for one more token if it needs one; False when none is free."""
        if request.has_room:
            return True
        pages = self.allocator.allocate(1)
        request.pages += pages or []
        return pages is not None

    def skip_found(self, request: Request) -> range:
        """Take over pages that another request has finished meanwhile, where this one would compute the same: which they are."""
        first = request.prefix.num_pages
        if request.num_computed != first * PAGE_SIZE:
            return range(0)
        hits, prefix = self._match(request)
        replaced = range(first, first + len(hits))
        if hits:
            self.allocator.hold(hits)
            self.allocator.release(request.pages[first : replaced.stop])
            request.pages[first : replaced.stop] = hits
            self._found(request, prefix)
        return replaced

    def publish(self, request: Request, num_pages: int) -> None:
        """Let the first ``num_pages`` of a request be found: their K and V are written, and the step that wrote them is done."""
        if self.cache is not None:
            request.prefix = self.cache.insert(request.token_ids, request.pages, request.prefix, num_pages)

    def release(self, request: Request) -> None:
        """Take back all pages."""
        self.allocator.release(request.pages)
        request.pages, request.prefix = [], Prefix()

    def distrust(self, request: Request) -> None:
        """Let nothing be found any more that a request computed, or that was computed in place of it."""
        if self.cache is not None:
            pages, _ = self.cache.match(request.token_ids, Prefix(), len(request.token_ids) // PAGE_SIZE)
            self.cache.forget(pages)

    def followers(self, running: Iterable[Request]) -> set[Request]:
        """Requests whose next page one before them computes: they can take it over once it is done."""
        in_work, followers = set(), set[Request]()
        if self.cache is None:
            return followers
        for request in running:
            key = self.cache.next_key(request.token_ids, request.prefix)
            if key in in_work and not request.computes_all and request.num_computed == request.prefix.num_pages * PAGE_SIZE:
                followers.add(request)
            elif key is not None:
                in_work.add(key)
        return followers

    def _match(self, request: Request) -> tuple[list[int], Prefix]:
        """Pages that go on from the prefix of ``request``. Its last token is always computed, in a page of its own.

        None while every token of its prompt has to be computed.
        """
        if self.cache is None or request.computes_all:
            return [], request.prefix
        return self.cache.match(request.token_ids, request.prefix, (request.num_tokens - 1) // PAGE_SIZE)

    def _found(self, request: Request, prefix: Prefix) -> None:
        count = (prefix.num_pages - request.prefix.num_pages) * PAGE_SIZE
        request.prefix = prefix
        request.num_computed += count
        self.num_cached_tokens += count
        if request.num_preemptions == 0:
            request.num_cached_tokens += count
