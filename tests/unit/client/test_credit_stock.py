"""Slots that are held ready."""

from __future__ import annotations

import numpy as np

from kvoffload.client.credit_stock import CreditStock, plan_stocks


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


def test_a_lost_session_has_none() -> None:
    stock = CreditStock(0, 4)
    stock.put(numbers(1), numbers(10))
    stock.is_asking = True
    stock.clear()
    assert (len(stock), stock.missing(0)) == (0, 4)


def test_each_group_has_as_many_as_fit() -> None:
    stocks = plan_stocks([1000, 1 << 30, 1, 0], stock_bytes=100_000)
    assert [stock.missing(0) for stock in stocks] == [100, 8, 4096, 4096]


def test_of_a_small_pool_few_slots_are_held_ready_and_some_always() -> None:
    stock = CreditStock(0, 1000, slot_bytes=100)
    held_ready = []
    for share_bytes in (5_000, 0, 10**9):
        stock.fit(share_bytes)
        held_ready.append(stock.missing(0))
    assert held_ready == [50, 8, 1000]
