"""Sends our log lines to the engine's own log, in its format and at its level, in each of the engine's processes."""

from __future__ import annotations

import logging


def join_engine_log() -> None:
    """Makes vLLM's logger the parent of ours, so that ours has its handlers, format, level and process prefix, also
    those from a file that VLLM_LOGGING_CONFIG_PATH names. May be called any number of times.

    Such a file may also name `kvoffload`, for a level or handlers of its own.
    """
    ours = logging.getLogger("kvoffload")
    ours.parent = logging.getLogger("vllm")
    ours.setLevel(ours.level)  # so that loggers forget which levels they took to be enabled
