"""Let the tests import the benchmarks as Python does for a script: from its own folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
