from __future__ import annotations

import sys

from inferd.engine.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
