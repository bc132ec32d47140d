"""A process's way to a cache server: join, look up in mapped memory, ask within a budget. Knows no engine."""

from kvoffload.client.block_calls import HintSettings, PendingAcquire, TierWait
from kvoffload.client.client import Client
from kvoffload.client.inventory import Heard, InventoryBegun, InventoryEnded
from kvoffload.client.joining import Member
from kvoffload.client.prompt_log import PromptNote
from kvoffload.client.settings import ClientSettings, LinkSettings, LinkState, add_report_text, describe_blocks

__all__ = [
    "Client",
    "ClientSettings",
    "Heard",
    "HintSettings",
    "InventoryBegun",
    "InventoryEnded",
    "LinkSettings",
    "LinkState",
    "Member",
    "PendingAcquire",
    "PromptNote",
    "TierWait",
    "add_report_text",
    "describe_blocks",
]
