"""Rule 5: tensors and scale views come, are checked, and are let go of, as often as the engine likes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvoffload.errors import (
    BlockAlignmentError,
    BlockCountError,
    HoleError,
    KVOffloadError,
    OverlapError,
    RegistrationError,
    SelfTestError,
    StorageError,
    StrideError,
    UnknownLayerError,
)
from kvoffload.kvspec import (
    Allocation,
    GroupSpec,
    KVGeometry,
    Registration,
    ScalePlacement,
    StateSpec,
    check_alignment,
    place_strided,
    recurrent_layer,
)
from tests.kit.kvspec.builders import Tensors, allocate, attention, dense, one_group, qwen3next
from tests.kit.transfer.plain_copy import PlainCopy


def scales_beside(num_blocks: int) -> KVGeometry:
    layers = [attention(f"layers.{i}", dtype="int8_per_token_head", scales=ScalePlacement.BESIDE) for i in range(2)]
    pages, scales = num_blocks * layers[0].page_bytes, num_blocks * layers[0].scale_bytes
    placements = []
    for i, layer in enumerate(layers):
        placements += [
            place_strided(layer, allocation="kv", offset=i * pages, block_stride=layer.page_bytes),
            place_strided(layer, allocation="s", offset=i * scales, block_stride=layer.scale_bytes, part="scales"),
        ]
    return KVGeometry(
        num_blocks=num_blocks,
        hash_block_size=2,
        groups=(one_group(*layers),),
        allocations=(Allocation(name="kv", size_bytes=2 * pages), Allocation(name="s", size_bytes=2 * scales)),
        placements=tuple(placements),
    )


def register(geometry: KVGeometry, tensors: Tensors | None = None) -> Registration:
    tensors = tensors or allocate(geometry)
    registration = Registration()
    registration.register(geometry, tensors.views, scale_views=tensors.scales)
    return registration


def test_registering_checks_proves_and_holds() -> None:
    geometry = dense(3)
    tensors = allocate(geometry)
    registration = Registration()
    assert not registration.is_registered
    report = registration.register(geometry, tensors.views)
    assert registration.is_registered
    assert registration.report is report
    assert registration.geometry is geometry
    assert report.allocations[0].page_bytes == geometry.sizes["kv"]
    tensors.views["layers.1"][2, 0] = 99
    assert registration.memory["kv"].dtype == torch.uint8
    assert registration.memory["kv"][registration.page_map.block_runs(0, 2)[1].start] == 99


def test_scale_views_are_saved_and_restored_with_their_pages() -> None:
    """vLLM #39224: the pages were saved without the views. Here a record has both."""
    geometry = scales_beside(3)
    tensors = allocate(geometry)
    registration = register(geometry, tensors)
    copy = PlainCopy(registration.page_map, registration.memory)
    for value, view in enumerate([*tensors.views.values(), *tensors.scales.values()], start=1):
        view[1] = value
    records = torch.zeros(1, registration.page_map.groups[0].record_bytes, dtype=torch.uint8)
    copy.save(0, [1], records)
    for view in [*tensors.views.values(), *tensors.scales.values()]:
        view.zero_()
    copy.load(0, [1], records)
    for value, view in enumerate([*tensors.views.values(), *tensors.scales.values()], start=1):
        assert (view[1] == value).all()
        assert (view[[0, 2]] == 0).all()


def test_after_unregister_nothing_holds_any_tensor() -> None:
    """vLLM #39224: released pages with scale views still alive were CUDA memory errors. Weak references prove it."""
    geometry = scales_beside(3)
    memory = {name: np.zeros(size, dtype=np.uint8) for name, size in geometry.sizes.items()}
    freed = {name: weakref.ref(array) for name, array in memory.items()}
    tensors = allocate(geometry)
    tensors.memory = {name: torch.from_numpy(array) for name, array in memory.items()}
    del memory
    for views in (tensors.views, tensors.scales):
        for placement in geometry.placements:
            if placement.tensor in views:
                (run,) = placement.runs
                flat = tensors.memory[run.allocation]
                views[placement.tensor] = flat.as_strided((3, run.length), (run.stride, 1), run.base)
    watched = [weakref.ref(tensor) for tensor in (*tensors.views.values(), *tensors.scales.values())]
    registration = register(geometry, tensors)
    copy = PlainCopy(registration.page_map, registration.memory)
    registration.attach(copy)
    del tensors, views, flat
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4, "the engine's own tensor objects are never kept"
    assert all(ref() is not None for ref in freed.values()), "the memory is"
    assert registration.unregister() == ()
    assert [ref() for ref in freed.values()] == [None, None], "after unregister it is not"
    assert not registration.is_registered


def test_what_still_holds_memory_is_named() -> None:
    geometry = scales_beside(2)
    registration = register(geometry)
    mapping = registration.memory
    kept = mapping["s"]
    assert registration.unregister() == ("s",)
    assert kept.numel() == geometry.sizes["s"]
    assert len(mapping) == 0, "the mapping alone keeps nothing"


def test_users_of_the_memory_are_closed_before_it_is_let_go_of() -> None:
    closed = []

    class User:
        def __init__(self, name: str, memory: object) -> None:
            self.name, self.memory = name, memory

        def close(self) -> None:
            closed.append(self.name)
            self.memory = None

    registration = register(dense(2))
    registration.attach(User("copy engine", registration.memory["kv"]))
    registration.attach(User("reader", registration.memory["kv"]))
    assert registration.unregister() == ()
    assert closed == ["reader", "copy engine"]
    assert registration.unregister() == ()
    assert len(closed) == 2


def test_memory_is_let_go_of_even_if_a_user_fails_to_close() -> None:
    class User:
        def close(self) -> None:
            raise OSError("stream lost")

    geometry = dense(2)
    tensors = allocate(geometry)
    watched = weakref.ref(tensors.memory["kv"])
    registration = register(geometry, tensors)
    registration.attach(User())
    del tensors
    with pytest.raises(OSError, match="stream lost"):
        registration.unregister()
    gc.collect()
    assert watched() is None
    registration.register(geometry, allocate(geometry).views)


def test_one_storage_under_two_names_is_refused() -> None:
    """Each allocation is proved for itself, so this would hide an overlap."""
    geometry = dense(2)
    first = geometry.placements[0]
    geometry = replace(
        geometry,
        allocations=tuple(Allocation(name=name, size_bytes=128, slack_bytes=128) for name in ("kv", "twin")),
        placements=(first, place_strided(geometry.layers["layers.1"], allocation="twin", block_stride=64)),
    )
    flat = torch.zeros(256, dtype=torch.uint8)
    views = {name: flat[:128].view(2, 64) for name in ("layers.0", "layers.1")}
    with pytest.raises(OverlapError, match="allocations kv and twin are the same storage"):
        Registration().register(geometry, views)


def test_profile_clean_up_allocate_register_sleep_wake() -> None:
    """vLLM #39224 as one sequence: a cache of 2 blocks for profiling, the real one, sleep mode, and back."""
    registration = Registration()
    record = torch.zeros(0)
    freed: list[weakref.ref[torch.Tensor]] = []
    for num_blocks, phase in ((2, "profile"), (64, "serve"), (64, "wake")):
        geometry = scales_beside(num_blocks)
        tensors = allocate(geometry)
        freed += [weakref.ref(flat) for flat in tensors.memory.values()]
        registration.register(geometry, tensors.views, scale_views=tensors.scales)
        copy = PlainCopy(registration.page_map, registration.memory)
        registration.attach(copy)
        if phase == "serve":
            for value, view in enumerate([*tensors.views.values(), *tensors.scales.values()], start=1):
                view[63] = value
            record = torch.zeros(1, registration.page_map.groups[0].record_bytes, dtype=torch.uint8)
            copy.save(0, [63], record)
        if phase == "wake":
            copy.load(0, [5], record)
            for value, view in enumerate([*tensors.views.values(), *tensors.scales.values()], start=1):
                assert (view[5] == value).all()
        assert registration.unregister() == ()
        del geometry, tensors, copy
        view = None
        gc.collect()
        assert [ref() for ref in freed] == [None] * len(freed), phase


def elsewhere(tensors: Tensors) -> None:
    tensors.views["layers.1"] = tensors.views["layers.1"].clone()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.views.pop("layers.1"), RegistrationError, "its tensor layers.1 was not given"),
        (lambda t: t.scales.pop("layers.0.scales"), RegistrationError, "its tensor layers.0.scales was not given"),
        (
            lambda t: t.views.update(extra=t.views["layers.0"]),
            UnknownLayerError,
            "tensor extra was given, which nothing",
        ),
        (lambda t: t.scales.update(x=t.scales["layers.0.scales"]), UnknownLayerError, "scale view x was given, which"),
        (elsewhere, StrideError, "layers.1 is not in the storage that other tensors of allocation kv"),
        (lambda t: t.views.update({"layers.1": t.views["layers.0"]}), StrideError, "starts -96 bytes from where"),
        (lambda t: t.views.update({"layers.1": t.views["layers.1"][:2]}), BlockCountError, "has 2 entries, expected 3"),
        (lambda t: t.views.update({"layers.0": torch.zeros(3, 32).byte()}), StorageError, "only 96 bytes"),
    ],
)
def test_tensors_that_are_not_as_declared_are_refused_and_not_held(
    change: Callable[[Tensors], object], error: type[KVOffloadError], message: str
) -> None:
    geometry = scales_beside(3)
    tensors = allocate(geometry)
    change(tensors)
    registration = Registration()
    with pytest.raises(error, match=message) as caught:
        registration.register(geometry, tensors.views, scale_views=tensors.scales)
    assert caught.value.remedy
    assert not registration.is_registered
    registration.register(geometry, allocate(geometry).views, scale_views=allocate(geometry).scales)


def test_shared_and_excluded_layers_may_come_with_tensors() -> None:
    """vLLM's mapping has alias layers too; they are checked and not stored twice."""
    geometry = dense(2)
    group = one_group(
        *geometry.groups[0].layers, attention("shared", alias_of="layers.0"), attention("draft", excluded="rebuilt")
    )
    geometry = replace(geometry, groups=(group,))
    views = allocate(geometry).views
    views = {**views, "shared": views["layers.0"], "draft": torch.zeros(3)}
    registration = Registration()
    registration.register(geometry, views)
    assert registration.page_map.groups[0].record_bytes == 128
    with pytest.raises(
        StrideError, match=r"tensor shared is declared to share the pages of layers\.0 and starts elsew"
    ):
        Registration().register(geometry, {**views, "shared": views["layers.1"]})


def test_an_excluded_layer_with_pages_may_come_without_a_tensor() -> None:
    geometry = dense(2)
    first, second = geometry.groups[0].layers
    geometry = replace(geometry, groups=(one_group(first, replace(second, excluded="host resident")),))
    views = allocate(geometry).views
    del views["layers.1"]
    registration = Registration()
    assert registration.register(geometry, views).allocations[0].excluded_bytes == 128


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"hash_block_size": 4}, BlockAlignmentError),
        ({"allocations": (Allocation(name="kv", size_bytes=257),)}, HoleError),
    ],
)
def test_alignment_and_completeness_are_checked_at_every_registration(
    changes: dict[str, object], error: type[KVOffloadError]
) -> None:
    geometry = replace(dense(2), **changes)  # type: ignore[arg-type]
    registration = Registration()
    with pytest.raises(error):
        registration.register(geometry, allocate(geometry).views)
    assert not registration.is_registered


def test_the_self_test_runs_before_anything_is_held() -> None:
    geometry = dense(2)
    registration = Registration()

    def refuse(page_map: object, memory: dict[str, torch.Tensor]) -> None:
        assert not registration.is_registered
        assert memory["kv"].numel() == 256
        raise SelfTestError("no")

    tensors = allocate(geometry)
    with pytest.raises(SelfTestError):
        registration.register(geometry, tensors.views, self_test=refuse)
    assert not registration.is_registered
    watched = weakref.ref(tensors.memory["kv"])
    del tensors
    gc.collect()
    assert watched() is None


def test_twice_and_never_are_refused() -> None:
    registration = Registration()
    for use in (lambda: registration.memory, lambda: registration.page_map, lambda: registration.attach(None)):  # type: ignore[arg-type]
        with pytest.raises(RegistrationError, match="no KV caches are registered"):
            use()
    geometry = qwen3next(2)
    registration.register(geometry, allocate(geometry).views)
    with pytest.raises(RegistrationError, match="are registered already; unregister the old ones first"):
        registration.register(geometry, allocate(geometry).views)
    assert registration.is_registered


# ---- alignment ----


def full(block_size: int, **changes: object) -> GroupSpec:
    layer = attention("layers.0", block_size=block_size, **changes)
    return GroupSpec(name="full attention", layers=(layer,), block_size=block_size)


def recurrent(block_size: int) -> GroupSpec:
    layer = recurrent_layer("layers.1", block_size=block_size, states=(StateSpec("s", (1,), "int8"),))
    return GroupSpec(name="gdn", layers=(layer,), block_size=block_size)


@pytest.mark.parametrize(("block_size", "hash_block_size"), [(16, 16), (640, 16), (640, 640), (2, 1)])
def test_multiples_are_aligned(block_size: int, hash_block_size: int) -> None:
    check_alignment([full(block_size)], hash_block_size=hash_block_size)


def test_the_error_of_a_hybrid_model_has_both_numbers_the_group_and_the_remedy() -> None:
    """vLLM #38554: without prefix caching a hybrid model's attention keeps its small blocks."""
    with pytest.raises(BlockAlignmentError) as caught:
        check_alignment([recurrent(640), full(16)], hash_block_size=640)
    assert str(caught.value) == (
        "group full attention: block size 16 is not a multiple of hash block size 640; enable prefix caching "
        "(vLLM: --enable-prefix-caching): for hybrid models (recurrent layers and attention) the engine then aligns "
        "block sizes"
    )
    assert caught.value.context == {"group": "full attention", "block_size": 16, "hash_block_size": 640}


def test_other_models_are_told_a_block_size() -> None:
    with pytest.raises(BlockAlignmentError, match="set a block size that is a multiple of 16"):
        check_alignment([full(24)], hash_block_size=16)


def test_groups_that_are_not_stored_have_no_keys_to_align() -> None:
    check_alignment([full(24, excluded="rebuilt"), full(32)], hash_block_size=16)


def test_a_hash_block_has_tokens() -> None:
    with pytest.raises(BlockAlignmentError, match="hash_block_size is 0"):
        check_alignment([full(16)], hash_block_size=0)
