"""An engine's start: its settings as ours, refusals before anything is opened, and one line for its log."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.config.sources import Settings
from kvoffload.connector.identity.agreement import SharingSettings, agree, make_register
from kvoffload.connector.scheduler_parts import SchedulerSettings
from kvoffload.connector.start_up import EngineStart, plan_stock
from kvoffload.connector.worker_side import WorkerSettings
from kvoffload.engines.cache_access import CacheAccess
from kvoffload.errors import ServerError, UnsupportedError
from kvoffload.kvspec import HeadUnits, ReuseRule
from kvoffload.protocol import Role
from kvoffload.units import describe_size
from tests.kit.connector.changes import Change, set_in
from tests.kit.connector.engine_configs import full, make_config, make_vllm_config, window
from tests.kit.connector.facts import facts, group_facts

BEGIN = EngineStart.begin_for_worker
"""Itself: no test of this folder has a private server."""
REGISTER = make_register(
    b"f" * 32, (), SharingSettings(hash_block_size=4, hash_algorithm="sha256", hash_seed="", tensor_ranks=1)
)


def make_start(config: Any = None, *, replicas: int = 1, **settings: Any) -> EngineStart:
    cache = make_config((["a"], full(8)), (["c"], window(4, head_size=16)), num_blocks=8)
    cache.kv_tp_replicas = replicas
    return EngineStart(Settings(memory="64MiB", **settings), config or make_vllm_config(), cache)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "saves", "hands_over"),
    [("kv_both", True, False), ("kv_producer", True, True), ("kv_consumer", False, False)],
)
def test_roles_are_vllms(role: str, saves: bool, hands_over: bool) -> None:
    start = make_start(make_vllm_config(role=role))
    scheduler_settings = start.scheduler_settings()
    assert (scheduler_settings.saves, scheduler_settings.hands_over) == (saves, hands_over)
    start.access = access = FakeAccess(1 << 30)  # type: ignore[assignment]
    access.saves = saves
    start.open_for_scheduler(REGISTER, agree({(0, 0): facts()}, scheduler_settings.sharing), None)
    assert access.opened == [(Role.SCHEDULER, 0)]


@pytest.mark.parametrize(
    ("role", "settings", "is_told"),
    [
        ("kv_both", {}, False),
        ("kv_producer", {}, True),
        ("kv_consumer", {}, True),
        ("kv_consumer", {"server": "kv.socket"}, False),
        ("kv_consumer", {"linger": "3s"}, False),
        ("kv_consumer", {"valkey": "valkey://10.0.0.1:1"}, False),
        ("kv_consumer", {"custom_tier": "ours.tiers:Tier"}, False),
    ],
)
def test_an_engine_of_one_role_with_a_server_of_its_own_is_a_warning(
    caplog: pytest.LogCaptureFixture, role: str, settings: dict[str, Any], is_told: bool
) -> None:
    start = make_start(make_vllm_config(role=role), **settings)
    start.access = access = FakeAccess(1 << 30)  # type: ignore[assignment]
    scheduler_settings = start.scheduler_settings()
    access.saves = scheduler_settings.saves
    start.open_for_scheduler(REGISTER, agree({(0, 0): facts()}, scheduler_settings.sharing), None)
    assert any(f"its kv_role is {role}" in record.getMessage() for record in caplog.records) == is_told


def test_the_scheduler_goes_by_settings_and_by_the_engines_configuration() -> None:
    config = make_vllm_config()
    config.cache_config.prefix_cache_retention_interval = 64
    scheduler_settings = make_start(
        config,
        verify="always",
        whole_prompts=True,
        promote_deadline="7s",
        arrival_deadline="3s",
        events_interval="60s",
    ).scheduler_settings()
    assert scheduler_settings == SchedulerSettings(
        sharing=scheduler_settings.sharing,
        hit_alignment=8,
        verify_always=True,
        retention_interval=64,
        whole_prompts=True,
        promote_wait_s=7.0,
        arrival_wait_s=3.0,
        events_again_s=60.0,
    )
    assert (
        scheduler_settings.sharing.hash_block_size,
        scheduler_settings.sharing.hash_algorithm,
        scheduler_settings.sharing.ranks,
    ) == (4, "sha256", 1)
    assert make_start().scheduler_settings().verify_always is False


@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), [(4, 1, 4), (2, 3, 6)])
def test_ranks_are_those_of_the_engine(tensor: int, pipeline: int, ranks: int) -> None:
    config = make_vllm_config()
    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.pipeline_parallel_size = pipeline
    config.parallel_config.rank = 1
    start = make_start(config, self_test=False, copy_threads=3)
    sharing = start.scheduler_settings().sharing
    assert (sharing.tensor_ranks, sharing.pipeline_ranks, sharing.ranks) == (tensor, pipeline, ranks)
    assert start.worker_settings() == WorkerSettings(rank=1, sharing=sharing, has_self_test=False, copy_threads=3)


def on_two_machines(**changes: Any) -> Any:
    config = make_vllm_config()
    set_in("parallel_config", nnodes_within_dp=2, **changes)(config)
    return config


@pytest.mark.parametrize(("replicas", "rows", "shards"), [(1, 4, 2), (2, 2, 1), (4, 2, 1)])
def test_ranks_on_two_machines_have_a_share_of_the_shards_each(replicas: int, rows: int, shards: int) -> None:
    """Both machines keep the bytes that ranks on both hold."""
    config = on_two_machines(tensor_parallel_size=4, rank=3, node_rank_within_dp=1)
    config.kv_transfer_config.engine_id = "abc_dp0"
    start = make_start(config, replicas=replicas)
    sharing, group = start.worker_settings().sharing, replace(group_facts(0), replicas=replicas)
    assert (sharing.count_rows([group]), sharing.shards_of(group)) == (rows, shards)
    assert [sharing.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert (start.access.engine, start.access.machine_key) == ("abc_dp0_node1", "abc")
    assert start.access.engine_bytes == shards * make_start().access.engine_bytes


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (1, 2), (2, 2), (2, 4)])
def test_machines_with_whole_stages_or_equal_parts_of_one_are_served(tensor: int, pipeline: int) -> None:
    config = on_two_machines(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    assert make_start(config).scheduler_settings().sharing.nodes == 2


@pytest.mark.parametrize(
    ("heads", "tensor", "shards", "replicas"), [(4, 1, 4, 1), (4, 2, 4, 1), (2, 4, 2, 2), (32, 4, 16, 1)]
)
def test_with_shared_shapes_blocks_have_as_many_shards_whatever_the_number_of_ranks(
    heads: int, tensor: int, shards: int, replicas: int
) -> None:
    config = make_vllm_config()
    config.model_config.get_total_num_kv_heads = lambda: heads
    config.parallel_config.tensor_parallel_size = tensor
    start = make_start(config, shared_shapes=True)
    sharing, group = start.scheduler_settings().sharing, replace(group_facts(0), replicas=replicas)
    assert sharing.units == HeadUnits(heads=heads, ranks=tensor)
    assert (sharing.shards_of(group), sharing.units.replicas) == (shards, replicas)
    assert start.worker_settings().sharing == sharing
    assert make_start(config).scheduler_settings().sharing.units is None
    assert start.access.engine_bytes == make_start(config, replicas=replicas).access.engine_bytes


def test_with_shared_shapes_a_latent_is_one_unit_that_all_ranks_hold() -> None:
    config = make_vllm_config()
    config.model_config.use_mla = True
    config.parallel_config.tensor_parallel_size = 4
    sharing = make_start(config, shared_shapes=True).scheduler_settings().sharing
    assert sharing.units is not None
    assert (sharing.units.count, sharing.units.replicas) == (1, 4)
    assert sharing.shards_of(replace(group_facts(0), replicas=4)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("parallel_config", pipeline_parallel_size=2), "engines with pipeline stages"),
        (set_in("parallel_config", tensor_parallel_size=3), "3 tensor-parallel ranks hold parts of the 2 units"),
        (set_in("parallel_config", tensor_parallel_size=2, nnodes_within_dp=2), "ranks on several machines"),
        (set_in("parallel_config", tensor_parallel_size=2, decode_context_parallel_size=2), "decode context parallel"),
        (set_in("load_config", load_format="dummy"), "load format dummy may give others"),
    ],
)
def test_what_is_not_certified_for_shared_shapes_is_refused(change: Change, message: str) -> None:
    config = make_vllm_config()
    change(config)
    make_start(config)
    with pytest.raises(UnsupportedError, match=message):
        make_start(config, shared_shapes=True)


@pytest.mark.parametrize(
    ("engine", "key"), [("abc", "abc"), ("abc_dp0", "abc"), ("abc_dp13", "abc"), ("abc_dp1_x", "abc_dp1_x")]
)
def test_engines_of_one_deployment_have_a_name_in_common(engine: str, key: str) -> None:
    config = make_vllm_config()
    config.kv_transfer_config.engine_id = engine
    access = make_start(config).access
    assert (access.engine, access.machine_key) == (engine, key)


class FakeAccess:
    """Hands out clients that say how much memory there is; None: the server cannot be asked."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.opened: list[tuple[Role, int]] = []
        self.starts = 0
        self.may_start = threading.Event()
        self.problem: ServerError | None = None
        self.saves = True
        self.wire = SimpleNamespace(path=Path("private/s"))

    def open(
        self,
        register: Any,
        *,
        role: Role,
        rank: int = 0,
        on_event: object = None,
        stock_slots: tuple[int, ...] = (),
    ) -> FakeAccess:
        assert register is REGISTER
        assert bool(stock_slots) == (role is Role.SCHEDULER and self.saves), "only the scheduler gives slots away"
        self.opened.append((role, rank))
        return self

    def start_private(self) -> None:
        assert self.may_start.wait(60)
        self.starts += 1
        if self.problem is not None:
            raise self.problem

    def stats(self) -> Any:
        if self.capacity_bytes is None:
            raise ServerError("stats: did not answer", remedy="")
        return SimpleNamespace(capacity_bytes=self.capacity_bytes)


def test_each_process_joins_as_what_it_is() -> None:
    config = make_vllm_config()
    config.parallel_config.rank = 3
    start = make_start(config)
    start.access = access = FakeAccess(1 << 30)  # type: ignore[assignment]
    engine = agree({(0, 0): facts()}, start.scheduler_settings().sharing)
    assert start.open_for_worker(REGISTER) is access
    assert start.open_for_scheduler(REGISTER, engine, None) is access
    assert start.open_for_node(REGISTER, engine.groups) is access
    assert access.opened == [(Role.WORKER, 3), (Role.SCHEDULER, 0), (Role.SCHEDULER, 0)]


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_on_every_machine_an_engine_that_only_decodes_takes_no_slots(role: str) -> None:
    start = make_start(make_vllm_config(role=role))
    start.access = access = FakeAccess(1 << 30)  # type: ignore[assignment]
    access.saves = start.scheduler_settings().saves
    assert access.saves == (role != "kv_consumer")
    start.open_for_node(REGISTER, (group_facts(0),))
    assert access.opened == [(Role.SCHEDULER, 0)]


def test_an_engine_that_divides_its_blocks_otherwise_than_before_is_another_one_and_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvoffload")
    opened: list[tuple[str, bool]] = []

    def note(access: CacheAccess, register: Any, *, waits: bool = True, **given: Any) -> Any:
        opened.append((access.engine, waits))
        return FakeAccess(1 << 30)

    monkeypatch.setattr(CacheAccess, "open", note)
    start = make_start()
    engine, other = (
        agree({(0, 0): facts()}, start.scheduler_settings().sharing),
        replace(REGISTER, fingerprint=b"g" * 32),
    )
    for register in (REGISTER, other):
        start.open_for_worker(register)
        start.open_for_scheduler(register, engine, None)
    names = [start.access.engine, f"{start.access.engine} 67676767"]
    assert opened == [(names[0], True)] * 2 + [(names[1], False)] * 2
    assert sum("kvoffload keeps KV cache of" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("problem", [None, ServerError("the private server did not start", remedy="")])
def test_a_workers_private_server_starts_before_it_is_wanted(problem: ServerError | None) -> None:
    """A failure is not reported here: `open` tries again, and reports it."""
    start = make_start()
    start.access = access = FakeAccess(1 << 30)  # type: ignore[assignment]
    access.problem = problem
    for _ in range(2):
        BEGIN(start)
    assert (access.starts, access.opened) == (0, [])
    opening = threading.Thread(target=start.open_for_worker, args=(REGISTER,))
    opening.start()
    assert access.opened == []
    access.may_start.set()
    opening.join(60)
    assert (access.starts, access.opened) == (1, [(Role.WORKER, 0)])


def test_a_shared_server_is_nobodys_to_start() -> None:
    start = make_start(server="kv.socket")
    start.access = access = FakeAccess(1 << 30)  # type: ignore[assignment]
    access.may_start.set()
    BEGIN(start)
    assert start.open_for_worker(REGISTER) is access
    assert access.starts == 0


@pytest.mark.parametrize(
    ("capacity_bytes", "server", "line"),
    [
        # 16 bytes per token of the first group's 64-byte blocks, 8 of the second's.
        (24 << 20, "", "of acme/tiny in 24MiB (1,048,576 tokens) of a private server (log: private/s.log): "),
        (None, "kv.socket", "of acme/tiny in the memory of kv.socket, where no server is yet: "),
    ],
)
def test_one_line_says_what_is_kept_and_where(
    capacity_bytes: int | None, server: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvoffload")
    start = make_start(server=server)
    start.access = FakeAccess(capacity_bytes)  # type: ignore[assignment]
    start.open_for_scheduler(REGISTER, agree({(0, 0): facts()}, start.scheduler_settings().sharing), None)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "kvoffload.connector.start_up"]
    assert line in message
    assert "group 0 (prefix, 4 tokens, 64 bytes), group 2 (window, 8 tokens, 64 bytes)" in message
    told = "24 bytes per token; the engines that use it cache 1000B themselves"
    assert message.endswith(told if capacity_bytes is None else f"{told}, to which it adds 2516582%")


@pytest.mark.parametrize(
    ("parallel", "heads", "own"),
    [
        ({"tensor_parallel_size": 4}, 0, 2000),  # Two ranks in a row hold the same.
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 0, 2000),
        ({"tensor_parallel_size": 4, "nnodes_within_dp": 2}, 0, 1000),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes_within_dp": 2}, 0, 1000),
        ({"tensor_parallel_size": 4}, 2, 2000),
    ],
    ids=["tensor", "pipeline", "machines", "stages-on-machines", "units"],
)
def test_what_a_machines_ranks_cache_counts_once(
    parallel: dict[str, int], heads: int, own: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvoffload")
    config = make_vllm_config()
    set_in("parallel_config", **parallel)(config)
    start = make_start(config, shared_shapes=heads > 0)
    start.access = FakeAccess(1 << 30)  # type: ignore[assignment]
    sharing = start.scheduler_settings().sharing
    groups = (replace(group_facts(0), replicas=2),)
    ranks = {divmod(rank, sharing.tensor_ranks): facts(rank, groups=groups) for rank in range(sharing.ranks)}
    engine = agree(ranks, sharing)
    start.open_for_scheduler(REGISTER, engine, None)
    (message,) = [record.getMessage() for record in caplog.records if "keeps KV cache of" in record.getMessage()]
    assert f"the engines that use it cache {describe_size(own)} themselves, to which it adds " in message
    assert ("group 0 of stage 0 (" in message) == (sharing.pipeline_ranks > 1)
    assert ("on the first of 2 machines" in message) == (sharing.nodes > 1)
    parts = sharing.shards_of(engine.groups[0])
    assert (f"bytes in {parts} parts" in message) == (parts > 1)
    assert (", held alike by 2 ranks)" in message) == (sharing.replicas_of(engine.groups[0]) > 1)


def test_ranks_with_several_units_cache_what_all_their_units_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvoffload")
    config = make_vllm_config()
    config.model_config.get_total_num_kv_heads = lambda: 8
    config.parallel_config.tensor_parallel_size = 2
    start = make_start(config, shared_shapes=True)
    start.access = FakeAccess(1 << 30)  # type: ignore[assignment]
    ranks = {(0, rank): facts(rank) for rank in range(2)}
    start.open_for_scheduler(REGISTER, agree(ranks, start.scheduler_settings().sharing), None)
    (message,) = [record.getMessage() for record in caplog.records if "keeps KV cache of" in record.getMessage()]
    assert "group 0 (prefix, 4 tokens, 512 bytes in 8 parts)" in message
    assert f"the engines that use it cache {describe_size(2000)} themselves, to which it adds " in message


def test_little_memory_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = make_vllm_config()
    config.parallel_config.data_parallel_size_local = 2
    for capacity_bytes, is_little in ((1000, False), (980, True)):
        caplog.clear()
        start = make_start(config)
        start.access = FakeAccess(capacity_bytes)  # type: ignore[assignment]
        start.open_for_scheduler(REGISTER, agree({(0, 0): facts()}, start.scheduler_settings().sharing), None)
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == is_little
        assert not is_little or "is 49% of the engines' own caches" in warnings[0]


@pytest.mark.parametrize(
    ("tensor", "replicas", "engines", "times"), [(1, 1, 1, 1), (4, 1, 1, 4), (8, 8, 1, 1), (8, 1, 2, 16), (1, 1, 0, 1)]
)
def test_what_engines_cache_themselves_counts_blocks_that_differ(
    tensor: int, replicas: int, engines: int, times: int
) -> None:
    config = make_vllm_config()
    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.data_parallel_size_local = engines
    one = make_start().access.engine_bytes
    assert one > 0
    assert make_start(config, replicas=replicas).access.engine_bytes == times * one


def test_slots_are_held_ready_for_all_that_the_steps_under_way_can_fill() -> None:
    """A prompt of 8,192 tokens fills 512 blocks in one step; and whole windows are a matter of their own."""
    groups = (
        group_facts(0, block_size=16),
        group_facts(1, ReuseRule.WINDOW, block_size=16, window=4096),
        group_facts(2, ReuseRule.EXACT_BOUNDARY, block_size=1056),
    )
    prefix, windows, states = plan_stock(groups, step_tokens=8192, steps_under_way=1)
    assert prefix >= 2 * 512
    assert windows >= 8 * 257
    assert states >= 2 * 8
    assert plan_stock(groups, step_tokens=8192, steps_under_way=2) == (2 * prefix, 2 * windows, 2 * states)


@pytest.mark.parametrize(("block_size", "is_told"), [(8, False), (4, False), (64, True)])
def test_hits_that_can_end_at_few_states_are_a_warning(
    caplog: pytest.LogCaptureFixture, block_size: int, is_told: bool
) -> None:
    start = make_start()
    start.access = FakeAccess(1 << 30)  # type: ignore[assignment]
    scheduler_settings = start.scheduler_settings()
    groups = (group_facts(0, block_size=block_size), group_facts(1, ReuseRule.EXACT_BOUNDARY, block_size=8))
    start.open_for_scheduler(REGISTER, agree({(0, 0): facts(groups=groups)}, scheduler_settings.sharing), None)
    told = [record.getMessage() for record in caplog.records if "little of this engine's cache" in record.getMessage()]
    assert len(told) == is_told
    assert not is_told or "multiples of 64 tokens" in told[0]
