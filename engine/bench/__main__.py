from __future__ import annotations

import sys

from inferd.engine.threads import wait_briefly

if __name__ == "__main__":
    wait_briefly()
    from inferd.engine.bench.command import main

    sys.exit(main())
