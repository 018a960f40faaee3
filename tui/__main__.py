"""`python -m inferd.tui`: the same as `inferd top`, for those who have an address and a key at hand."""

from __future__ import annotations

import os
import sys

from inferd.appliance.admin_client import AdminClient
from inferd.tui.app import Top

if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:4633"
    Top(AdminClient(address, key=os.environ.get("INFERD_API_KEY"))).run()
