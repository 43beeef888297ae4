"""A page is found only for the ids that it holds after the very content that came before, and only while nobody wrote anew."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.config import PAGE_SIZE
from rapid_llm.kvcache.page_allocator import PageAllocator
from rapid_llm.kvcache.prefix_cache import Prefix, PrefixCache


def ids_of(pages, extra=0):
    """A sequence whose pages are of one id each."""
    return [page for page in pages for _ in range(PAGE_SIZE)] + [0] * extra


def cache_of(num_pages):
    allocator = PageAllocator(num_pages)
    return allocator, PrefixCache(allocator)


def put(allocator, cache, ids):
    """Compute all of ``ids`` anew, let it be found, and let go of it."""
    pages = allocator.allocate(len(ids) // PAGE_SIZE)
    cache.insert(ids, pages, Prefix(), len(pages))
    allocator.release(pages)
    return pages


def test_a_sequence_is_found_up_to_where_it_differs():
    allocator, cache = cache_of(8)
    pages = put(allocator, cache, ids_of([1, 2, 3]))
    assert cache.match(ids_of([1, 2, 3, 4]), Prefix(), 4)[0] == pages
    assert cache.match(ids_of([1, 2, 9]), Prefix(), 3)[0] == pages[:2]
    assert cache.match(ids_of([2, 3]), Prefix(), 2)[0] == []  # the same ids elsewhere in a sequence are something else
    assert cache.match(ids_of([1, 2, 3]), Prefix(), 2)[0] == pages[:2]


def test_a_match_goes_on_from_a_prefix():
    allocator, cache = cache_of(8)
    pages = put(allocator, cache, ids_of([1, 2, 3]))
    _, prefix = cache.match(ids_of([1]), Prefix(), 1)
    found, whole = cache.match(ids_of([1, 2, 3]), prefix, 3)
    assert (found, whole.num_pages) == (pages[1:], 3)


def test_ids_whose_bytes_could_be_confused_are_told_apart():
    allocator, cache = cache_of(4)
    put(allocator, cache, [256] * PAGE_SIZE)
    assert cache.match([1] * PAGE_SIZE, Prefix(), 1)[0] == []


def test_free_pages_stay_until_they_are_needed_and_the_end_of_the_oldest_goes_first():
    allocator, cache = cache_of(5)
    old = put(allocator, cache, ids_of([1, 2]))
    new = put(allocator, cache, ids_of([3, 4]))
    assert allocator.num_free == 5
    held = allocator.allocate(2)  # the blank page, then one that can be found
    assert old[1] in held
    assert cache.match(ids_of([1, 2]), Prefix(), 2)[0] == old[:1]
    assert cache.match(ids_of([3, 4]), Prefix(), 2)[0] == new


def test_a_page_that_was_just_used_outlives_older_ones():
    allocator, cache = cache_of(2)
    [first], [second] = put(allocator, cache, ids_of([1])), put(allocator, cache, ids_of([2]))
    allocator.hold([first])
    allocator.release([first])
    assert allocator.allocate(1) == [second]


@pytest.mark.case("I15")
def test_a_page_that_holds_something_else_by_now_is_not_found_nor_what_came_after_it():
    allocator, cache = cache_of(3)
    ids = ids_of([1, 2, 3])
    pages = put(allocator, cache, ids)
    allocator.hold(pages[1:])
    taken = allocator.allocate(1)
    assert taken == pages[:1]
    assert cache.match(ids, Prefix(), 3)[0] == []
    cache.insert(ids, taken, Prefix(), 1)  # even when the first page is computed again, it is another content
    assert cache.match(ids, Prefix(), 3)[0] == taken


@pytest.mark.case("H4")
@pytest.mark.parametrize("forgotten", [1, 2])
def test_what_was_computed_on_a_forgotten_page_is_forgotten(forgotten):
    allocator, cache = cache_of(6)
    ids = ids_of([1, 2, 3])
    pages = allocator.allocate(3)
    prefix = cache.insert(ids, pages, Prefix(), 2)
    cache.forget(pages[:forgotten])
    cache.insert(ids, pages, prefix, 3)  # by somebody who still computes on it
    assert cache.match(ids, Prefix(), 3)[0] == []
    allocator.release(pages)
    put(allocator, cache, ids_of([1]))
    assert len(cache.match(ids, Prefix(), 3)[0]) == 1


def test_nothing_enters_after_a_page_that_is_forgotten():
    allocator, cache = cache_of(3)
    ids = ids_of([1, 2])
    pages = allocator.allocate(2)
    prefix = cache.insert(ids, pages, Prefix(), 1)
    cache.forget(pages[:1])
    assert cache.insert(ids, pages, prefix, 2) == prefix
    assert cache.num_pages == 0


def test_the_first_of_two_equal_pages_stays_and_the_other_is_blank_once_it_is_given_back():
    allocator, cache = cache_of(4)
    mine, theirs = allocator.allocate(2), allocator.allocate(2)
    ids = ids_of([1, 2])
    assert cache.insert(ids, mine, Prefix(), 2) == cache.insert(ids, theirs, Prefix(), 2)
    assert cache.match(ids, Prefix(), 2)[0] == mine
    allocator.release(theirs)
    allocator.release(mine)
    assert allocator.allocate(2) == [theirs[1], theirs[0]]


@pytest.mark.parametrize("page", [0, 3], ids=["blank", "given-back"])
def test_a_page_that_nobody_keeps_cannot_be_shared(page):
    allocator, _ = cache_of(4)
    allocator.release(allocator.allocate(4)[3:])
    allocator.release([0])
    with pytest.raises(ValueError, match="not kept"):
        allocator.hold([page])


@settings(max_examples=150)
@given(
    st.integers(2, 12),
    st.lists(
        st.tuples(st.sampled_from(["run", "end", "forget"]), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=40
    ),
)
def test_whatever_happens_a_page_that_is_found_holds_exactly_those_ids(num_pages, moves):
    allocator, cache = cache_of(num_pages)
    content, alive = {}, []  # what was last written to each page: all ids up to its end
    for move, kinds in moves:
        if move == "run":
            ids = ids_of(kinds)
            hits, prefix = cache.match(ids, Prefix(), len(kinds))
            for i, page in enumerate(hits):
                assert content[page] == kinds[: i + 1]
            allocator.hold(hits)
            own = allocator.allocate(len(kinds) - len(hits))
            if own is None:
                allocator.release(hits)
                continue
            for i, page in enumerate(own, len(hits)):
                content[page] = kinds[: i + 1]
            assert cache.insert(ids, hits + own, prefix, len(kinds)).num_pages <= len(kinds)
            alive.append(hits + own)
        elif alive:
            pages = alive.pop(len(kinds) % len(alive))
            if move == "forget":
                cache.forget(pages)
            allocator.release(pages)
        held = {page for pages in alive for page in pages}
        assert allocator.num_free == num_pages - len(held)
    for pages in alive:
        allocator.release(pages)
    assert sorted(allocator.allocate(num_pages)) == list(range(num_pages))
    assert cache.num_pages == 0
