"""``python -m nitro_cli`` is ``nitro``."""

from __future__ import annotations

from nitro_cli.cli.main import main

if __name__ == "__main__":
    main()
