"""Adapters of one name and path are told apart by what lies there, and never at the cost of the engine's time."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.lora.request import LoRARequest

from kvoffload.connector.identity import adapters as adapter_content
from kvoffload.connector.identity.adapters import AdapterContents, mask_of
from kvoffload.keys.model_files import identify_adapter


def write_adapter(folder: Path, weights: bytes = b"weights", *, file: str = "adapter_model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / file).write_bytes(weights)
    return folder


def lora(folder: Path | str, number: int = 1, *, name: str = "helper", **more: Any) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(folder), **more)


@pytest.fixture
def contents() -> Iterator[AdapterContents]:
    contents = AdapterContents()
    contents.start()
    yield contents
    contents.close()


def settle(contents: AdapterContents) -> None:
    """Waits until the reader has done all that it was asked for."""
    contents.close()
    contents.start()


def find(contents: AdapterContents, request: LoRARequest) -> bytes | None:
    """The answer when everything is known that will be."""
    contents.find(request)
    settle(contents)
    return contents.find(request)


def test_a_request_without_an_adapter_has_an_empty_content(contents: AdapterContents) -> None:
    assert contents.find(None) == b""


def test_an_adapter_is_known_after_it_was_read(contents: AdapterContents, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    assert contents.find(lora(folder)) is None
    settle(contents)
    assert contents.find(lora(folder)) == identify_adapter(folder)


def find_anew(request: LoRARequest) -> bytes | None:
    """Returns what another engine finds."""
    contents = AdapterContents()
    contents.start()
    answer = find(contents, request)
    contents.close()
    return answer


def test_changed_weights_under_the_same_name_and_path_are_another_content(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    one, two, again = (find_anew(lora(write_adapter(folder, weights))) for weights in (b"one", b"two", b"one"))
    assert None not in (one, two)
    assert one == again != two


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.bin", "adapter_model.pt"])
def test_every_file_that_the_engine_reads_counts(contents: AdapterContents, tmp_path: Path, file: str) -> None:
    one, two = (write_adapter(tmp_path / name) for name in ("one", "two"))
    (two / file).write_bytes(b'{"r": 16}')
    (two / "optimizer.pt").write_bytes(b"of no interest")
    assert find(contents, lora(one, 1)) != find(contents, lora(two, 2))


def test_equal_adapters_have_one_content_wherever_they_lie(contents: AdapterContents, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one")
    shutil.copytree(one, tmp_path / "two")
    (tmp_path / "two" / "README.md").write_text("a copy")
    assert find(contents, lora(one, 1)) == find(contents, lora(tmp_path / "two", 2, name="other"))


def test_a_file_may_be_taken_in_two_ways(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    two_d, three_d = find_anew(lora(folder)), find_anew(lora(folder, is_3d_lora_weight=True))
    assert None not in (two_d, three_d)
    assert two_d != three_d


def test_an_adapter_is_read_once(contents: AdapterContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def counted(folder: Path, **more: Any) -> bytes:
        folders.append(folder)
        return identify_adapter(folder, **more)

    monkeypatch.setattr(adapter_content, "identify_adapter", counted)
    folder = write_adapter(tmp_path / "a")
    assert len({find(contents, lora(folder, number)) for number in (1, 2, 1, 2)}) == 1
    assert folders == [folder]


def test_nobody_waits_for_an_adapter_that_is_being_read(
    contents: AdapterContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(folder: Path, **more: Any) -> bytes:
        has_begun.set()
        assert may_end.wait(60)
        return identify_adapter(folder, **more)

    monkeypatch.setattr(adapter_content, "identify_adapter", slow)
    folder = write_adapter(tmp_path / "a")
    try:
        assert contents.find(lora(folder)) is None
        assert has_begun.wait(60)
        assert contents.find(lora(folder)) is None
        assert contents.find(None) == b""
    finally:
        may_end.set()
    settle(contents)
    assert contents.find(lora(folder)) == identify_adapter(folder)


# ---- what is not offloaded ----


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_name_whose_files_change_is_in_doubt_for_ever(
    contents: AdapterContents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine still holds what it loaded, or has dropped it and loads what lies there now.

    With a new id, as vLLM's server gives one after an unload, it does load; but its own prefix cache has blocks of both
    by then, and cannot tell which is whose.
    """
    folder = write_adapter(tmp_path / "a", b"one")
    before = find(contents, lora(folder))
    write_adapter(folder, b"two")
    assert [find(contents, lora(folder, number)) for number in (1, 2, 1)] == [None] * 3
    write_adapter(folder, b"one")
    assert find(contents, lora(folder, 3)) is None
    (line,) = refusals(caplog)
    assert line == f"requests with LoRA adapter helper ({folder}) are not offloaded: its files have changed"
    assert find(contents, lora(folder, 4, name="helper 2")) == before


def test_weights_that_are_replaced_by_others_of_the_same_size_and_time_are_seen(
    contents: AdapterContents, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", b"one")
    assert find(contents, lora(folder)) is not None
    other = write_adapter(tmp_path / "b", b"two") / "adapter_model.safetensors"
    shutil.copystat(folder / "adapter_model.safetensors", other)
    other.replace(folder / "adapter_model.safetensors")
    assert contents.find(lora(folder)) is None


@pytest.mark.parametrize(("passed_s", "waited_s"), [(0.0, 0.02), (0.005, 0.015), (0.5, 0.0), (-60.0, 0.02)])
def test_files_are_read_when_the_tick_of_their_last_change_is_over(
    contents: AdapterContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed_s: float, waited_s: float
) -> None:
    """A write in the same tick would not show. Another machine's clock may be ahead."""
    folder, waits = write_adapter(tmp_path / "a"), list[float]()
    changed_ns = max(file.stat().st_ctime_ns for file in folder.iterdir())
    clock = SimpleNamespace(time_ns=lambda: changed_ns + int(passed_s * 1e9), sleep=waits.append)
    monkeypatch.setattr(adapter_content, "time", clock)
    assert find(contents, lora(folder)) is not None
    assert waits == [pytest.approx(waited_s)]


def test_a_write_that_follows_at_once_is_seen(contents: AdapterContents, tmp_path: Path) -> None:
    """In place, of the same size, and as soon as the first content is known."""
    for number in range(5):
        folder = write_adapter(tmp_path / str(number), b"one")
        assert find(contents, lora(folder, number + 1)) is not None
        write_adapter(folder, b"two")
        assert contents.find(lora(folder, number + 1)) is None


def test_files_that_change_while_they_are_read_are_in_doubt(
    contents: AdapterContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def overtaken(folder: Path, **more: Any) -> bytes:
        digest = identify_adapter(folder, **more)
        write_adapter(folder, b"longer than before")
        return digest

    monkeypatch.setattr(adapter_content, "identify_adapter", overtaken)
    folder = write_adapter(tmp_path / "a")
    assert find(contents, lora(folder)) is None
    assert len(refusals(caplog)) == 1


def test_an_adapter_that_is_loaded_in_place_is_in_doubt(
    contents: AdapterContents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and when it was offloaded before: what the engine loads is what lies there at that moment."""
    one, two = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two")
    assert find(contents, lora(one, 1, load_inplace=True)) is None
    assert find(contents, lora(two, 2)) is not None
    assert find(contents, lora(two, 2, load_inplace=True)) is None
    assert [find(contents, lora(folder, number)) for number, folder in ((1, one), (2, two), (3, two))] == [None] * 3
    assert [line.rpartition(": ")[2] for line in refusals(caplog)] == ["it is loaded in place"] * 2


def test_an_adapter_that_is_taken_in_two_ways_is_in_doubt(contents: AdapterContents, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    assert find(contents, lora(folder, 1)) is not None
    assert find(contents, lora(folder, 2, is_3d_lora_weight=True)) is None
    assert find(contents, lora(folder, 1)) is None


def test_an_id_of_two_adapters_puts_both_in_doubt(
    contents: AdapterContents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine has loaded the first one, and takes it for the second."""
    one, two, three = (write_adapter(tmp_path / name) for name in ("one", "two", "three"))
    known = find(contents, lora(one, 1))
    assert known is not None
    assert find(contents, lora(three, 3)) == known
    assert find(contents, lora(two, 1)) is None
    assert [find(contents, lora(folder, number)) for number, folder in ((1, one), (2, one), (4, two))] == [None] * 3
    assert find(contents, lora(three, 3)) == known
    assert len(refusals(caplog)) == 2


def test_an_id_may_not_have_two_names_either(contents: AdapterContents, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    assert find(contents, lora(folder, 1)) is not None
    assert find(contents, lora(folder, 1, name="other")) is None


def test_a_name_that_is_no_folder_is_not_offloaded(
    contents: AdapterContents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hub's: the engine resolves it elsewhere, and a branch may be another commit tomorrow."""
    assert [find(contents, lora("acme/helper-lora")) for _ in range(3)] == [None] * 3
    (line,) = refusals(caplog)
    assert "acme/helper-lora is no folder with an adapter" in line
    assert find(contents, lora(tmp_path, 2)) is None


@pytest.mark.parametrize("field", ["lora_tensors", "tensorizer_config_dict"])
def test_weights_that_come_from_elsewhere_are_not_offloaded(
    contents: AdapterContents, tmp_path: Path, field: str
) -> None:
    folder = write_adapter(tmp_path / "a")
    request: Any = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(folder), **{field: {"q_proj": 1}})
    assert find(contents, request) is None


def test_a_folder_without_weights_is_not_offloaded(
    contents: AdapterContents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (write_adapter(tmp_path / "a") / "adapter_model.safetensors").unlink()
    for number in (1, 2, 1):
        assert find(contents, lora(tmp_path / "a", number)) is None
    assert ["no adapter weights" in line for line in refusals(caplog)] == [True]


@pytest.mark.parametrize("is_new_place", [True, False])
def test_with_one_adapter_too_many_none_is_offloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_new_place: bool
) -> None:
    """The adapter that is forgotten could be the one in doubt."""
    contents = AdapterContents(limit=2)
    contents.start()
    folder = write_adapter(tmp_path / "a")
    places = {1: "one", 2: "two"}
    answers = [find(contents, lora(folder, number, name=name)) for number, name in places.items()]
    assert None not in answers
    third = lora(folder, 1, name="three") if is_new_place else lora(folder, 3, name="one")
    assert find(contents, third) is None
    assert [find(contents, lora(folder, number, name=name)) for number, name in places.items()] == [None, None]
    assert refusals(caplog) == ["more than 2 LoRA adapters: none is offloaded any longer"]
    assert contents.find(None) == b""
    contents.close()


def test_a_path_may_be_given_from_home(
    contents: AdapterContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_adapter(tmp_path / "a")
    assert find(contents, lora("~/a")) is not None


def test_closing_twice_is_harmless() -> None:
    contents = AdapterContents()
    contents.close()
    contents.start()
    contents.close()
    contents.close()


# ---- masks ----


def test_no_adapter_leaves_hashes_as_they_are() -> None:
    assert mask_of(b"") == bytes(32)


def test_every_content_has_a_mask_of_its_own() -> None:
    masks = {mask_of(bytes([number]) * 32) for number in range(100)}
    assert len(masks) == 100
    assert {len(mask) for mask in masks} == {32}
    assert bytes(32) not in masks
