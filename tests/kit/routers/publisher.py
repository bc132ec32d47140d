"""vLLM's own publisher of events, with a wire after it that loses messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch, ZmqEventPublisher

TOPIC = "kv@one@m"


class Publisher:
    """Publishes as an engine does after a step. `endpoint` is the near end, `lossy_endpoint` what gets through."""

    def __init__(self, folder: Path, kept: int) -> None:
        self.endpoint, self.replay_endpoint, self.lossy_endpoint = (
            f"ipc://{folder / name}" for name in ("endpoint", "replay", "lossy")
        )
        self.own = ZmqEventPublisher(0, self.endpoint, self.replay_endpoint, buffer_steps=kept, topic=TOPIC)
        self.told: list[KVEventBatch] = []

    def publish(self, events: Iterable[KVCacheEvent]) -> None:
        """In one batch, which may be empty: who has lost one before notices it then."""
        self.told.append(KVEventBatch(ts=time.time(), events=list(events)))
        self.own.publish(self.told[-1])


@contextmanager
def publishing(folder: Path, *, is_lost: Callable[[], bool] = lambda: False, kept: int = 10_000) -> Iterator[Publisher]:
    """`is_lost` is asked for each message. So many of them are `kept` for those who ask again."""
    publisher, is_ending, context = Publisher(folder, kept), threading.Event(), zmq.Context()

    def carry() -> None:
        with context.socket(zmq.SUB) as heard, context.socket(zmq.PUB) as told:
            heard.linger = told.linger = 0
            heard.setsockopt(zmq.SUBSCRIBE, b"")
            heard.connect(publisher.endpoint)
            told.bind(publisher.lossy_endpoint)
            while not is_ending.is_set():
                if heard.poll(20):
                    message = heard.recv_multipart()
                    if not is_lost():
                        told.send_multipart(message)

    thread = threading.Thread(target=carry)
    thread.start()
    try:
        yield publisher
    finally:
        is_ending.set()
        thread.join()
        context.term()
        publisher.own.shutdown()
