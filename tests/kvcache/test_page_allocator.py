"""The allocator never hands out a page twice, never loses one, and refuses what it does not know."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid_llm.kvcache.page_allocator import PageAllocator


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.randoms(use_true_random=False)), max_size=60))
def test_pages_are_owned_once_and_none_is_lost(num_pages, moves):
    allocator, owned = PageAllocator(num_pages), []
    for takes, count, random in moves:
        if takes:
            pages = allocator.allocate(count)
            assert (pages is None) == (count > num_pages - len(owned))
            for page in pages or []:
                assert 0 <= page < num_pages
                assert page not in owned
                owned.append(page)
        else:
            given_back = random.sample(owned, min(count, len(owned)))
            allocator.release(given_back)
            owned = [page for page in owned if page not in given_back]
        assert allocator.num_free == num_pages - len(owned)
    allocator.release(owned)
    assert sorted(allocator.allocate(num_pages)) == list(range(num_pages))


@pytest.mark.parametrize("pages", [[0, 0], [3], [-1], [9]], ids=["twice", "not-owned", "negative", "past-the-end"])
def test_a_wrong_free_raises_and_frees_nothing(pages):
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match="page"):
        allocator.release([1, *pages])
    assert allocator.num_free == 2


def test_an_allocation_that_does_not_fit_takes_nothing():
    allocator = PageAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3


def test_a_page_that_was_given_back_cannot_be_given_back_again():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(ValueError, match="nobody holds"):
        allocator.release(pages)
