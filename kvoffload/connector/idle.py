"""The connector of an engine of which nothing can be kept: it answers every question of vLLM with "nothing"."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvoffload.connector.common.step_plan import NOTHING_TO_DO

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Holds no memory, starts no server and opens no connection. The engine runs as it would without a connector."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig, *, why: str
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            logger.warning("kvoffload keeps nothing of this engine's cache, and the engine runs without it: %s", why)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Holds no tensor."""

    def unregister_kv_caches(self) -> None:
        """Holds no tensor."""

    def restore_kv_caches(self) -> None:
        """Holds no tensor."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves nothing."""

    def wait_for_save(self) -> None:
        """Saves nothing."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Loads nothing: `get_num_new_matched_tokens` has promised no tokens."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return NOTHING_TO_DO

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
