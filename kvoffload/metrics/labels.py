"""What people read on the page and in `kvoffload top` for each thing that is shown, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Label:
    words: str
    meaning: str


OUTCOMES: Mapping[str, Label] = {
    "hit_memory": Label("from memory", "Restored from the server's memory."),
    "hit_lower": Label("from slower tiers", "Restored from a disk, a store or a peer."),
    "never_seen": Label("never seen", "Computed: nobody had asked for these tokens, as far as the server remembers."),
    "evicted": Label("evicted", "Computed: it was there and made room. More memory or a disk would have kept it."),
    "untrusted": Label("damaged", "Computed: its bytes were not what was saved, and it was forgotten."),
    "cleared": Label("cleared", "Computed: an operator cleared the memory."),
    "other_identity": Label("other identity", "Computed: an engine with another model, dtype or setting has it."),
    "incomplete": Label("incomplete", "Computed: a window, a state or another group was missing for a hit there."),
    "too_short": Label("too short", "Computed: less than a whole block of it was shared."),
    "not_served": Label("no server", "Computed: the engine had no server at that moment."),
    "refused": Label("refused", "Computed: the server had no room for a lease."),
    "slow_to_answer": Label("answer too late", "Computed: the server did not answer in time."),
    "no_room": Label("no room in the engine", "Computed: the engine had no room for the whole prompt."),
    "slower_than_computing": Label("slower than computing", "Computed: loading it was estimated to take longer."),
    "tier_too_slow": Label("tier too slow", "Computed: a slower tier would not have brought it in time."),
    "skipped": Label("not wanted", "Computed: the request or its engine wanted no restores."),
    "other": Label("other reasons", "Computed for reasons that are less frequent; the table has each."),
}
CALLS: Mapping[str, Label] = {
    "call acquire": Label(
        "find and lease a prefix", "The longest prefix of a prompt that is there, leased to be loaded."
    ),
    "call acquire_entries": Label("lease named blocks", "Blocks that the engine names, leased to be loaded."),
    "call credits": Label("hand out slots", "Slots that an engine holds ready for its saves."),
    "call publish": Label("publish saved blocks", "Blocks that were written, so that they are found."),
    "call abort": Label("give back slots", "Slots that were not written."),
    "call release": Label("release leases", "Leases whose loads have ended."),
    "call invalidate": Label("forget blocks", "Blocks whose bytes are not to be used any more."),
    "promotion": Label("wait for", "How long requests waited for what a slower tier brought to memory."),
    "residence": Label("time in memory", "How long blocks that made room had been in memory."),
}
SHOWN: Mapping[str, Label] = {
    "hit_rate": Label("prompt tokens restored", "Of those that engines did not have themselves."),
    "hit_ceiling": Label(
        "with endless memory", "Share of the blocks asked for that had been asked for before: no cache could hit more."
    ),
    "memory": Label("memory in use", "What blocks take of the server's memory. A full one is no fault."),
    "saved_seconds": Label(
        "computing saved", "What the restored tokens would have taken the engines to compute, as they have measured."
    ),
    "blocks": Label("blocks in memory", "Of all models and groups."),
    "evicted": Label("made room", "Blocks that left memory for others, so far."),
    "leases": Label("leases", "Loads under way: their blocks cannot be evicted."),
    "reserved": Label("slots held ready", "Room that engines hold for their next saves, or are writing to."),
    "sessions": Label("processes", "Of engines and observers that have joined."),
    "namespaces": Label("identities", "Kinds of engines that may share blocks: model, dtypes, layouts, kernels."),
    "tokens": Label("tokens", "Prompt tokens, since the server began."),
    "share": Label("share", "Of all that engines did not have themselves."),
    "used": Label("in use", "What records take there."),
    "written": Label("written", "To this tier, since the server began."),
    "read": Label("read", "From this tier, since the server began."),
    "reads_now": Label("reads now", "From this tier, a second."),
    "can_read": Label("measured speed", "How fast it has read; requests wait for it only where that pays."),
    "load": Label("load", "Reads now, of the measured speed."),
    "to_write": Label("to be written", "Waits for this tier; beyond its queue blocks are not written."),
    "waiting": Label("requests waiting", "For what this tier is bringing to memory."),
    "late": Label("late", "Requests that the tier did not serve in time; they computed."),
    "part": Label("of memory", "Its share of the server's memory."),
    "quota": Label("quota", "What this tenant keeps when memory is full."),
    "of_quota": Label("of quota", "Memory in use, of the quota; of all memory where there is none."),
    "calls": Label("calls", "Since the server began."),
    "mean": Label("mean", "Time that the server took."),
    "p99": Label("99 % within", "All but one of a hundred took no longer."),
    "times_memory": Label("memory", "In pools like this one: 0.5 x is half of its memory."),
    "would_hit": Label(
        "would be hits", "Of the blocks that engines loaded, or computed and saved. What is long ago counts less."
    ),
    "times": Label("times", "Since the server began."),
}


def describe_labels() -> dict[str, dict[str, list[str]]]:
    """Describes labels for the page, as words and meaning."""
    sections = {"outcomes": OUTCOMES, "calls": CALLS, "shown": SHOWN}
    return {
        section: {name: [one.words, one.meaning] for name, one in labels.items()}
        for section, labels in sections.items()
    }
