"""Stands in for SGLang's kernels, which have no build for every processor: names are imported, and none is called."""

from __future__ import annotations

from collections.abc import Callable

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: object, **__: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return refuse
