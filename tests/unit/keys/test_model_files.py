"""Models and adapters in a local folder are named by content."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvoffload.errors import IdentityError
from kvoffload.keys.model_files import (
    EDGE_BYTES,
    WINDOW_BYTES,
    WINDOWS,
    identify_adapter,
    identify_revision,
    sample_offsets,
)

BIG = 8 * EDGE_BYTES


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 10000.0}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (BIG // 256))
    return folder


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 1]))


def test_the_same_content_has_the_same_revision_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert identify_revision(tmp_path / "copy") == identify_revision(model)


@pytest.mark.parametrize("offset", [0, EDGE_BYTES - 1, EDGE_BYTES, BIG - 1, BIG - EDGE_BYTES])
def test_a_sampled_byte_changes_the_revision(model: Path, offset: int) -> None:
    before = identify_revision(model)
    flip(model / "model.safetensors", offset)
    assert identify_revision(model) != before


def test_configuration_name_and_size_count_but_the_tokenizer_does_not(model: Path) -> None:
    seen = [identify_revision(model)]
    (model / "tokenizer.json").write_text('{"other": 1}')
    assert identify_revision(model) == seen[0]
    (model / "config.json").write_text('{"rope_theta": 20000.0}')
    seen.append(identify_revision(model))
    with (model / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")
    seen.append(identify_revision(model))
    (model / "model.safetensors").rename(model / "other.safetensors")
    seen.append(identify_revision(model))
    assert len(set(seen)) == 4


def test_code_that_comes_with_a_model_counts(model: Path) -> None:
    seen = [identify_revision(model)]
    for code in ("theta = 1", "theta = 2"):
        (model / "modeling_acme.py").write_text(code)
        seen.append(identify_revision(model))
    assert len(set(seen)) == 3


def test_a_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--acme--llama" / "snapshots" / ("ab" * 20)
    folder.mkdir(parents=True)
    assert identify_revision(folder) == "ab" * 20


def test_a_sample_is_bounded_and_spread_over_the_file() -> None:
    size_bytes = 1 << 40
    windows = list(sample_offsets(size_bytes))
    assert sum(length for _, length in windows) == 2 * EDGE_BYTES + WINDOWS * WINDOW_BYTES
    assert windows[0] == (0, EDGE_BYTES)
    assert windows[-1] == (size_bytes - EDGE_BYTES, EDGE_BYTES)
    ends = [offset + length for offset, length in windows]
    assert all(start >= end for (start, _), end in zip(windows[1:], ends, strict=False))
    assert list(sample_offsets(10)) == [(0, 10)]


def test_an_adapter_is_named_by_every_byte(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(bytes(BIG))
    assert identify_adapter(tmp_path / "one") == identify_adapter(tmp_path / "two")
    flip(tmp_path / "two" / "adapter_model.safetensors", BIG // 2 + 12345)
    assert identify_adapter(tmp_path / "one") != identify_adapter(tmp_path / "two")


def test_what_an_engine_does_not_read_of_an_adapter_can_be_left_out(tmp_path: Path) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors")
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    all_of_it, what_is_read = identify_adapter(tmp_path), identify_adapter(tmp_path, names=names)
    assert all_of_it == what_is_read
    (tmp_path / "optimizer.pt").write_bytes(b"big")
    assert identify_adapter(tmp_path) != all_of_it
    assert identify_adapter(tmp_path, names=names) == what_is_read
    flip(tmp_path / "adapter_config.json", 0)
    assert identify_adapter(tmp_path, names=names) != what_is_read
    with pytest.raises(IdentityError, match="no adapter weights"):
        identify_adapter(tmp_path, names=names[:1])


def test_what_is_no_model_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="No such file"):
        identify_revision(tmp_path / "absent")
    with pytest.raises(IdentityError, match="no adapter weights"):
        identify_adapter(tmp_path)
    (model / "model.safetensors").unlink()
    with pytest.raises(IdentityError, match="no weight file"):
        identify_revision(model)
    (model / "config.json").unlink()
    with pytest.raises(IdentityError, match=r"no config\.json"):
        identify_revision(model)
