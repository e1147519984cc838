"""House rules that can be read off the source: who imports whom, sizes, documented fields."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "loco_compile": "loco_compile",
    "passes": "loco_compile.passes",
    "kernels": "loco_compile.kernels",
}

# What a package may import besides the standard library and itself. A name allows what is below it,
# but "loco_compile" allows all three packages.
MAY_IMPORT = {
    "kernels": ("torch", "triton", "numpy"),
    "passes": ("torch", "loco_compile.kernels", "loco_compile.config"),
    "loco_compile": ("torch", "triton", "numpy"),
}
BARE = ("kernels", "passes")

MAX_SOURCE_LINES = 400
MAX_TEST_LINES = 500
MAX_FUNCTION_LINES = 80


def _files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in found)


SOURCE_FILES = _files(*FOLDERS)
ALL_FILES = _files(*FOLDERS, "tests", "benchmarks", "docs")


def _parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def _module_name(path: Path) -> str:
    """Return the name under which a source file is imported once it is installed."""
    inside = path.relative_to(path.parts[0]).with_suffix("").parts
    return ".".join([FOLDERS[path.parts[0]], *inside])


def _imports(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute name of everything imported, in functions too.

    `from x import y` yields x.y, since y can be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parts, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _is_below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def _back_edges(tree: ast.Module, path: Path) -> list[str]:
    folder = path.parts[0]
    allowed = (*MAY_IMPORT[folder], FOLDERS[folder])
    return [
        f"{path}:{line}: {folder} must not import {name}"
        for line, name in _imports(tree, _module_name(path))
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(_is_below(name, parent) for parent in allowed)
    ]


def _bare_imports(tree: ast.Module, path: Path) -> list[str]:
    return [
        f"{path}:{line}: import loco_compile.{name}, not {name}"
        for line, name in _imports(tree, "loco_compile.module")
        if any(_is_below(name, bare) for bare in BARE)
    ]


def _undocumented_fields(tree: ast.Module, class_name: str) -> list[str]:
    """Return what is wrong with the fields of a config class: no default, or no docstring below."""
    [config] = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    wrong = []
    for field, below in zip(config.body, [*config.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if field.value is None:
            wrong.append(f"{class_name}.{field.target.id} has no default")
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if not is_text or not isinstance(below.value.value, str):
            wrong.append(f"{class_name}.{field.target.id} has no docstring below it")
    return wrong


def _long_functions(tree: ast.Module, path: Path) -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        # From the body on: a kernel's signature takes a line for each of its many arguments.
        and (lines := (node.end_lineno or 0) - node.body[0].lineno + 1) > MAX_FUNCTION_LINES
    ]


def _is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(text.startswith(("triton.jit", "triton.autotune")) for text in decorators)


def _unannotated(tree: ast.Module, path: Path) -> list[str]:
    """Return the functions that mypy's settings for kernels/ let through unchecked."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_triton_kernel(node):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        missing = [
            a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")
        ]
        if missing or node.returns is None:
            wrong.append(f"{path}:{node.lineno}: {node.name} needs annotations")
    return wrong


@pytest.mark.parametrize("path", SOURCE_FILES, ids=str)
def test_dependencies_point_one_way(path):
    assert _back_edges(_parse(path), path) == []


@pytest.mark.parametrize("path", ALL_FILES, ids=str)
def test_no_bare_import_of_passes_or_kernels(path):
    assert _bare_imports(_parse(path), path) == []


@pytest.mark.parametrize("path", ALL_FILES, ids=str)
def test_files_are_short(path):
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= (MAX_TEST_LINES if path.parts[0] == "tests" else MAX_SOURCE_LINES)


@pytest.mark.parametrize("path", SOURCE_FILES, ids=str)
def test_functions_are_short(path):
    assert _long_functions(_parse(path), path) == []


@pytest.mark.parametrize("path", _files("kernels"), ids=str)
def test_all_but_triton_kernels_is_annotated(path):
    assert _unannotated(_parse(path), path) == []


def test_config_fields_have_docstrings():
    assert _undocumented_fields(_parse(Path("loco_compile/config.py")), "LoCoConfig") == []


def test_all_three_packages_were_read():
    assert {path.parts[0] for path in SOURCE_FILES} == set(FOLDERS)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/a.py", "import loco_compile"),
        ("kernels/a.py", "from loco_compile.passes import find"),
        ("kernels/a.py", "from .. import config"),
        ("kernels/a.py", "from ..passes.find import find_sites"),
        ("kernels/a.py", "import rich"),
        ("passes/a.py", "import triton"),
        ("passes/a.py", "def f():\n    import triton.language as tl"),
        ("passes/a.py", "from ..state import error_state"),
        ("passes/a.py", "from .. import capture"),
        ("passes/a.py", "import loco_compile"),
        ("passes/a.py", "import torchao"),
        ("passes/a.py", "import kernels.layout"),
        ("loco_compile/a.py", "from passes import find"),
        ("loco_compile/a.py", "import tqdm"),
    ],
)
def test_a_back_edge_is_seen(file, line):
    assert len(_back_edges(ast.parse(line), Path(file))) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/a.py", "from .layout import Layout"),
        ("kernels/a.py", "import triton.language as tl"),
        ("kernels/a.py", "from . import layout"),
        ("passes/a.py", "from ..kernels import layout"),
        ("passes/a.py", "from ..config import LoCoConfig"),
        ("passes/a.py", "from loco_compile.config import LoCoConfig"),
        ("passes/a.py", "from .. import config"),
        ("passes/a.py", "import torch.fx, dataclasses"),
        ("loco_compile/a.py", "from .passes.find import find_sites"),
        ("loco_compile/a.py", "from . import capture"),
    ],
)
def test_a_forward_edge_is_allowed(file, line):
    assert _back_edges(ast.parse(line), Path(file)) == []


@pytest.mark.parametrize("line", ["import kernels", "from passes.find import find_sites"])
def test_a_bare_import_is_seen(line):
    assert len(_bare_imports(ast.parse(line), Path("tests/a.py"))) == 1


@pytest.mark.parametrize("line", ["from .passes import find", "from loco_compile import passes"])
def test_a_full_import_is_not_taken_for_a_bare_one(line):
    assert _bare_imports(ast.parse(line), Path("loco_compile/a.py")) == []


def test_an_undocumented_field_is_seen():
    source = "class C:\n    a: int = 1\n    'Good.'\n    b: int\n    'No default.'\n    c: int = 2"
    assert _undocumented_fields(ast.parse(source), "C") == [
        "C.b has no default",
        "C.c has no docstring below it",
    ]


def test_a_long_function_is_seen():
    body = "\n    pass" * (MAX_FUNCTION_LINES + 1)
    assert len(_long_functions(ast.parse(f"def f():{body}"), Path("passes/a.py"))) == 1


def test_a_missing_annotation_is_seen():
    source = "@triton.jit\ndef k(x): ...\ndef host(x) -> int: ...\ndef good(x: int) -> int: ..."
    assert len(_unannotated(ast.parse(source), Path("kernels/a.py"))) == 1
