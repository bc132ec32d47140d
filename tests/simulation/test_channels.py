"""The simulated wire keeps and loses messages as the sockets do that it stands for."""

from __future__ import annotations

from tests.simulation.channels import Pipe
from tests.simulation.timeline import MILLISECOND_NS, Timeline


def test_what_is_sent_in_a_lag_arrives_behind_what_was_on_its_way() -> None:
    for seed in range(20):
        timeline = Timeline(seed)
        arrived: list[int] = []
        pipe = Pipe(timeline, arrived.append)
        start_ns = timeline.now_ns
        pipe.send(1)
        pipe.lag(start_ns + 200 * MILLISECOND_NS)
        pipe.send(2)
        timeline.run_until(start_ns + 199 * MILLISECOND_NS)
        assert arrived == []
        pipe.send(3)
        pipe.send_end(4)
        timeline.run_until(start_ns + 300 * MILLISECOND_NS)
        assert arrived == [1, 2, 3, 4], seed
