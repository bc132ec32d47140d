"""A process's way to a cache server: join, look up in mapped memory, ask within a budget. Knows no engine."""

from kvoffload.client.async_client import AsyncClient
from kvoffload.client.block_calls import FarTerms, HintTerms, PendingAcquire
from kvoffload.client.client import Client
from kvoffload.client.inventory import Heard, InventoryBegun, InventoryEnded
from kvoffload.client.joining import Member
from kvoffload.client.prompt_log import PromptNote
from kvoffload.client.terms import ClientTerms, LinkState, LinkTerms, add_report_text, describe_blocks

__all__ = [
    "AsyncClient",
    "Client",
    "ClientTerms",
    "FarTerms",
    "Heard",
    "HintTerms",
    "InventoryBegun",
    "InventoryEnded",
    "LinkState",
    "LinkTerms",
    "Member",
    "PendingAcquire",
    "PromptNote",
    "add_report_text",
    "describe_blocks",
]
