"""`python -m tests.hostile --seed 7 --round 12` runs one round of a campaign again; without --round, the campaign."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tests.hostile.report import run_and_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description="Hostile users against a real server.")
    parser.add_argument("--seconds", type=float, default=1800.0, help="the last round begins before they are over")
    parser.add_argument("--seed", type=int, required=True, help="decides all rounds")
    parser.add_argument(
        "--round", type=int, action="append", default=[], help="only this one, after the two without attack"
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("only root can start processes of other users", file=sys.stderr)
        return 2
    # So that processes end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    return 1 if run_and_report(options.seed, options.seconds, options.round)["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
