"""What keeps blocks apart whose engine hashes are equal: weights that changed, tenants, contents of adapters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvoffload.connector.block_chain import NO_MASK, combine_masks
from kvoffload.connector.identity.adapters import AdapterContents, mask_of
from kvoffload.connector.request_terms import RequestTerms
from kvoffload.keys.prompt_hashes import mask_of_tenant
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestMasks:
    """Owned by the scheduler's thread. A mask is put over every name of a request's blocks."""

    def __init__(self) -> None:
        self._adapters = AdapterContents()
        self._is_started = False
        self.generation = NO_MASK
        """Of the weights. Engines that start with the same ones begin with the same; whose weights have changed while
        it ran shares nothing from then on."""
        self._former = NO_MASK

    def renew(self) -> None:
        """The weights have changed, as far as anybody knows."""
        self._former, self.generation = self.generation, os.urandom(HASH_BYTES)

    def take_back(self) -> None:
        """Is told that the weights have not changed: names are again what they were before they were renewed last."""
        self.generation = self._former

    def find(self, request: Request, terms: RequestTerms) -> bytes | None:
        """Returns the mask over a request's names. None: what its adapter holds is not known, yet or at all, and
        nothing of it may be saved or loaded. To be asked at every use of an answer."""
        mask = self.generation
        if terms.tenant:
            mask = combine_masks(mask, mask_of_tenant(terms.tenant))
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
