"""`Client` has every call that the connector makes of a cache, and so has the stand-in of the tests."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.client import Client
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.nodes.all_nodes import AllNodes
from tests.kit.connector.local_client import LocalClient, LocalPlaces

KINDS = {kind.__name__: kind for kind in (Client, AllNodes, LocalClient)}


def find_calls(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]


def names_of(call: Any) -> list[tuple[str, Any]]:
    return [(parameter.name, parameter.kind) for parameter in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize("kind", ["Client", "AllNodes", "LocalClient"])
@pytest.mark.parametrize("call", find_calls(CacheClient))
def test_clients_are_called_in_the_same_way(kind: str, call: str) -> None:
    assert names_of(getattr(KINDS[kind], call)) == names_of(getattr(CacheClient, call))


@pytest.mark.parametrize("call", find_calls(LocalPlaces))
def test_workers_call_them_in_the_same_way(call: str) -> None:
    assert names_of(getattr(Client, call)) == names_of(getattr(LocalPlaces, call))


@pytest.mark.parametrize("name", [name for name, value in vars(CacheClient).items() if isinstance(value, property)])
def test_a_client_says_what_is_wanted(name: str) -> None:
    for kind in (Client, AllNodes):
        assert isinstance(inspect.getattr_static(kind, name), property)
