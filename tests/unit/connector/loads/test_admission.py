"""The guard against the engine's deadlock: no request is admitted unless all admitted ones can finish their prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.connector.loads.admission import LoadAdmission


def test_a_load_needs_blocks_for_its_whole_prompt() -> None:
    admission = LoadAdmission([4])
    # Ten blocks for 40 tokens, and one for the first token that is generated.
    assert admission.admits(num_tokens=40, first_blocks=[0], free_blocks=11)
    assert not admission.admits(num_tokens=40, first_blocks=[0], free_blocks=10)


def test_null_blocks_before_a_window_are_not_needed() -> None:
    admission = LoadAdmission([4])
    assert admission.admits(num_tokens=40, first_blocks=[6], free_blocks=5)
    assert not admission.admits(num_tokens=40, first_blocks=[6], free_blocks=4)


def test_groups_add_up_each_at_its_own_block_size() -> None:
    admission = LoadAdmission([4, 8])
    assert admission.admits(num_tokens=41, first_blocks=[0, 5], free_blocks=14)
    assert not admission.admits(num_tokens=41, first_blocks=[0, 5], free_blocks=13)


def test_loaded_requests_count_until_they_are_settled() -> None:
    admission = LoadAdmission([4])
    admission.reserve("a", num_tokens=40, boundary=32)  # 3 blocks to come
    assert not admission.admits(num_tokens=4, first_blocks=[0], free_blocks=4)
    assert admission.admits(num_tokens=4, first_blocks=[0], free_blocks=5)
    admission.settle("a")
    admission.settle("a")
    assert admission.admits(num_tokens=4, first_blocks=[0], free_blocks=2)


def test_who_is_promised_blocks_is_known_by_name() -> None:
    admission = LoadAdmission([4])
    assert admission.reserved == ()
    admission.reserve("a", num_tokens=40, boundary=32)
    admission.reserve("b", num_tokens=40, boundary=32)
    assert set(admission.reserved) == {"a", "b"}
    admission.settle("a")
    assert admission.reserved == ("b",)


@given(
    st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3),
    st.integers(4, 200),
    st.lists(st.tuples(st.integers(9, 120), st.booleans()), max_size=12),
)
def test_admitted_requests_can_always_get_their_last_block(
    sizes: list[int], free: int, arrivals: list[tuple[int, bool]]
) -> None:
    """Played with a plain count of blocks: whatever was admitted, all prompts fit at once, and in any order."""
    admission = LoadAdmission(sizes)
    waiting: list[int] = []
    for number, (tokens, has_window) in enumerate(arrivals):
        boundary = (tokens - 1) // 8 * 8
        first = [boundary // size - 1 if has_window else 0 for size in sizes]
        if admission.admits(num_tokens=tokens, first_blocks=first, free_blocks=free):
            free -= sum(boundary // size - begin for size, begin in zip(sizes, first, strict=True))
            admission.reserve(str(number), num_tokens=tokens, boundary=boundary)
            waiting.append(sum(-(-tokens // size) - boundary // size for size in sizes))
    assert sum(waiting) <= free
