"""These tests need posing GPUs. `test_posing.py` runs them, in processes that have them."""

import os

collect_ignore_glob = [] if "ASTRAFLOW_POSING_LIBRARY" in os.environ else ["test_*.py"]
