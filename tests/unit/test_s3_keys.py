"""Files of keys: the usual form, and nothing of a secret in what is said of a wrong one."""

from __future__ import annotations

import pytest

from kvoffload.s3_keys import S3Keys, parse_s3_keys

GOOD = "aws_access_key_id = me\naws_secret_access_key = open%sesame\n"


@pytest.mark.parametrize(
    "text",
    [f"[default]\n{GOOD}", f"[cache]\n{GOOD}", f"[other]\naws_access_key_id = you\n[default]\n{GOOD}"],
)
def test_the_section_of_that_name_or_the_only_one(text: str) -> None:
    keys = parse_s3_keys(text)
    assert keys == S3Keys(key_id="me", secret="open%sesame")
    assert "sesame" not in repr(keys)


def test_keys_that_end_have_a_token() -> None:
    keys = parse_s3_keys(f"[default]\n{GOOD}aws_session_token = for-today\n")
    assert keys.session_token == "for-today"
    assert "today" not in repr(keys)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", r"no section \[default\]"),
        (GOOD, "no `name = value`"),
        (f"[a]\n{GOOD}[b]\n{GOOD}", r"no section \[default\]"),
        ("[default]\naws_secret_access_key = sesame\n", r"\[default\] has no aws_access_key_id"),
        ("[default]\naws_access_key_id = me\naws_secret_access_key =\n", "has no aws_secret_access_key"),
    ],
)
def test_what_is_missing_is_said(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as refused:
        parse_s3_keys(text)
    assert "sesame" not in str(refused.value)
