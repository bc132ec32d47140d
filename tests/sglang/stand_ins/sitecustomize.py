"""Stands in for torchvision, whose build for a torch with CUDA breaks imports beside a CPU torch, and for the copies of
SGLang's host pools (`host_copies`).

An engine for text imports torchvision's names and calls nothing of it: classes are empty, and everything else is
absent.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

STANDS_FOR = "torchvision"
HOST_POOLS = {f"sglang.srt.mem_cache.pool_host.{name}" for name in ("mha", "mla")}


class _Name(type):
    """A class any attribute of which is its own name, as members of an enumeration are taken from it."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(metaclass=_Name):
    def __init_subclass__(cls, **_: object) -> None:
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            return _Name(name, (_Empty,), {})
        return importlib.import_module(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != STANDS_FOR:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _HostPools(importlib.abc.MetaPathFinder):
    """Finds what others find, and has their loader stand in when the module is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in HOST_POOLS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_stand_in(module: types.ModuleType) -> None:
            execute(module)
            importlib.import_module("host_copies").stand_in(module)

        spec.loader.exec_module = execute_and_stand_in  # type: ignore[method-assign]
        return spec


sys.meta_path.append(_Finder())
sys.meta_path.insert(0, _HostPools())
