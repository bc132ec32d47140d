"""Slots that are held ready."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.client.credit_stock import FULL_POOL_SHARE, KEPT_NS, MAX_SLOTS, POOL_SHARE, CreditStock, fit_stocks
from kvoffload.units import GIB, MIB


def numbers(*values: int) -> np.typing.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def test_it_is_filled_up_below_half() -> None:
    stock = CreditStock(2, 4)
    assert stock.missing(0) == 4
    stock.asked = 4
    assert stock.missing(0) == 0
    stock.asked = 0
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
    stock.asked = 4
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


def test_all_groups_together_hold_a_share_of_the_pool_in_proportion_and_a_slot_always() -> None:
    stocks = make_stocks((1000, 100), (500, 200), (20, 1))
    fit_stocks(stocks, 100_010 * POOL_SHARE)
    assert [stock.high for stock in stocks] == [500, 250, 10]
    fit_stocks(stocks, 0)
    assert [stock.high for stock in stocks] == [1, 1, 1]


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
    assert [stock.high for stock in stocks] == [1, 1, 1]


def test_of_a_pool_that_is_full_a_whole_window_is_held_if_the_pool_has_a_share_for_it() -> None:
    """gemma-3-27b's windows have 65 blocks."""
    stocks = [CreditStock(group, 1000, slot_bytes=100, whole=whole) for group, whole in enumerate((1, 65))]
    fit_stocks(stocks, 20_000 * FULL_POOL_SHARE, is_full=True)
    assert [stock.high for stock in stocks] == [100, 130]
    fit_stocks(stocks, 20_000 * POOL_SHARE, is_full=True)
    assert [stock.high for stock in stocks] == [25, 100]


NEMOTRON = [(156, 20 * MIB)] * 8
"""The groups of Nemotron-Nano-9B-v2: how many slots each wants, and their bytes."""
GLM = [(156, 39_075_840)] * 2 + [(156, 34_734_080)] * 2 + [(156, 14_882_560)]
"""The groups of GLM-5-next on four ranks: four of states, and one of latents with their index."""


@pytest.mark.parametrize("groups", [NEMOTRON, GLM])
@pytest.mark.parametrize("pool_gib", [3, 4, 8, 16, 64, 512])
def test_what_a_full_pool_holds_ready_is_bounded_by_its_bytes(groups: list[tuple[int, int]], pool_gib: int) -> None:
    """However heavy a slot is. One slot of each group is always held."""
    stocks = make_stocks(*groups)
    fit_stocks(stocks, pool_gib * GIB, is_full=True)
    held = sum(stock.high * stock.slot_bytes for stock in stocks)
    assert held <= max(pool_gib * GIB // FULL_POOL_SHARE, sum(size for _, size in groups))
    assert all(stock.high >= 1 for stock in stocks)


def test_a_whole_prompt_has_what_it_lacks_of_the_pools_share_and_no_other_has_it_too() -> None:
    """20,000 tokens of GLM-5-next are 16 blocks, and a pool of 4 GiB holds one of each group ready."""
    stocks = make_stocks(*GLM)
    fit_stocks(stocks, 4 * GIB, is_full=True)
    latents, states = stocks[-1], stocks[0]
    assert (latents.high, states.high) == (1, 1)
    latents.lacking = states.lacking = 16
    assert latents.missing(0) == 17
    latents.asked = 17
    fit_stocks(stocks, 4 * GIB, is_full=True)
    states.asked = states.missing(0)
    assert 1 <= states.asked < 16
    fit_stocks(stocks, 4 * GIB, is_full=True)
    others = sum(stock.high * stock.slot_bytes for stock in stocks[1:-1])
    held = latents.held * latents.slot_bytes + states.held * states.slot_bytes
    assert held + others <= 4 * GIB // POOL_SHARE


def test_what_no_save_takes_goes_back() -> None:
    (stock,) = make_stocks((1000, 1))
    fit_stocks([stock], 80 * FULL_POOL_SHARE, is_full=True)
    stock.put(numbers(*range(1, 121)), numbers(*range(1, 121)))
    assert stock.surplus(5) == 0
    assert stock.surplus(4 + KEPT_NS) == 0
    stock.take(7, 1, 10)
    assert stock.surplus(5 + KEPT_NS) == 0
    assert stock.surplus(5 + 2 * KEPT_NS) == 30
    stock.take(7, 1, 30)
    assert stock.surplus(5 + 9 * KEPT_NS) == stock.surplus(5 + 99 * KEPT_NS) == 0
