"""The documentation says what the code does: links, names, fields, errors and examples.

EXPECTTEST_ACCEPT=1 pytest tests/test_docs.py     writes the table of fields anew
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import loco_compile.backend as backend_module
from loco_compile.passes.plan import Decline
from tests.graphs import fake_group
from tests.torchrun import run_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
SOURCES = sorted(p for d in ("loco_compile", "passes", "kernels") for p in (ROOT / d).glob("*.py"))
FIELDS = ("<!-- fields -->\n", "<!-- end of fields -->\n")
FENCE = re.compile(
    r"^(?P<mark><!-- output -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
ANYTHING = "\0"  # what an f-string fills in

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", read(page))


def anchors(page: Path) -> set[str]:
    """The headings of a page as mkdocs and GitHub make links of them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        # Pages outside docs/ are not on the site that mkdocs builds.
        if ".." in path or not other.is_file() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    return broken


@by_page
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_from_outside_resolve(name: str) -> None:
    assert broken_links(ROOT / name) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n[a](#a) [b](#b) [c](none.md) [d](https://example.org/x)\n")
    assert broken_links(page) == ["#b", "none.md"]


def test_navigation_lists_every_page() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == [p.relative_to(DOCS).as_posix() for p in PAGES]


def defined_names(path: Path) -> set[str]:
    """Functions and classes of a file, methods also as Class.method."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def missing_code(text: str) -> list[str]:
    """Return the `path.py`, `path.py:name` and `path.py::test` in a text that do not exist."""
    missing = []
    for path, name in re.findall(r"`([\w./]+/[\w./]+\.py)(?::{1,2}([\w.]+))?`", text):
        file = ROOT / path
        if not file.is_file() or (name and name not in defined_names(file)):
            missing.append(f"{path}:{name}")
    return missing


@by_page
def test_named_code_exists(page: Path) -> None:
    assert missing_code(prose(page)) == []


def test_missing_code_is_seen() -> None:
    text = "`passes/find.py:find_sites` `passes/find.py:gone` `passes/gone.py` `tests/x.py::t`"
    assert missing_code(text) == ["passes/find.py:gone", "passes/gone.py:", "tests/x.py:t"]


def test_every_row_of_features_has_a_test() -> None:
    """A row names a test, or says that the feature is refused."""
    # Transformers' models have a table of another kind.
    tables = re.sub(r"## Transformers.*?(?=\n## )", "", read(DOCS / "fsdp2.md"), flags=re.S)
    rows = [r for r in tables.splitlines() if r.startswith("| ")]
    rows = [r for r in rows if not r.startswith("| feature |")]
    assert len(rows) > 30
    default = defined_names(ROOT / "tests/ranks/test_fsdp2.py")
    for row in rows:
        *_, status, tests, _ = (cell.strip() for cell in row.split("|"))
        names = re.findall(r"`(test_\w+)`", tests)
        assert set(names) <= default, row
        assert names or "tests/" in tests or tests == "every row" or "refused" in status, row


def test_every_equation_that_the_code_cites_is_stated() -> None:
    cited = {label for p in SOURCES for label in re.findall(r"\((E\d+b?)\)", read(p))}
    stated = set(re.findall(r"^### (E\d+b?):", read(DOCS / "equations.md"), re.M))
    assert cited and cited <= stated


def test_every_reason_is_explained() -> None:
    table = read(DOCS / "passes.md").partition("<!-- reasons -->")[2].partition("**Code.**")[0]
    assert re.findall(r"^\| `(.*?)` \|", table, re.M) == [d.value for d in Decline]


def test_every_invariant_is_listed() -> None:
    table = read(DOCS / "design.md").partition("<!-- invariants -->")[2]
    assert re.findall(r"^\| (I\d+) \|", table, re.M) == [f"I{i}" for i in range(1, 11)]


def table_of_fields() -> str:
    """Each field of LoCoConfig with its default and its docstring, as they stand in the source."""
    tree = ast.parse(read(ROOT / "loco_compile/config.py"))
    [config] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "LoCoConfig"]
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for field, below in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and field.value is not None:
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            meaning = " ".join(str(below.value.value).split())
            default = ast.unparse(field.value).replace("'", '"')
            rows.append(f"| `{ast.unparse(field.target)}` | `{default}` | {meaning} |")
    return "\n".join(rows) + "\n"


ACCEPTS = os.environ.get("EXPECTTEST_ACCEPT") == "1"
"""Whether the pages are to be rewritten with what the code gives, like inline snapshots."""


def test_table_of_fields() -> None:
    page = DOCS / "config.md"
    before, start, rest = read(page).partition(FIELDS[0])
    table, end, after = rest.partition(FIELDS[1])
    if ACCEPTS:
        page.write_text(f"{before}{start}\n{table_of_fields()}\n{end}{after}", encoding="utf-8")
    else:
        assert table.strip() == table_of_fields().strip()


def template(node: ast.expr) -> str | None:
    """The text of a string or an f-string in the source, ANYTHING where a value comes in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) or ANYTHING for value in node.values)
    return None


def messages() -> list[re.Pattern[str]]:
    """Patterns of all long strings in the source."""
    patterns = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(read(path))):
            text = template(node) if isinstance(node, ast.expr) else None
            if text is not None and len(text.replace(ANYTHING, "")) >= 20:
                literal = [re.escape(part) for part in text.split(ANYTHING)]
                patterns.append(re.compile(".+?".join(literal), re.S))
    return patterns


def quoted_errors() -> list[str]:
    fences = FENCE.finditer(read(DOCS / "troubleshooting.md"))
    return [f["text"].strip() for f in fences if f["language"] == "error"]


@pytest.mark.parametrize("error", quoted_errors())
def test_quoted_error_is_in_the_source(error: str) -> None:
    assert any(pattern.fullmatch(error) for pattern in messages())


def raised_messages() -> list[str]:
    """Where the source raises something that a user may meet, by file and line."""
    places = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = template(node.exc.args[0])
                if ast.unparse(node.exc.func) not in ("AssertionError", "AttributeError") and text:
                    literal = [re.escape(part) for part in text.split(ANYTHING)]
                    pattern = re.compile(".+?".join(literal), re.S)
                    if not any(pattern.fullmatch(error) for error in quoted_errors()):
                        places.append(f"{path.name}:{node.lineno}: {text}")
    return places


def test_every_error_is_explained() -> None:
    assert raised_messages() == []


@contextlib.contextmanager
def two_pretended_ranks() -> Iterator[None]:
    """The set-up that examples leave out: a fake process group, and no C++ compiler."""
    inner = backend_module._INNER
    with (
        fake_group(2),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.dict(inner, inductor=inner["aot_eager"]),
    ):
        yield


def run_examples(page: Path) -> int:
    """Run the python blocks of a page in order; compare what they print with the blocks below."""
    namespace: dict[str, object] = {"__name__": f"example_{page.stem}"}
    printed, num_run, text = "", 0, read(page)
    for fence in FENCE.finditer(text):
        if fence["language"] == "python":
            line = read(page)[: fence.start()].count("\n") + 1
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                # Lines are those of the page, so that a traceback points into it.
                exec(compile("\n" * line + fence["text"], str(page), "exec"), namespace)
            printed, num_run = out.getvalue(), num_run + 1
        elif fence["mark"]:
            lines = [x.rstrip() for x in printed.strip().splitlines()]
            if ACCEPTS:
                page.write_text(read(page).replace(fence["text"], "\n".join(lines) + "\n"))
            else:
                assert lines == fence["text"].strip().splitlines()
    return num_run


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```python" in read(p)], ids=lambda p: str(p.relative_to(DOCS))
)
def test_examples_run(page: Path) -> None:
    with two_pretended_ranks():
        assert run_examples(page) > 0


@pytest.mark.slow
@pytest.mark.ranks
def test_quickstart_on_two_real_ranks(tmp_path: Path) -> None:
    """The first script as the page says: torchrun, gloo, Inductor."""
    first, shown = list(FENCE.finditer(read(DOCS / "quickstart.md")))[1:3]
    script = tmp_path / "first.py"
    script.write_text(first["text"], encoding="utf-8")
    printed = run_script(script, TORCHINDUCTOR_COMPILE_THREADS="1")
    assert printed.splitlines() == shown["text"].splitlines()
