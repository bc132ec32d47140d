"""Every message, in the order of the documents."""

from __future__ import annotations

from kvoffload.protocol import answers, blocks, insight, lifecycle, lifeline, opening, peering, watching
from kvoffload.protocol.message import Message

MESSAGES: tuple[type[Message], ...] = (
    opening.Hello,
    opening.HelloAccepted,
    opening.Register,
    opening.Registered,
    opening.Mark,
    opening.Bye,
    answers.Error,
    answers.Done,
    blocks.Acquire,
    blocks.AcquireEntries,
    blocks.Acquired,
    blocks.Promote,
    blocks.Promoted,
    blocks.Credits,
    blocks.CreditsGranted,
    blocks.Publish,
    blocks.Abort,
    blocks.Release,
    blocks.Prefetch,
    blocks.Invalidate,
    watching.Stats,
    watching.Counts,
    watching.Subscribe,
    watching.Subscribed,
    watching.NamespaceOpened,
    watching.Stored,
    watching.Removed,
    watching.Cleared,
    watching.EventsLost,
    insight.Explain,
    insight.Explained,
    insight.Inspect,
    insight.Insight,
    insight.Clear,
    insight.ClearedBlocks,
    insight.SetQuota,
    lifecycle.Drain,
    lifecycle.Draining,
    lifecycle.Adopt,
    lifecycle.AdoptAnswer,
    peering.OpenLink,
    peering.LinkOpened,
    peering.Introduce,
    lifeline.Greeting,
    lifeline.Welcome,
    lifeline.Memory,
    lifeline.Growth,
    lifeline.Express,
    lifeline.Offer,
    lifeline.Quarantine,
    lifeline.Closing,
    lifeline.Farewell,
)

CAPABILITIES = frozenset({"adopt", "events", "explain", "operate", "peer", "prefetch", "promote"})
"""Parts of this version that a peer may lack. `promote` a server has where there are tiers below memory, `peer` where
it serves other servers."""
