"""The connectors that ours is measured by: saves and loads take the link's time alone, and they miss nothing that the
pool's bytes could hold by the same policy in `kvoffload replay`. One saves all blocks and states that the engine makes.
The lean one saves only what hits need that end where a prompt or a request does, so that its pool has room for more of
them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput

from benchmarks.ground.ideal_pool import IdealPool, Record
from benchmarks.ground.machine import MACHINES
from benchmarks.ground.virtual_copy import LINK_RATE
from benchmarks.ground.virtual_memory import map_tensors
from kvoffload.cache import GroupRule, needed_blocks
from kvoffload.cache.boundary import find_reach
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.geometry import EngineCache, describe_cache, table_of
from kvoffload.kvspec import ReuseRule


@dataclass(frozen=True)
class IdealPlan(KVConnectorMetadata):
    """Requests that load, and how many bytes of each rank."""

    loads: tuple[tuple[str, int], ...] = ()


@dataclass
class _Seen:
    """The connector's notes of one request."""

    request: Any
    blocks: list[int]
    """By group: how many are saved, or on their way."""
    ends: list[int]
    """Of a lean connector, the boundaries ascending whose windows and states are not saved yet."""
    local: int = 0
    """Tokens that the engine had itself when it asked last."""


class IdealConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes it by name. Of its settings `pool_bytes` is of all ranks; with `in_step` the step itself waits for
    what its requests load, and otherwise they wait for a step after their load; with `is_lean` it is the lean one."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._machine = MACHINES[str(transfer.engine_id)]
        self._rank = vllm_config.parallel_config.rank
        self._under_way: dict[str, float] = {}
        self._in_step = bool(transfer.kv_connector_extra_config.get("in_step"))
        self._is_lean = bool(transfer.kv_connector_extra_config.get("is_lean"))
        if role is KVConnectorRole.WORKER:
            return
        assert self._machine.cache is not None
        cache = EngineCache(
            config=self._machine.cache,
            tensors=map_tensors(self._machine.cache),
            sharing={},
            layout=self._machine.cache.kv_cache_layout,
            hash_block_size=kv_cache_config.hash_block_size,
            context_ranks=vllm_config.parallel_config.decode_context_parallel_size,
        )
        # Groups that the engine rebuilds have no records.
        groups = [group for group in describe_cache(cache).groups if group.record_bytes]
        tables = [table_of(group.name) for group in groups]
        self._groups = {table: number for number, table in enumerate(tables)}
        self.rules = [
            GroupRule(block_size=group.block_size, reuse=group.reuse_rule, window=group.window) for group in groups
        ]
        self.record_bytes = [self._machine.record_bytes[table] for table in tables]
        """Bytes of a block in each group, of all ranks: each byte once."""
        self._bytes = [group.record_bytes for group in groups]
        self.pool = IdealPool(
            self.rules,
            self.record_bytes,
            capacity_bytes=transfer.kv_connector_extra_config["pool_bytes"],
        )
        self.alignment = vllm_compat.hit_alignment(vllm_config, kv_cache_config)
        self._replayed = vllm_compat.replayed_tokens(kv_cache_config)
        self._per_block = [rule.block_size // kv_cache_config.hash_block_size for rule in self.rules]
        self._has_states = any(rule.reuse is ReuseRule.EXACT_BOUNDARY for rule in self.rules)
        self._seen: dict[str, _Seen] = {}
        self._saved: list[Record] = []
        """The records that the last planned step saves: they are there when its forward and the link are done."""
        self._coming: list[tuple[float, list[Record]]] = []
        self._loads: list[tuple[str, int]] = []

    # ---- scheduler ----

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def on_new_request(self, request: Any) -> None:
        ends = self._list_ends(request) if self._is_lean else []
        self._seen[request.request_id] = _Seen(request, [0] * len(self.rules), ends)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._take_in()
        self._seen[request.request_id].local = num_computed_tokens
        limit = (request.num_tokens - 1) // self.alignment * self.alignment
        present = [self._find_present(request.block_hashes, group) for group in range(len(self.rules))]
        reach = find_reach(self.rules, present, local=num_computed_tokens, limit=limit, alignment=self.alignment)
        if reach <= max(num_computed_tokens, self._replayed):
            return 0, False
        return reach - num_computed_tokens, not self._in_step

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        local, size = self._seen[request.request_id].local, 0
        boundary, used = local + num_external_tokens, []
        for group, rule in enumerate(self.rules):
            needed = needed_blocks(rule, local=local, boundary=boundary)
            size += len(needed) * self._bytes[group]
            used += self._list_records(request.block_hashes, group, needed)
        self.pool.touch(used)
        self._loads.append((request.request_id, size))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._take_in()
        state = scheduler_output.kv_connector_block_state
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            seen = self._seen[request_id]
            full = min(seen.request.num_computed_tokens + tokens, len(seen.request.block_hashes) * self.hash_size)
            if self._is_lean:
                self._save_ends(seen, full)
                continue
            for group, rule in enumerate(self.rules):
                if rule.reuse is not ReuseRule.EXACT_BOUNDARY:
                    self._save_up_to(seen, group, full)
        for request_id, offers in (state.boundary_state_offloads if state is not None else {}).items():
            seen = self._seen[request_id]
            for table, _, boundary in offers:
                if (group := self._groups.get(table)) is None:
                    continue
                size, hashes = self.rules[group].block_size, seen.request.block_hashes
                if boundary % size or boundary > len(hashes) * self.hash_size:
                    continue
                if self._is_lean:
                    if boundary not in seen.ends:
                        continue
                    # Blocks beyond the last state are of no use, so they come with it.
                    self._save_end(seen, boundary)
                self._saved += self._list_records(hashes, group, range(boundary // size - 1, boundary // size))
        loads, self._loads = tuple(self._loads), []
        return IdealPlan(loads)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self._seen.pop(request.request_id, None)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @property
    def hash_size(self) -> int:
        """Returns the tokens that one of the engine's hashes covers."""
        return self.rules[0].block_size // self._per_block[0]

    def _list_ends(self, request: Any) -> list[int]:
        """Lists the last boundaries in a prompt, and in all of the request that the engine computes."""
        step, prompt = lcm(self.alignment, *(rule.block_size for rule in self.rules)), request.num_prompt_tokens
        ends = {tokens // step * step for tokens in (prompt - 1, prompt, prompt + request.max_tokens - 1)}
        return sorted(ends - {0})

    def _save_ends(self, seen: _Seen, full: int) -> None:
        """Saves full attention as it fills, and windows where a hit may end; with states, all of it comes with them."""
        if self._has_states:
            return
        for group, rule in enumerate(self.rules):
            if rule.reuse is ReuseRule.PREFIX:
                self._save_up_to(seen, group, full)
        while seen.ends and seen.ends[0] <= full:
            self._save_end(seen, seen.ends.pop(0))

    def _save_end(self, seen: _Seen, boundary: int) -> None:
        for group, rule in enumerate(self.rules):
            if rule.reuse is ReuseRule.PREFIX:
                self._save_up_to(seen, group, boundary)
            elif rule.reuse is not ReuseRule.EXACT_BOUNDARY:
                needed = needed_blocks(rule, local=0, boundary=boundary)
                first = max(needed.start, seen.blocks[group])
                self._saved += self._list_records(seen.request.block_hashes, group, range(first, needed.stop))
                seen.blocks[group] = max(seen.blocks[group], needed.stop)

    def _save_up_to(self, seen: _Seen, group: int, full: int) -> None:
        end = full // self.rules[group].block_size
        self._saved += self._list_records(seen.request.block_hashes, group, range(seen.blocks[group], end))
        seen.blocks[group] = max(seen.blocks[group], end)

    def _list_records(self, hashes: Any, group: int, positions: Iterable[int]) -> list[Record]:
        per_block = self._per_block[group]
        ends = [(at + 1) * per_block - 1 for at in positions]
        first = per_block - 1
        return [
            Record(group, bytes(hashes[end]), bytes(hashes[end - per_block]))
            if end > first
            else Record(group, bytes(hashes[end]))
            for end in ends
        ]

    def _find_present(self, hashes: Any, group: int) -> Any:
        per_block = self._per_block[group]
        return self.pool.find_present(group, [bytes(name) for name in hashes[per_block - 1 :: per_block]])

    def _take_in(self) -> None:
        """Takes in the records that have come to the pool by now."""
        if self._saved:
            saved, self._saved = self._saved, []
            size = sum(self._bytes[record.group] for record in saved)
            link = self._machine.links[0]
            self._coming.append((link.saves.run(size / LINK_RATE, not_before_s=link.forwards.free_s), saved))
        while self._coming and self._coming[0][0] <= self._machine.clock.now_s:
            self.pool.admit(self._coming.pop(0)[1])

    # ---- worker ----

    def register_kv_caches(self, kv_caches: Any) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, IdealPlan)
        link = self._machine.links[self._rank]
        for request_id, size in plan.loads:
            end_s = link.loads.run(size / LINK_RATE, not_before_s=link.worker.now_s)
            if self._in_step:
                link.worker.reach(end_s)
            else:
                self._under_way[request_id] = end_s

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        now_s = self._machine.links[self._rank].worker.now_s
        ended = {name for name, end_s in self._under_way.items() if end_s <= now_s}
        for name in ended:
            del self._under_way[name]
        return KVConnectorTransferResults(finished_recving=ended)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
