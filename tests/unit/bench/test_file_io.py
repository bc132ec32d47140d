"""A disk's limit is one pass over a file, by fio or by a loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.bench import file_io
from kvoffload.bench.file_io import FileLoad, find_fio, time_file_load
from kvoffload.errors import BenchmarkError


@pytest.fixture
def load(tmp_path: Path) -> FileLoad:
    return FileLoad(path=tmp_path / "file", size_bytes=4 << 20, block_bytes=64 << 10, depth=4)


@pytest.mark.parametrize("is_random", [False, True])
def test_a_loop_goes_over_the_whole_file(load: FileLoad, is_random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "find_fio", lambda: None)
    assert time_file_load(replace(load, is_random=is_random)) > 0
    assert any(load.path.read_bytes())
    assert time_file_load(replace(load, is_random=is_random, is_write=True)) > 0
    assert load.path.read_bytes() == bytes(4 << 20)


def test_fio_is_used_where_it_is(load: FileLoad) -> None:
    if find_fio() is None:
        pytest.skip("needs fio")
    assert time_file_load(load) > 0
    assert time_file_load(replace(load, is_write=True)) > 0


def test_a_fio_that_fails_is_told_in_one_line(load: FileLoad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "fio"
    broken.write_text("#!/bin/sh\necho one >&2\necho no such engine >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(file_io, "find_fio", lambda: str(broken))
    with pytest.raises(BenchmarkError, match="fio failed: no such engine"):
        time_file_load(load)
