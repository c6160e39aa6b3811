"""``python -m fxcapture.cli``: the command line."""

from __future__ import annotations

from fxcapture.cli import main

if __name__ == "__main__":
    main()
