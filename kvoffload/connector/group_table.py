"""The session's groups as the scheduler side counts them: those that are stored, in the order of the engine's block
tables, and of a pipeline stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kvoffload.connector.step_plan import GroupFacts
from kvoffload.errors import BlockAlignmentError
from kvoffload.kvspec import ReuseRule


class GroupTable:
    """Lists groups whose blocks are whole multiples of what the engine hashes. It never changes.

    Stages of a pipeline have one block table in common, and each has a group of its own there: what is said of a table
    is said of its first one, and of none of the others. They are of use together alone.
    """

    def __init__(
        self,
        groups: Sequence[GroupFacts],
        *,
        hash_block_size: int,
        alignment: int,
        whole_prompts: bool = False,
        drops_last_block: bool = False,
        shards: Sequence[int] = (),
    ) -> None:
        """`shards`: by group, how many ranks hold different bytes of a block; one, if nothing is said."""
        for facts in groups:
            size = facts.rule.block_size
            if size % hash_block_size:
                raise BlockAlignmentError(
                    f"{facts.name}: blocks of {size} tokens are no multiple of the {hash_block_size} tokens of a hash",
                    remedy="enable prefix caching, which aligns the block sizes of hybrid models",
                )
        self.facts = tuple(groups)
        self.rules = tuple(facts.rule for facts in groups)
        self.shards = tuple(shards) or (1,) * len(groups)
        self.stored_bytes = tuple(n * facts.record_bytes for n, facts in zip(self.shards, groups, strict=True))
        """Of a block, all shards together."""
        self.hash_block_size = hash_block_size
        self.alignment = lcm(alignment, *(facts.rule.block_size for facts in groups))
        """Tokens that every hit of ours is a multiple of: the engine's own may end in a block (`prefix_match_unit`)."""
        self.hashes_per_block = tuple(rule.block_size // hash_block_size for rule in self.rules)
        self.of_table: dict[int, int] = {}
        """By position in the engine's block tables: the first group there."""
        for group, facts in enumerate(groups):
            self.of_table.setdefault(facts.index, group)
        firsts = self.of_table.values()
        self.other_stages = {
            first: tuple(
                group for group, facts in enumerate(groups) if facts.index == groups[first].index and group != first
            )
            for first in firsts
        }
        """By the first group of a table: those of later stages."""
        self.stages = tuple(sorted({facts.stage for facts in groups}))
        self.is_staged = len(self.stages) > 1
        self.table_rules = tuple(self.rules[first] for first in firsts)
        self.block_size_of_table = {facts.index: facts.rule.block_size for facts in groups}
        self.with_states = any(rule.reuse is ReuseRule.EXACT_BOUNDARY for rule in self.rules)
        prefix = [group for group in firsts if self.rules[group].reuse is ReuseRule.PREFIX]
        self.first_prefix = prefix[0] if prefix else None
        """The group whose blocks are the parents of windows and states."""
        self.windows = tuple(
            group for group in firsts if self.rules[group].reuse in (ReuseRule.WINDOW, ReuseRule.CHUNK)
        )
        self.prefixes = tuple(prefix)
        self.is_all_prefix = len(prefix) == len(self.of_table)
        self.dropped_tokens = self.alignment if drops_last_block else 0
        """The engine's own hits end so much before what they match: see `vllm_compat.drops_last_block`."""
        # A window before a boundary lacks what the token before it sees first, and a state cannot be rewound.
        self._computed_tokens = 0 if whole_prompts and self.is_all_prefix else 1

    def __len__(self) -> int:
        return len(self.facts)

    def align(self, tokens: int) -> int:
        """The longest hit of at most so many tokens."""
        return tokens // self.alignment * self.alignment

    def longest_hit(self, tokens: int) -> int:
        """Returns how many of a prompt's tokens a hit may have. One token has to be computed. Where a prompt is
        restored to its end, the engine computes its last token once more, in a step of another shape than its own
        hit's, which computes a block."""
        if not self.dropped_tokens:
            return self.align(tokens - self._computed_tokens)
        # vLLM's search over several groups matches the block that it drops up to the prompt's very end.
        return self.drop(self.align(tokens if len(self.of_table) > 1 else tokens - self._computed_tokens))

    def drop(self, matched: int) -> int:
        """Says where a hit ends that matches so many tokens."""
        return max(matched - self.dropped_tokens, 0)
