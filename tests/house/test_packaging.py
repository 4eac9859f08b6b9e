"""What an installed pd-grpc holds: typed, with the servers inside it, and light for a client."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(*arguments: str, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for folder in ("pd_grpc", "servers"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    python("-c", build, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(built).namelist()


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "pd_grpc").rglob("*.py")} | {ROOT / "servers"}
    missing = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, f"without __init__.py, so not in the wheel: {missing}"


def test_the_wheel_holds_every_module_and_its_types(wheel: list[str]) -> None:
    code = [*(ROOT / "pd_grpc").rglob("*.py"), *(ROOT / "pd_grpc").rglob("*.pyi")]
    expected = {str(path.relative_to(ROOT)) for path in code} | {"pd_grpc/py.typed"}
    expected |= {f"pd_grpc/servers/{path.name}" for path in (ROOT / "servers").glob("*.py")}
    assert expected <= set(wheel), f"missing: {sorted(expected - set(wheel))}"


def test_the_wheel_installs_one_top_level_package(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert tops == {"pd_grpc"}


@pytest.mark.parametrize("where", ["elsewhere", "the repository's root"])
def test_the_servers_are_imported_as_part_of_the_package(where: str, tmp_path: Path) -> None:
    cwd = tmp_path if where == "elsewhere" else ROOT
    found = python("-c", "import pd_grpc.servers; print(pd_grpc.servers.__name__)", cwd=cwd)
    assert found.strip() == "pd_grpc.servers"


def test_no_package_of_the_name_servers_is_installed(tmp_path: Path) -> None:
    probe = "import importlib.util; print(importlib.util.find_spec('servers'))"
    assert python("-c", probe, cwd=tmp_path).strip() == "None"


def test_a_client_asks_for_neither_torch_nor_transformers() -> None:
    asked = [line for line in metadata.requires("pd-grpc") or [] if "extra ==" not in line]
    assert asked
    assert not [line for line in asked if line.startswith(("torch", "transformers"))]


def test_no_extra_brings_in_the_package_that_breaks_the_otlp_exporter() -> None:
    asked = " ".join(metadata.requires("pd-grpc") or [])
    for breaker in ("xds-protos", "grpcio-csds", "grpcio-admin"):
        assert breaker not in asked
