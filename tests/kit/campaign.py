"""Whether this is the long run: `make campaign` loads the profile of Hypothesis that has its name."""

from __future__ import annotations

from hypothesis import settings


def is_campaign() -> bool:
    """For tests that repeat something which is not Hypothesis's."""
    return settings().max_examples >= settings.get_profile("campaign").max_examples
