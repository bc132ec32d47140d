"""`kvoffload replay`: tables, JSON lines, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvoffload import native
from kvoffload.cli.app import make_app
from kvoffload.errors import ConfigError

app = make_app()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.jsonl"
    prompts = [list(range(16)), list(range(16)), [*range(8), *range(100, 108)], list(range(9))]
    path.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}) + "\n"
            for at, ids in enumerate(prompts)
        )
    )
    return path


def test_json_lines(trace: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace), "--json", "--policy", "lru,arc", "--capacity", "50,100"])
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["capacity_percent"], line["policy"]) for line in lines] == [
        (percent, policy) for percent in (50, 100) for policy in ("lru", "arc", "optimum")
    ]
    # 16 and 8 and 9 blocks of 512 tokens, of 16 + 16 + 16 + 9; the later of them cost more.
    saved_s = (21.6 * 33 * 512 + 0.0009 * (256 + 64 + 81) * 512**2 / 2) / 1e6
    total_s = (21.6 * 57 * 512 + 0.0009 * (3 * 256 + 81) * 512**2 / 2) / 1e6
    assert lines[3] == {
        "model": "plain",
        "policy": "lru",
        "capacity_percent": 100.0,
        "capacity_units": 24,
        "hit_rate": round(33 / 57, 6),
        "hits": 33,
        "references": 57,
        "saved_s": round(saved_s, 3),
        "saved_share": round(saved_s / total_s, 6),
        "useless_share": None,
    }


def test_a_table_has_a_row_per_capacity_and_a_column_per_policy(trace: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace)])
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    for corner, table in ((["capacity"], lines[:6]), (["saved,", "s"], lines[6:])):
        header, *rows = table
        names = [*native.policy_names(), "optimum"]
        assert header == [*corner, *names]
        assert [row[0] for row in rows] == ["1%", "2%", "5%", "10%", "20%"]
        assert all(len(row) == len(names) + 1 for row in rows)


def test_what_hits_save_is_by_the_cost_that_is_given(trace: Path) -> None:
    """33 blocks of 512 tokens are hit in all; without growth each token costs the same."""
    flat = ["--prefill-cost", "1000", "--policy", "lru", "--capacity", "100"]
    done = CliRunner().invoke(app, ["replay", str(trace), *flat])
    assert [line.split() for line in done.stdout.splitlines()][-1] == ["100%", "16.9", "16.9"]
    done = CliRunner().invoke(app, ["replay", str(trace), *flat, "--json"])
    line = json.loads(done.stdout.splitlines()[0])
    assert (line["saved_s"], line["saved_share"]) == (16.896, line["hit_rate"])


def test_a_picture_has_a_line_per_policy(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "hits.svg"
    done = CliRunner().invoke(app, ["replay", str(trace), "--policy", "lru,arc", "--picture", str(file)])
    assert done.exit_code == 0
    text = file.read_text()
    assert text.count("<polyline") == 3
    assert text.count("stroke-dasharray") == 1, "the optimum is the limit"
    assert all(f">{name}</text>" in text for name in ("lru", "arc", "optimum"))
    done = CliRunner().invoke(app, ["replay", str(trace), "--json", "--picture", str(tmp_path / "no" / "folder")])
    assert done.stdout == "", "it is said before anything is replayed"
    assert isinstance(done.exception, ConfigError)


SPARED = ["--token-bytes", "1000", "--memory", "12288kB,1GB", "--prefill", "1000"]


def test_what_a_pool_spares_is_beside_what_it_hits(trace: Path, tmp_path: Path) -> None:
    """24 distinct blocks of 512,000 bytes, 57 asked for in 3 ms, all of them there the second time at 100%."""
    file = tmp_path / "spared.svg"
    money = ["--gpu-price", "2", "--picture", str(file)]
    done = CliRunner().invoke(app, ["replay", str(trace), "--policy", "lru", *SPARED, *money])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert [row[0] for row in lines[1:3]] == ["100%", "100%"]
    assert lines[6] == ["spared", "by", "policy", "lru"]
    assert lines[8] == ["11.7MiB", f"{33 * 512:,}", f"{33 / 57:.1%}", "17", "s", "5632.00", "11,264.00"]
    assert "GPUs&#x27; worth of prefill" in file.read_text()


def test_what_engines_have_themselves_is_no_benefit(trace: Path) -> None:
    own = ["--own", "1GB", "--json"]
    done = CliRunner().invoke(app, ["replay", str(trace), "--policy", "lru", *SPARED, *own])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["policy"], line["spared_tokens"]) for line in lines] == [("lru", 0), ("optimum", 0)] * 2
    assert lines[0]["hits"] == 33


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--memory", "1GB"], "bytes a token takes"),
        (["--prefill", "5"], "bytes a token takes"),
        (["--token-bytes", "9", "--own", "1GB"], "without --prefill"),
        (["--token-bytes", "9", "--prefill", "5", "--hybrid"], "hybrid"),
        (["--token-bytes", "9", "--memory", "much"], "--memory"),
        (["--token-bytes", "9999", "--memory", "1kB"], "hold no block"),
    ],
)
def test_what_cannot_be_reckoned_is_refused_in_one_line(trace: Path, given: list[str], line: str) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace), *given])
    assert isinstance(done.exception, ConfigError)
    assert line in str(done.exception)


def test_the_hybrid_table_has_no_optimum_and_says_what_is_of_no_use(trace: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace), "--hybrid", "--capacity", "100", "--policy", "slru"])
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[:2] == [["capacity", "slru"], ["100%", f"{(16 + 8 + 8) / 57:.1%}"]]
    assert lines[2][:2] == ["saved,", "s"]
    assert lines[4] == ["of", "no", "use", "slru"]


def test_blocks_of_another_size(trace: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace), "--block-tokens", "1024"])
    assert isinstance(done.exception, ConfigError)
    assert "blocks of 1024 tokens make 8" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "lur"], "did you mean 'lru'?"),
        (["--capacity", "many"], "allowed are numbers above 0"),
        (["--prefill-cost", "much"], "allowed are microseconds"),
    ],
)
def test_bad_options(trace: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace), *arguments])
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)
    assert done.stdout == ""


def test_a_bad_line_is_named(trace: Path) -> None:
    with trace.open("a") as file:
        file.write("nonsense\n")
    done = CliRunner().invoke(app, ["replay", str(trace), "--json"])
    assert isinstance(done.exception, ConfigError)
    assert f"{trace}, line 5: not JSON" in str(done.exception)
    assert done.stdout == ""


def test_help_says_what_is_allowed() -> None:
    done = CliRunner().invoke(app, ["replay", "--help"])
    assert done.exit_code == 0
    for option in ("--policy", "--capacity", "--hybrid", "--block-tokens", "--prefill-cost", "--json"):
        assert option in done.stdout
