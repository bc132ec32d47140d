"""A server's answers about prompts: why a block is missing, who may ask, and the changes that operators make."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.protocol import (
    Clear,
    ClearedBlocks,
    Done,
    Error,
    ErrorCode,
    Explanation,
    IdentityField,
    Insight,
    Inspect,
    Invalidate,
    Miss,
    Prefetch,
    ProtocolFault,
    SetQuota,
    Stats,
)
from kvoffload.server import DomainSettings
from kvoffload.server.operators import prompt_ledger
from kvoffload.server.sessions.domain import TenantSettings
from tests.kit.cache.cache_model import PLAIN, make_chain
from tests.kit.server.explained import explain, store
from tests.kit.server.harness import UID, Server, core_settings, numbers

BLOCK = 16
RECORD_BYTES = PLAIN.groups[0].record_bytes


def tags_of(chain: bytes) -> bytes:
    return b"".join(chain[at : at + 8] for at in range(0, len(chain), 32))


def test_a_block_that_nobody_stored_was_never_seen() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        assert explain(engine, make_chain(1, 1)) == Explanation(miss=Miss.NEVER_SEEN)


def test_an_evicted_block_says_what_would_have_kept_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_ledger, "STORED_SLACK_S", -1)
    with Server() as server:
        engine = server.process().join(PLAIN)
        store(engine, make_chain(1, 4))
        server.cache.core.evict(2 * RECORD_BYTES)
        left = [explain(engine, make_chain(1, 4)[at : at + 32]) for at in range(0, 128, 32)]
        evicted = [one for one in left if one.miss is Miss.EVICTED]
        assert [one.miss for one in left].count(Miss.INCOMPLETE) == 2
        assert sorted(one.missing_bytes for one in evicted) == [RECORD_BYTES, 2 * RECORD_BYTES]
        assert all(one.seconds_ago < 60 for one in evicted)


def test_a_block_that_the_prompt_itself_has_stored_since_was_not_there() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        store(engine, make_chain(1, 1))
        assert explain(engine, make_chain(1, 1), age_ms=200).miss is Miss.NEVER_SEEN


def test_an_untrusted_block_says_so_and_so_does_a_cleared_one() -> None:
    with Server() as server:
        engine = server.process(uid=0).join(PLAIN)
        chain = make_chain(1, 2)
        store(engine, chain)
        assert engine.tell(Invalidate(name_space=engine.name_space, group=0, hashes=chain[:32])) is None
        assert explain(engine, chain[:32]).miss is Miss.UNTRUSTED
        server.core.tell_cleared("main", {engine.name_space})
        server.cache.clear(engine.name_space)
        assert explain(engine, chain[32:]).miss is Miss.CLEARED


@pytest.mark.parametrize("field", ["layers", "parallel", "revision", "model_dtype"])
def test_a_block_of_an_engine_that_differs_says_in_what(field: str) -> None:
    def identity(value: str) -> tuple[IdentityField, ...]:
        return IdentityField(name="model", value="m"), IdentityField(name=field, value=value)

    with Server() as server:
        other = server.process("other").join(PLAIN, "other", identity=identity("one"))
        store(other, make_chain(1, 1))
        engine = server.process("engine").join(PLAIN, "engine", identity=identity("two"))
        assert explain(engine, make_chain(1, 1)) == Explanation(miss=Miss.OTHER_IDENTITY, differs=field)
        assert explain(engine, make_chain(2, 1)) == Explanation(miss=Miss.NEVER_SEEN)


@pytest.mark.parametrize("field", ["hash_seed", "salt"])
def test_an_engine_whose_names_differ_is_named_as_a_guess(field: str) -> None:
    """The same tokens have other names there, so the server cannot look them up."""
    with Server() as server:
        server.process("other").join(PLAIN, "other", identity=(IdentityField(name=field, value="one"),))
        engine = server.process("engine").join(PLAIN, "engine", identity=(IdentityField(name=field, value="two"),))
        found = explain(engine, make_chain(1, 1))
        assert found.miss is Miss.NEVER_SEEN
        assert found.differs.startswith(f"{field} (")


def test_what_the_engine_knows_itself_stays_its_word() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        store(engine, make_chain(1, 1))
        assert explain(engine, make_chain(1, 1), miss=Miss.TIER_TOO_SLOW).miss is Miss.TIER_TOO_SLOW
        assert explain(engine, make_chain(1, 1), group=7).miss is Miss.NEVER_SEEN
        assert explain(engine, b"").miss is Miss.NEVER_SEEN


def test_tokens_blocks_and_time_are_counted() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        chain = make_chain(1, 8)
        for _ in range(3):
            explain(
                engine, b"", asked=130, promised=100, lower=40, saved_us=7, miss=Miss.TOO_SHORT, tags=tags_of(chain)
            )
        insight = server.process("top").watch().ask(Inspect())
        assert isinstance(insight, Insight)
        assert {one.name: one.count for one in insight.outcomes} == {
            "hit_lower": 120,
            "hit_memory": 180,
            "too_short": 90,
        }
        assert (insight.asked_blocks, insight.distinct_blocks, insight.saved_us) == (24, 8, 21)


def test_an_engine_that_says_nonsense_is_counted_within_bounds() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        explain(engine, b"", asked=1, promised=5, lower=9)
        insight = engine.ask(Inspect())
        assert {one.name: one.count for one in insight.outcomes} == {"hit_lower": 5, "hit_memory": 0, "never_seen": 0}


def test_a_sum_that_an_engine_makes_too_large_can_still_be_told() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        for _ in range(3):
            explain(engine, b"", saved_us=2**64 - 1)
        assert engine.ask(Inspect()).saved_us == 2**64 - 1


class Express:
    """Times of the calls that native threads answered."""

    def call_times(self) -> dict[str, tuple[tuple[int, ...], int]]:
        return {"acquire": ((1, 2), 3)}

    def refusals(self, domain: str) -> dict[int, int]:
        return {ErrorCode.NOT_FOUND: 2, ErrorCode.DRAINING: 1} if domain == "main" else {}


def test_errors_are_counted_by_code_wherever_they_were_answered() -> None:
    with Server(express=Express()) as server:
        engine = server.process().join(PLAIN)
        for _ in range(3):
            assert isinstance(engine.tell(Prefetch(name_space=99, chain=b"")), Error)
        assert isinstance(server.process(domain="no such").greet(), Error)
        assert server.core.handle_fault(b"who", ProtocolFault(code=ErrorCode.MALFORMED, message="nothing of ours"))
        insight = engine.ask(Inspect())
        errors = {one.name: one.count for one in insight.errors}
        assert errors == {"not_found": 5, "draining": 1, "mismatch": 1, "malformed": 1}
        (times,) = [one for one in insight.timings if one.name == "call"]
        assert (times.label, numbers(times.counts).tolist(), times.sum_ns) == ("acquire", [1, 2], 3)


@pytest.mark.parametrize("uid", [UID, 77])
def test_only_operators_are_told_counts_of_all_domains(uid: int) -> None:
    domains = (DomainSettings(name="main"), DomainSettings(name="other"))
    with Server(settings=core_settings(operator_uids=frozenset({77})), domains=domains, express=Express()) as server:
        assert isinstance(server.process(domain="no such").greet(), Error)
        insight = server.process("top", uid=uid).watch().ask(Inspect())
        assert any(one.name == "mismatch" for one in insight.errors) is (uid == 77)
        assert any(one.name == "call" for one in insight.timings) is (uid == 77)
        assert any(one.name == "residence" for one in insight.timings)


def test_an_observer_is_told_the_errors_of_its_own_domain_only() -> None:
    domains = (DomainSettings(name="main"), DomainSettings(name="other"))
    with Server(settings=core_settings(operator_uids=frozenset({77})), domains=domains, express=Express()) as server:
        for domain, times in (("main", 1), ("other", 3)):
            engine = server.process(domain=domain).join(PLAIN)
            for _ in range(times):
                assert isinstance(engine.tell(Prefetch(name_space=99, chain=b"")), Error)

        def ask(domain: str, uid: int) -> dict[str, int]:
            observer = server.process("top", uid=uid, domain=domain).watch()
            return {one.name: one.count for one in observer.ask(Inspect()).errors}

        assert ask("main", UID) == {"not_found": 3, "draining": 1}
        assert ask("other", UID) == {"not_found": 3}
        assert ask("other", 77) == {"not_found": 6, "draining": 1}


@pytest.mark.parametrize("message", [Clear(), SetQuota(tenant="a", quota_bytes=1)], ids=["clear", "quota"])
def test_only_operators_change_anything(message: Any) -> None:
    with Server() as server:
        answer = server.process("top").watch().ask(message)
        assert (answer.code, answer.message.endswith(f"user {UID} is no operator here")) == (
            ErrorCode.NOT_ALLOWED,
            True,
        )


@pytest.mark.parametrize("how", ["uid", "token"])
def test_an_operator_clears_all_that_memory_has(how: str) -> None:
    settings = core_settings(operator_token="secret", operator_uids=frozenset({77}))
    with Server(settings=settings) as server:
        engine = server.process().join(PLAIN)
        store(engine, make_chain(1, 3))
        operator = server.process("top", uid=77 if how == "uid" else UID).watch()
        token = "" if how == "uid" else "secret"
        assert operator.ask(Clear(token=token)) == ClearedBlocks(blocks=3)
        assert operator.ask(Stats()).readable == 0
        assert operator.ask(Clear(token=token)) == ClearedBlocks(blocks=0)


def test_an_operator_changes_a_quota_and_gives_none_to_others() -> None:
    tenants = (TenantSettings(name="bounded", quota_bytes=1000), TenantSettings(name="free"))
    settings = core_settings(operator_uids=frozenset({UID}))
    with Server(settings=settings, domains=(DomainSettings(name="main", tenants=tenants),)) as server:
        operator = server.process("top").watch()
        assert operator.ask(SetQuota(tenant="bounded", quota_bytes=5000)) == Done()
        quotas = {one.name: one.quota_bytes for one in operator.ask(Stats()).tenants}
        assert quotas["bounded"] == 5000
        for refused in (("free", 1), ("nobody", 1), ("bounded", 0)):
            answer = operator.ask(SetQuota(tenant=refused[0], quota_bytes=refused[1]))
            assert answer.code is ErrorCode.NOT_FOUND


def test_without_memory_there_is_nothing_to_tell() -> None:
    with Server(memory=None) as server:
        assert server.process("top").watch().ask(Inspect()).code is ErrorCode.BUSY
