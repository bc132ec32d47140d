"""Slots that are held ready."""

from __future__ import annotations

import numpy as np

from kvoffload.client.credit_stock import FULL_POOL_SHARE, MAX_SLOTS, POOL_SHARE, CreditStock, fit_stocks


def numbers(*values: int) -> np.typing.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def test_it_is_filled_up_below_half() -> None:
    stock = CreditStock(2, 4)
    assert stock.missing(0) == 4
    stock.is_asking = True
    assert stock.missing(0) == 0
    stock.is_asking = False
    stock.put(numbers(1, 0, 2, 3), numbers(10, 99, 20, 30))
    assert len(stock) == 3  # ticket 0 is no slot
    assert stock.missing(0) == 0
    taken = stock.take(7, 1, 2)
    assert (taken.memory_id, taken.group, taken.tickets.tolist(), taken.addresses.tolist()) == (7, 2, [1, 2], [10, 20])
    assert stock.missing(0) == 3
    stock.not_before_ns = 50
    assert (stock.missing(49), stock.missing(50)) == (0, 3)
    assert len(stock.take(7, 1, 5)) == 1
    assert len(stock.take(7, 1, 5)) == 0


def test_what_was_lacking_is_asked_for_up_to_what_the_pool_allows() -> None:
    """A full pool lends few slots ahead, and a prompt of a hundred blocks may not be saved in pieces."""
    (stock,) = make_stocks((1000, 1))
    fit_stocks([stock], 320 * POOL_SHARE, is_full=True)
    assert (stock.high, stock.missing(0)) == (80, 80)
    stock.put(numbers(*range(1, 81)), numbers(*range(1, 81)))
    assert len(stock.take(7, 1, 80)) == 80
    stock.lacking = 30
    assert stock.missing(0) == 110
    stock.put(numbers(*range(1, 21)), numbers(*range(1, 21)))
    assert stock.missing(0) == 90
    stock.lacking = 5000
    assert stock.missing(0) == 300
    stock.put(numbers(*range(1, 401)), numbers(*range(1, 401)))
    assert stock.missing(0) == 0
    stock.clear()
    assert stock.lacking == 0


def test_a_lost_session_has_none() -> None:
    stock = CreditStock(0, 4)
    stock.put(numbers(1), numbers(10))
    stock.is_asking = True
    stock.clear()
    assert (len(stock), stock.missing(0)) == (0, 4)


def make_stocks(*wanted: tuple[int, int]) -> list[CreditStock]:
    return [CreditStock(group, slots, slot_bytes=size) for group, (slots, size) in enumerate(wanted)]


def test_a_pool_that_is_large_enough_gives_each_group_what_it_wants() -> None:
    """As many as a step fills of a 70B model's blocks, in 512 GiB; a group's slots have a bound of their own."""
    stocks = make_stocks((3072, 5 << 20), (100, 1 << 10), (1 << 20, 1))
    fit_stocks(stocks, 512 << 30)
    assert [stock.high for stock in stocks] == [3072, 100, MAX_SLOTS]
    assert [stock.missing(0) for stock in stocks] == [3072, 100, MAX_SLOTS]


def test_all_groups_together_hold_a_share_of_the_pool_in_proportion_and_some_slots_always() -> None:
    stocks = make_stocks((1000, 100), (500, 200), (20, 1))
    fit_stocks(stocks, 100_010 * POOL_SHARE)
    assert [stock.high for stock in stocks] == [500, 250, 10]
    fit_stocks(stocks, 0)
    assert [stock.high for stock in stocks] == [8, 8, 8]


def test_who_wants_no_slots_holds_none() -> None:
    (stock,) = make_stocks((0, 100))
    fit_stocks([stock], 1 << 30)
    assert stock.missing(0) == 0


def test_fewer_slots_of_a_full_pool_are_held_ready() -> None:
    """Slots held ready take the place of blocks in a full pool."""
    stocks = make_stocks((1000, 100), (500, 200), (20, 1))
    fit_stocks(stocks, 100_010 * FULL_POOL_SHARE, is_full=True)
    assert [stock.high for stock in stocks] == [500, 250, 10]
    fit_stocks(stocks, 200_020 * FULL_POOL_SHARE, is_full=True)
    assert [stock.high for stock in stocks] == [1000, 500, 20]
    fit_stocks(stocks, 0, is_full=True)
    assert [stock.high for stock in stocks] == [8, 8, 8]


def test_of_a_pool_that_is_full_a_whole_window_is_held_if_the_pool_has_a_share_for_it() -> None:
    """gemma-3-27b's windows have 65 blocks."""
    stocks = [CreditStock(group, 1000, slot_bytes=100, whole=whole) for group, whole in enumerate((1, 65))]
    fit_stocks(stocks, 20_000 * FULL_POOL_SHARE, is_full=True)
    assert [stock.high for stock in stocks] == [100, 130]
    fit_stocks(stocks, 20_000 * POOL_SHARE, is_full=True)
    assert [stock.high for stock in stocks] == [25, 100]
