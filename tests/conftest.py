"""Where the tests' own modules are found: behind what is installed.

pytest puts the repository's root at the front of sys.path, and spawned ranks inherit the path. In
front, the folder kernels/ hides the package of that name on PyPI, which Transformers imports.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
sys.path[:] = [entry for entry in sys.path if entry not in ("", _ROOT)] + [_ROOT]
