"""The three packages nest when installed, as a wheel and as an editable install."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "loco_compile": ROOT / "loco_compile",
    "loco_compile.passes": ROOT / "passes",
    "loco_compile.kernels": ROOT / "kernels",
}

# Imports the packages and tells where they came from. The packages under test are put in front by
# addsitedir, which runs the hook of an editable install too; -S keeps the hook of the running
# environment's own install out, and the path given last brings torch.
PROBE = """
import importlib.util, json, site, sys
site.addsitedir(sys.argv[1])
# Before the environment's other packages are in reach: PyPI has one that is called `kernels`.
bare = [name for name in ("passes", "kernels") if importlib.util.find_spec(name)]
sys.path += sys.argv[3:]
found = {}
for name in json.loads(sys.argv[2]):
    __import__(name)
    found[name] = sys.modules[name].__file__
print(json.dumps({"found": found, "bare": bare}))
"""


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pip(*arguments: str | Path, cwd: Path) -> None:
    _run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


def _probe(site_folder: Path, cwd: Path) -> dict[str, Path]:
    """Import every package with `site_folder` as the only install of ours; return their files."""
    here = sysconfig.get_path("purelib")
    names = json.dumps([*PACKAGES, "loco_compile.kernels.layout", "loco_compile.passes.find"])
    out = _run(sys.executable, "-I", "-S", "-c", PROBE, site_folder, names, here, cwd=cwd)
    answer = json.loads(out.splitlines()[-1])
    assert answer["bare"] == []
    return {name: Path(file).resolve() for name, file in answer["found"].items()}


@pytest.fixture
def source(tmp_path):
    """Copy what an install reads, so that no build folder appears in, or leaks from, the clone."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in PACKAGES.values():
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, copy / folder.name, ignore=skip)
    return copy


@pytest.fixture
def elsewhere(tmp_path):
    """Return an empty folder, so that nothing is imported from where we stand."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_wheel_nests_passes_and_kernels(source, elsewhere, tmp_path):
    flags = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet")
    _pip("wheel", *flags, "--wheel-dir", tmp_path / "dist", source, cwd=elsewhere)
    [wheel] = (tmp_path / "dist").glob("loco_compile-*.whl")

    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"loco_compile"}
    for package, folder in PACKAGES.items():
        inside = package.replace(".", "/")
        shipped = {n for n in names if n.rpartition("/")[0] == inside and n.endswith(".py")}
        assert shipped == {f"{inside}/{file.name}" for file in folder.glob("*.py")}

    target = tmp_path / "target"
    _pip("install", "--no-deps", "--no-index", "--quiet", "--target", target, wheel, cwd=elsewhere)
    found = _probe(target, elsewhere)
    assert found["loco_compile.passes"] == target / "loco_compile" / "passes" / "__init__.py"
    assert found["loco_compile.kernels.layout"] == target / "loco_compile" / "kernels" / "layout.py"


@pytest.mark.slow
def test_editable_install_reads_the_clone(source, elsewhere, tmp_path):
    flags = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet")
    target = tmp_path / "target"
    _pip("install", *flags, "--target", target, "--editable", source, cwd=elsewhere)
    found = _probe(target, elsewhere)
    for package, folder in PACKAGES.items():
        assert found[package] == source / folder.name / "__init__.py"
    assert found["loco_compile.kernels.layout"] == source / "kernels" / "layout.py"

    # A module added after the install is found without a second one.
    (source / "passes" / "added_later.py").write_text("")
    names = json.dumps(["loco_compile.passes.added_later"])
    here = sysconfig.get_path("purelib")
    _run(sys.executable, "-I", "-S", "-c", PROBE, target, names, here, cwd=elsewhere)


@pytest.mark.slow
def test_running_install_is_this_clone(elsewhere):
    code = "import json, sys, loco_compile.passes, loco_compile.kernels\n"
    code += "print(json.dumps([sys.modules[name].__file__ for name in sys.argv[1:]]))"
    out = _run(sys.executable, "-c", code, *PACKAGES, cwd=elsewhere)
    files = [Path(file).resolve() for file in json.loads(out.splitlines()[-1])]
    assert files == [folder / "__init__.py" for folder in PACKAGES.values()]


def test_distribution_says_what_it_needs():
    needs = importlib.metadata.requires("loco-compile") or []
    required = [need for need in needs if "extra ==" not in need]
    assert sorted(required) == ["numpy", "torch>=2.11", 'triton>=3.6; platform_system == "Linux"']
    meta = importlib.metadata.metadata("loco-compile")
    assert meta["License-Expression"] == "BSD-3-Clause"
    assert set(meta.get_all("Provides-Extra")) == {"test", "bench", "docs"}


def test_backend_is_registered_by_name():
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends")
    [entry] = [e for e in entries if e.name == "loco"]
    assert entry.value == "loco_compile:loco_backend"
    assert callable(entry.load())


def test_dynamo_lists_the_backend():
    import torch

    assert "loco" in torch.compiler.list_backends()
