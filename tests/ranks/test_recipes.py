"""The scripts of docs/recipes.md, as they stand there, on two real ranks.

EXPECTTEST_ACCEPT=1 pytest tests/ranks/test_recipes.py     writes what they print anew
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.torchrun import run_script

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.features]

PAGE = Path(__file__).parents[2] / "docs/recipes.md"
RECIPE = re.compile(
    r"^```py\n(?P<script>.*?)^```$.*?^<!-- output -->\n```text\n(?P<output>.*?)^```$", re.M | re.S
)

# Codes do not depend on what compiles the rest, and Inductor would take a minute for it.
WITHOUT_INDUCTOR = """\
import loco_compile.backend
loco_compile.backend._INNER["inductor"] = loco_compile.backend._INNER["aot_eager"]
"""

# accelerate takes its FSDP plugin for accelerators only; ACCELERATE_TORCH_DEVICE says which device
# this one is.
WITH_FSDP_ON_CPU = """\
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
"""


@pytest.mark.parametrize(("number", "library"), [(0, "accelerate"), (1, None)])
def test_recipe(number: int, library: str | None, tmp_path: Path) -> None:
    before = WITHOUT_INDUCTOR
    if library:
        pytest.importorskip("transformers")
        pytest.importorskip(library)
        before += WITH_FSDP_ON_CPU
    page = PAGE.read_text(encoding="utf-8")
    recipe = list(RECIPE.finditer(page))[number]
    script = tmp_path / "script.py"
    script.write_text(before + recipe["script"], encoding="utf-8")
    printed = run_script(script, ACCELERATE_TORCH_DEVICE="cpu")
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        start, end = recipe.span("output")
        PAGE.write_text(page[:start] + printed + page[end:], encoding="utf-8")
    else:
        assert printed == recipe["output"]
