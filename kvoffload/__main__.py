"""`python -m kvoffload` is `kvoffload`."""

from __future__ import annotations

from kvoffload.cli.app import main

if __name__ == "__main__":
    main()
