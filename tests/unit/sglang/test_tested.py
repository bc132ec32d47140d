"""Another SGLang than the one that was tested is refused with one line that says what differs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any

import pytest

from kvoffload.errors import UnsupportedError
from kvoffload.sglang import tested
from kvoffload.sglang.tested import EngineParts, StorageParts, refuse_untested, refuse_untested_storage
from kvoffload.sglang.weight_updates import CHECK, SELECT
from tests.kit.sglang.updater import make_updater_class


def make_class(signatures: dict[str, str]) -> type:
    """Makes a class with methods of these names and parameters."""
    return type("Made", (), {name: make_method(signature) for name, signature in signatures.items()})


def make_method(signature: str) -> Any:
    def method(*_: object) -> None: ...

    names = signature.strip("()").split(", ")
    told: Any = method
    told.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    return told


def make_updater(**changed: Any) -> type:
    return type("Updater", (make_updater_class(),), {"__slots__": (), **changed})


def make_parts(**changed: object) -> EngineParts:
    parts = EngineParts(
        version=tested.VERSION,
        linker=make_class(tested.LINKER),
        counter=make_class(tested.COUNTER),
        transfer=make_class(tested.TRANSFER),
        updater=make_updater(),
    )
    return replace(parts, **changed)  # type: ignore[arg-type]


def test_what_was_tested_is_served() -> None:
    refuse_untested(make_parts())


def test_another_version_is_refused_even_if_nothing_differs() -> None:
    with pytest.raises(UnsupportedError, match=r"this is 0\.5\.24: its linker has the interface") as refused:
        refuse_untested(make_parts(version="0.5.24"))
    assert "\n" not in str(refused.value)


def test_what_differs_is_named() -> None:
    linker = make_class({**tested.LINKER, "lookup": "(self, rid, transfers, deadline)"})
    with pytest.raises(
        UnsupportedError,
        match=r"UnifiedCacheLinker\.lookup is \(self, rid, transfers, deadline\), tested was \(self, rid, transfers\)",
    ):
        refuse_untested(make_parts(linker=linker))
    counter = make_class({name: signature for name, signature in tested.COUNTER.items() if name != "fail"})
    with pytest.raises(UnsupportedError, match=r"LayerWiseLoadCounter\.fail is absent"):
        refuse_untested(make_parts(counter=counter))


def test_a_hook_that_nobody_knows_is_named() -> None:
    class Linker(make_class(tested.LINKER), ABC):  # type: ignore[misc]
        @abstractmethod
        def prepare_residency(self) -> None: ...

    with pytest.raises(UnsupportedError, match=r"UnifiedCacheLinker\.prepare_residency is new"):
        refuse_untested(make_parts(linker=Linker))


def test_an_update_of_weights_that_would_not_be_heard_of_is_named() -> None:
    def update(self: Any, recv_req: Any) -> None: ...

    for method in tested.UPDATER:
        with pytest.raises(UnsupportedError, match=rf"Updater\.{method} does not call {SELECT}"):
            refuse_untested(make_parts(updater=make_updater(**{method: update})))
    with pytest.raises(UnsupportedError, match=rf"Updater\.{SELECT} is absent"):
        refuse_untested(make_parts(updater=make_updater(**{SELECT: None})))
    with pytest.raises(UnsupportedError, match=rf"Updater\.{CHECK} is \(self\), tested was \(self, recv_req\)"):
        refuse_untested(make_parts(updater=make_updater(**{CHECK: lambda self: None})))


def test_many_differences_are_counted() -> None:
    with pytest.raises(UnsupportedError, match=rf"and {len(tested.LINKER) - 3} more"):
        refuse_untested(make_parts(linker=type("Empty", (), {})))


def test_a_storage_that_is_otherwise_is_named_too() -> None:
    parts = StorageParts(
        version=tested.VERSION,
        storage=make_class(tested.STORAGE),
        transfer=make_class(tested.TRANSFER),
        result=make_class(tested.RESULT),
        updater=make_updater(),
    )
    refuse_untested_storage(parts)
    with pytest.raises(UnsupportedError, match="its storage has the interface"):
        refuse_untested_storage(replace(parts, version="0.5.24"))
    other = make_class({**tested.STORAGE, "batch_get_v1": "(self, keys)"})
    with pytest.raises(UnsupportedError, match=r"Updater\.update_weights_from_p2p is new"):
        refuse_untested_storage(replace(parts, updater=make_updater(update_weights_from_p2p=print)))
    with pytest.raises(UnsupportedError, match=r"HiCacheStorage\.batch_get_v1 is \(self, keys\), tested was"):
        refuse_untested_storage(replace(parts, storage=other))
