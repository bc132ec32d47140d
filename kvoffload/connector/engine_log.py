"""Where an engine's processes write what we say: in the engine's own log, in its form and at its level."""

from __future__ import annotations

import logging


def join_engine_log() -> None:
    """Makes vLLM's logger the parent of ours, however often it is called: its handlers, format, level and prefix of the
    process are ours then, also those of a file that VLLM_LOGGING_CONFIG_PATH names.

    Such a file may name `kvoffload` too, for a level or handlers of its own.
    """
    ours = logging.getLogger("kvoffload")
    ours.parent = logging.getLogger("vllm")
    ours.setLevel(ours.level)  # so that loggers forget which levels they took to be enabled
