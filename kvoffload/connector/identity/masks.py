"""Masks that keep blocks with equal engine hashes apart: for weights that changed, tenants, and adapters' contents."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvoffload.connector.common.block_chain import NO_MASK, combine_masks
from kvoffload.connector.common.request_settings import RequestSettings
from kvoffload.connector.identity.adapters import AdapterContents, mask_of
from kvoffload.keys.prompt_hashes import mask_of_tenant
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestMasks:
    """Owned by the scheduler's thread. A mask is combined with every name of a request's blocks."""

    def __init__(self) -> None:
        self._adapters = AdapterContents()
        self._is_started = False
        self.generation = NO_MASK
        """The mask for the weights. All engines begin with the same one; an engine whose weights changed while it ran
        shares nothing from then on."""
        self._former = NO_MASK

    def renew(self) -> None:
        """Gives blocks other names, because the weights have changed or may have."""
        self._former, self.generation = self.generation, os.urandom(HASH_BYTES)

    def take_back(self) -> None:
        """Takes the last `renew` back, because the weights have not changed."""
        self.generation = self._former

    def find(self, request: Request, settings: RequestSettings) -> bytes | None:
        """Returns the mask over a request's names. None: its adapter's content is not known, yet or at all, and none of
        its blocks may be saved or loaded. Callers ask again at every use of an answer."""
        mask = self.generation
        if settings.tenant:
            mask = combine_masks(mask, mask_of_tenant(settings.tenant))
        if request.lora_request is None:
            return mask
        if not self._is_started:
            self._adapters.start()
            self._is_started = True
        content = self._adapters.find(request.lora_request)
        return None if content is None else combine_masks(mask, mask_of(content))

    def close(self) -> None:
        if self._is_started:
            self._adapters.close()
