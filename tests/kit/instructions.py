"""Counts the bytecode instructions of a package: a measure of work that is the same on every machine, however busy it
is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


class Instructions:
    """Counts the instructions that a package's own code executes inside `counted`."""

    def __init__(self, package: ModuleType) -> None:
        assert package.__file__ is not None
        self._folder = str(Path(package.__file__).parent)
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        former = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(former)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._on_instruction

    def _on_instruction(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        self.count += event == "opcode"
        return self._on_instruction
