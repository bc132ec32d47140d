"""Which libcrypto seals: the package's where it can be trusted, and else the machine's."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from kvoffload.peers.seal_library import (
    FAST,
    PACKAGE,
    UntrustedFileError,
    find_packaged,
    find_seal_library,
    time_seal_rate,
)

NAME = "libcrypto-0123abcd.so.3"


def install(site: Path, *, names: tuple[str, ...] = (NAME,), digest: str = "sha256") -> Path:
    """Lays a package as pip does, and returns its library, which is none."""
    content = b"no library"
    listed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    folder, facts = site / "psycopg_binary.libs", site / "psycopg_binary-3.3.9.dist-info"
    for made in (folder, facts):
        made.mkdir(parents=True)
    for made in (folder, facts, site, site.parent):
        if not made.stat().st_mode & stat.S_ISVTX:
            made.chmod(0o755)
    rows = [f"psycopg_binary.libs/libssl-0123abcd.so.3,{digest}={listed},10"]
    for name in names:
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o644)
        rows.append(f"psycopg_binary.libs/{name},{digest}={listed},10" if digest else f"psycopg_binary.libs/{name},,")
    (facts / "RECORD").write_text("\n".join(rows))
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 3.3.9\n")
    return folder / NAME


def test_a_packages_library_is_found_where_it_was_installed(tmp_path: Path) -> None:
    file = install(tmp_path / "site")
    assert find_packaged([str(tmp_path / "other"), str(tmp_path / "site")]) == file.resolve()


def test_without_the_package_there_is_none(tmp_path: Path) -> None:
    assert find_packaged([str(tmp_path)]) is None


def test_a_relative_folder_is_never_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find_packaged(["", "."]) is None


def test_what_python_imports_from_is_not_where_packages_are_installed(tmp_path: Path) -> None:
    """In a process of its own: in this one another may be in use."""
    file = install(tmp_path)
    code = "from kvoffload.peers.seal_library import find_seal_library as find; print(find().file, find().refusal)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert str(file) not in done.stdout


def test_in_a_folder_where_nobody_can_replace_it_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    file = install(tmp_path / "shared/site")
    assert find_packaged([str(tmp_path / "shared/site")]) == file.resolve()


def give_to_group(file: Path) -> None:
    file.chmod(0o664)


def open_folder(file: Path) -> None:
    file.parents[2].chmod(0o777)


def change(file: Path) -> None:
    file.write_bytes(b"another one")


def make_link(file: Path) -> None:
    other = file.with_name("elsewhere")
    file.rename(other)
    file.symlink_to(other)


def make_large(file: Path) -> None:
    os.truncate(file, 1 << 30)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (give_to_group, f"others may write .*{NAME}: chmod go-w"),
        (open_folder, "others may write .*: chmod go-w"),
        (change, "is not what was installed: pip install --force-reinstall psycopg-binary"),
        (make_link, "is a link"),
        (make_large, "is larger than 64 MiB"),
    ],
)
def test_what_others_could_have_written_is_refused(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(install(tmp_path / "a/site"))
    with pytest.raises(UntrustedFileError, match=said):
        find_packaged([str(tmp_path / "a/site")])


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = install(tmp_path)
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UntrustedFileError, match="belongs to user"):
        find_packaged([str(tmp_path)])


@pytest.mark.parametrize("names", [(), (NAME, "libcrypto-ffff.so.3")])
def test_a_package_that_has_none_or_two_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    install(tmp_path, names=names)
    with pytest.raises(UntrustedFileError, match=f"lists {len(names)} of them"):
        find_packaged([str(tmp_path)])


@pytest.mark.parametrize("digest", ["", "md5"])
def test_a_package_that_lists_no_sha256_is_refused(tmp_path: Path, digest: str) -> None:
    install(tmp_path, digest=digest)
    with pytest.raises(UntrustedFileError, match="lists no SHA-256"):
        find_packaged([str(tmp_path)])


def test_with_a_file_that_is_no_library_the_machines_seals(tmp_path: Path) -> None:
    """In a process of its own: in this one another may be in use."""
    file = install(tmp_path)
    code = "import sys; from kvoffload.peers.seal_library import choose_library; print(choose_library(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert str(file) in done.stdout.partition("refusal=")[2]
    assert "psycopg_binary.libs" not in done.stdout.partition("refusal=")[0]


def test_a_list_of_files_that_is_none_is_a_refusal(tmp_path: Path) -> None:
    """In a process of its own: in this one another may be in use."""
    file = install(tmp_path)
    record = file.parents[1] / "psycopg_binary-3.3.9.dist-info/RECORD"
    record.write_text("a,b,c,d,e\n\n" + record.read_text())
    code = "import sys; from kvoffload.peers.seal_library import choose_library; print(choose_library(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "refusal=''" not in done.stdout


def test_what_is_loaded_is_what_was_looked_at(tmp_path: Path) -> None:
    """A link above it might lead elsewhere a moment later."""
    file = install(tmp_path / "site")
    (tmp_path / "link").symlink_to(tmp_path / "site")
    assert find_packaged([str(tmp_path / "link")]) == file.resolve()


def test_the_package_that_the_extra_installs_seals_here() -> None:
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed")
    found = find_seal_library()
    if "others may write" in found.refusal or "belongs to user" in found.refusal:
        pytest.skip(f"{PACKAGE} is not this user's alone here: {found.refusal}")
    assert found.refusal == ""
    assert found.is_fast
    assert found.version >= FAST


def test_it_tells_what_seals_and_how_fast() -> None:
    found = find_seal_library()
    assert found.describe() == f"{found.name} ({found.file})"
    assert time_seal_rate() > 0
