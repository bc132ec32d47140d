"""Ratios and speeds of the codec are measured on records that come back as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.codec import KINDS, make_codes, measure, read_records
from benchmarks.kv_records import parse_folders

NUMBERS = np.random.default_rng(36).normal(size=(4, 40_000)).astype(np.float32)
BFLOAT16 = (NUMBERS.view(np.uint32) >> 16).astype(np.uint16)
RECORDS = [memoryview(record.tobytes()) for record in BFLOAT16]
NOISE = [memoryview(np.random.default_rng(7).bytes(80_000))]


def test_every_code_is_measured_on_the_same_records() -> None:
    found = measure(RECORDS, make_codes(), rounds=1)
    assert list(found) == ["kvoffload", "zstd-1", "zstd-3", "zlib-1", "copy"]
    assert found["kvoffload"].ratio > found["zstd-1"].ratio > 1.05
    assert found["copy"].ratio == 1
    assert all(one.encode_bytes_s > 0 for one in found.values())
    assert all(one.decode_bytes_s is not None and one.decode_bytes_s > 0 for one in found.values())


def test_what_is_kept_as_it_is_is_not_decoded() -> None:
    found = measure(NOISE, make_codes(), rounds=1)["kvoffload"]
    assert (found.ratio, found.decode_bytes_s) == (1, None)
    assert found.as_json()["decode_gb_s"] is None


def test_a_code_that_loses_something_is_no_result() -> None:
    codes = make_codes()
    codes["copy"] = replace(codes["copy"], decode=lambda coded, target: target.cast("B").__setitem__(0, 1))
    with pytest.raises(RuntimeError, match="copy: a record did not come back as it was"):
        measure(RECORDS, codes, rounds=1)


def test_records_of_a_kind_are_spread_over_its_files(tmp_path: Path) -> None:
    listing = {}
    for number, name in enumerate(KINDS["text_bf16"]):
        (tmp_path / f"{name}.bin").write_bytes(bytes([number]) * 4000)
        listing[name] = {"file": f"{name}.bin", "records": 4, "record_bytes": 1000}
    (tmp_path / "records.json").write_text(json.dumps(listing))
    everything = read_records(tmp_path, "text_bf16")
    assert [bytes(one) for one in everything] == [bytes([at // 4]) * 1000 for at in range(24)]
    assert read_records(tmp_path, "text_bf16", sample_bytes=8000) == everything[::3]


def test_folders_that_are_missing_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["codec", "work"])
    with pytest.raises(SystemExit):
        parse_folders("Codes.", "folder")
    assert "the following arguments are required: records" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["codec", "work", "records", "model"])
    given = parse_folders("Codes.", "folder")
    assert (given.folder, given.records, given.model) == (Path("work"), Path("records"), Path("model"))
