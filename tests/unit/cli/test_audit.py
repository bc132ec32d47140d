"""`kvoffload audit`: its lines, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.audit.caching_engine import CachingEngine, caching_engine
from tests.kit.cli.commands import run
from tests.kit.free_ports import free_port

FEW = ("--prompts", "2", "--tokens", "33", "--seed", "7")


def test_answers_that_agree() -> None:
    with caching_engine(CachingEngine()) as played:
        done = run("audit", f"{played.address}/v1/", *FEW)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [
            "2 prompts, 2 restored: 2 agree (seed 7)",
            "the engine's own hits are equal; its own answers, the cold ones too, differ by 0.01",
            "restored answers differ from own hits by 0",
        ]
        assert {len(one["prompt"]) for one in played.asked} == {33}
        assert all(1000 <= token <= 30000 for one in played.asked for token in one["prompt"])
        # Prompts of other seeds are new to the engine.
        row = json.loads(run("audit", played.address, "--prompts", "1", "--json").stdout)
    assert (row["restored"], row["agreed"], row["disagreed"], row["fault"]) == (1, 1, 0, "")


def test_answers_that_do_not_agree() -> None:
    with caching_engine(CachingEngine(damage={2: "token", 4: "token"})) as played:
        done = run("audit", played.address, *FEW)
        assert done.returncode == 1
        assert done.stdout.splitlines()[0] == "2 prompts, 2 restored: 1 agree, 1 disagree (seed 7)"
        last = done.stdout.splitlines()[-1]
        assert last.startswith('prompt 2 (--seed 8 --prompts 1), token 4: own hit "token_id:')
        told = run("audit", played.address, "--prompts", "2", "--seed", "70", "--json")
    assert told.returncode == 1
    row = json.loads(told.stdout)
    assert (row["disagreed"], row["own_hits_equal"]) == (1, True)
    found = row["first_disagreement"]
    assert (found["prompt"], found["seed"], found["token"]) == (2, 71, 4)
    assert found["own_hit"] != found["restored"]


def test_what_cannot_be_audited_is_one_line_and_no_agreement() -> None:
    with caching_engine(CachingEngine(emptying="/none")) as played:
        done = run("audit", played.address, *FEW)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "VLLM_SERVER_DEV_MODE=1" in done.stderr
    with caching_engine(CachingEngine(lost={1, 2})) as played:
        done = run("audit", played.address, *FEW)
        assert (done.returncode, done.stderr) == (2, "")
        assert done.stdout.splitlines() == [
            "2 prompts, 0 restored: 0 agree (seed 7)",
            "2 not audited: not restored",
        ]
    gone = run("audit", f"http://127.0.0.1:{free_port()}", *FEW)
    assert (gone.returncode, gone.stdout, len(gone.stderr.splitlines())) == (2, "", 1)


def test_prompts_of_a_file_are_computed_cold_although_the_engine_knows_them(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("".join(json.dumps({"prompt": "a long text " * 9 + str(at)}) + "\n" for at in range(3)))
    with caching_engine(CachingEngine()) as played:
        for _ in range(2):
            done = run("audit", played.address, "--file", str(file), "--prompts", "2")
            assert (done.returncode, done.stdout.splitlines()[0].partition(" (")[0]) == (
                0,
                "2 prompts, 2 restored: 2 agree",
            )
        assert len({one["cache_salt"] for one in played.asked}) == 4


@pytest.mark.parametrize(
    ("arguments", "line", "said"),
    [
        (["--token-ids", "9"], "", "give two numbers"),
        (["--token-ids", "9-9"], "", "give two numbers"),
        (["--token-ids", "1-99999999"], "", "give two numbers"),
        (["--file", "none"], "", "none cannot be read"),
        (["--file", "FILE"], "", "has no prompts"),
        (["--file", "FILE"], "text", "line 1 is no JSON"),
        (["--file", "FILE"], '{"messages": []}', "line 1 has `messages`"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(arguments: list[str], line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text(line)
    given = [str(tmp_path / "FILE") if one == "FILE" else one for one in arguments]
    done = run("audit", "http://127.0.0.1:1", *given)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert said in done.stderr
