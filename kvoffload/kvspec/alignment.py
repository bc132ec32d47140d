"""Every group's block size is a multiple of the hash block size (rule 6): a block's key is the hash of its last tokens.

The error says what to change, because the cause is usually a setting far away (vLLM #38554).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.errors import BlockAlignmentError
from kvoffload.kvspec.group import GroupSpec


def check_alignment(groups: Sequence[GroupSpec], *, hash_block_size: int) -> None:
    """BlockAlignmentError for the first stored group whose blocks are not whole hash blocks."""
    if hash_block_size < 1:
        raise BlockAlignmentError(
            f"hash_block_size is {hash_block_size}",
            remedy="give the tokens per block hash",
            hash_block_size=hash_block_size,
        )
    is_hybrid = any(group.has_recurrent for group in groups)
    for group in groups:
        # What is not stored has no keys.
        if not group.is_stored or group.block_size % hash_block_size == 0:
            continue
        remedy = f"set a block size that is a multiple of {hash_block_size}"
        if is_hybrid:
            remedy = (
                "enable prefix caching (vLLM: --enable-prefix-caching): for hybrid models (recurrent layers and "
                "attention) the engine then aligns block sizes"
            )
        raise BlockAlignmentError(
            f"group {group.name}: block size {group.block_size} is not a multiple of hash block size {hash_block_size}",
            remedy=remedy,
            group=group.name,
            block_size=group.block_size,
            hash_block_size=hash_block_size,
        )
