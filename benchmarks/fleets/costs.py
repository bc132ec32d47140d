"""Costs of reads, writes and prefill, from a file in which every figure has its source."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Model:
    """A node's engine: what it computes, how fast, and how large that is."""

    parameters: float
    layers: int
    width: int
    kv_bytes_per_token: int
    flops_per_s: float

    def prefill_s(self, begin: int, end: int) -> float:
        """Tokens from `begin` to `end`: all weights for each, and attention to all before it."""
        attention = 2 * self.layers * self.width * (end * end - begin * begin)
        return (2 * self.parameters * (end - begin) + attention) / self.flops_per_s


@dataclass(frozen=True, kw_only=True)
class Place:
    """A remote: what a node's end and its own end carry each way, and how long one question takes."""

    name: str
    node_bytes_per_s: float
    place_bytes_per_s: float
    latency_s: float
    source: str
    is_measured: bool


@dataclass(frozen=True, kw_only=True)
class Costs:
    model: Model
    memory_bytes_per_s: float
    memory_latency_s: float
    deadline_s: float
    queue_s: float
    places: dict[str, Place]
    sources: dict[str, str]


def read_costs(path: Path) -> Costs:
    """KeyError and ValueError say what the file lacks."""
    with path.open("rb") as file:
        data = tomllib.load(file)
    model, memory, settings = data["model"], data["memory"], data["settings"]
    places = {
        name: Place(
            name=name,
            node_bytes_per_s=entry["node_bytes_per_s"],
            place_bytes_per_s=entry.get("place_bytes_per_s", math.inf),
            latency_s=entry["latency_s"],
            source=entry["source"],
            is_measured=entry["is_measured"],
        )
        for name, entry in data["remotes"].items()
    }
    return Costs(
        model=Model(
            parameters=model["parameters"],
            layers=model["layers"],
            width=model["width"],
            kv_bytes_per_token=model["kv_bytes_per_token"],
            flops_per_s=data["gpu"]["flops_per_s"],
        ),
        memory_bytes_per_s=memory["bytes_per_s"],
        memory_latency_s=memory["latency_s"],
        deadline_s=settings["deadline_s"],
        queue_s=settings["queue_s"],
        places=places,
        sources={name: data[name]["source"] for name in ("model", "gpu", "memory", "settings")}
        | {name: place.source for name, place in places.items()},
    )
