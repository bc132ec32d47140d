"""`python -m tests.simulation SEED`: the trace of one schedule. With FIRST END STEP: all of them, in one line."""

from __future__ import annotations

import sys

from tests.simulation.runner import make_world, run_all


def trace_one(seed: int) -> None:
    world = make_world(seed, traces=True)
    try:
        world.run()
    finally:
        sys.stdout.write("\n".join(world.timeline.trace or []) + "\n")
        world.close()
    sys.stdout.write(f"seed {seed}: {world.timeline.events} events, all is well\n")


def main() -> None:
    numbers = [int(text) for text in sys.argv[1:]]
    if len(numbers) == 1:
        trace_one(*numbers)
    else:
        sys.stdout.write(f"all is well; still held at the end: {dict(run_all(range(*numbers)))}\n")


if __name__ == "__main__":
    main()
