"""``python -m deerflow_runs.docs``."""

from __future__ import annotations

import sys

from deerflow_runs.docs import main

sys.exit(main(sys.argv[1:]))
