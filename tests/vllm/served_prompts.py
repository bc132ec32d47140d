"""Prompts for an engine behind HTTP."""

from __future__ import annotations

PROMPT_TOKENS = 700


RESTORABLE = 640
