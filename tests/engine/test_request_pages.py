"""A request takes pages over only where it has computed nothing itself, and waits for another's only from there on."""

from rapid_llm.config import PAGE_SIZE
from rapid_llm.engine.request_pages import RequestPages
from rapid_llm.kvcache.page_allocator import PageAllocator
from tests.engine.harness import request

IDS = [*range(4 * PAGE_SIZE), 1]


def two_alike(num_pages=16):
    """Two started requests for the same ids, of which nothing is computed."""
    pages = RequestPages(PageAllocator(num_pages), True)
    first, second = request("first", IDS, 4), request("second", IDS, 4)
    assert pages.start(first, 0)
    assert pages.start(second, 0)
    return pages, first, second


def test_pages_that_another_has_finished_take_the_place_of_ones_own():
    pages, first, second = two_alike()
    pages.publish(first, 2)
    assert pages.skip_found(second) == range(2)
    assert second.pages[:2] == first.pages[:2]
    assert (second.num_computed, second.num_cached_tokens) == (2 * PAGE_SIZE, 2 * PAGE_SIZE)
    pages.publish(first, 4)
    assert pages.skip_found(second) == range(2, 4)
    assert pages.skip_found(second) == range(0)
    pages.release(first)
    pages.release(second)
    assert pages.allocator.num_free == 16


def test_what_one_has_begun_to_compute_is_not_replaced():
    pages, first, second = two_alike()
    own = list(second.pages)
    second.num_computed = 5  # on their way: a step in flight writes them into the first page
    pages.publish(first, 4)
    assert pages.skip_found(second) == range(0)
    assert second.pages == own
    assert second.num_computed == 5


def test_who_has_not_begun_follows_who_came_before():
    pages, first, second = two_alike()
    assert pages.followers([first, second]) == {second}
    second.num_computed = 5
    assert pages.followers([first, second]) == set()


def test_nobody_follows_where_ids_part_or_nothing_is_to_be_found():
    pages, first, _ = two_alike()
    other = request("other", [9, *IDS], 4)
    assert pages.followers([first, other, request("short", IDS[:9], 4)]) == set()
    plain = RequestPages(PageAllocator(16), False)
    assert plain.followers([first, first]) == set()


def test_a_start_that_would_leave_too_little_takes_nothing():
    pages, first, second = two_alike(num_pages=12)
    pages.publish(first, 4)
    pages.release(first)
    assert pages.allocator.num_free == 7
    third = request("third", IDS, 4)  # finds 4 free pages and needs one more
    assert not pages.start(third, 3)
    assert pages.allocator.num_free == 7
    assert pages.start(third, 2)
    assert pages.allocator.num_free == 2
    assert second.pages
