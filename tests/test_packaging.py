"""What is installed is what is in the tree, under the one name ``scoped_fn``."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.source_rules.rooms import ROOMS, ROOT, module_name, room_files

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_SHIPPED = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, built offline from a copy of the tree."""
    source, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, source, ignore=NOT_SHIPPED)
    build = f"from setuptools import build_meta as b; b.build_wheel({str(out)!r}); b.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    return out


def wheel_path(path: str) -> str:
    """Where a room's file lies in the wheel."""
    room, rest = path.split("/", 1)
    return f"{ROOMS[room].replace('.', '/')}/{rest}"


def shipped_files() -> list[str]:
    return room_files() + [f"{room}/py.typed" for room in ROOMS]


def test_every_package_of_the_tree_is_listed() -> None:
    packages = {module_name(path).rpartition(".")[0] for path in room_files() if not path.endswith("__init__.py")}
    packages |= {module_name(path) for path in room_files() if path.endswith("__init__.py")}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(packages)


def test_every_package_has_an_init_file() -> None:
    folders = {(ROOT / path).parent for path in room_files()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_rooms_are_mapped_to_their_folders() -> None:
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {name: room for room, name in ROOMS.items()}


def test_the_wheel_holds_every_file_under_one_name(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(wheel_path(path) for path in shipped_files()) == sorted(
        name for name in names if ".dist-info/" not in name
    )
    (metadata,) = {name.split("/")[0] for name in names} - {"scoped_fn"}
    assert "[console_scripts]\nscoped-fn = scoped_fn.cli:main" in read_from_wheel(wheel, f"{metadata}/entry_points.txt")
    assert read_from_wheel(wheel, f"{metadata}/top_level.txt").split() == ["scoped_fn"]
    assert f"{metadata}/licenses/LICENSE" in names


def read_from_wheel(wheel: Path, name: str) -> str:
    return zipfile.ZipFile(wheel).read(name).decode()


def test_the_sdist_holds_every_file_and_the_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    others = {"pyproject.toml", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md", "Makefile"}
    assert {*shipped_files(), *tests, *others} - names == set()


@pytest.mark.parametrize("room", [room for room, name in ROOMS.items() if room != name])
def test_a_room_under_its_bare_name_says_the_right_one(room: str) -> None:
    run = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert (
        f"ImportError: Expected to be imported as 'scoped_fn.{room}', got '{room}'. Write: import scoped_fn.{room}"
        in run.stderr
    )


def test_each_room_is_imported_from_anywhere(tmp_path: Path) -> None:
    names = list(ROOMS.values())
    script = f"import {', '.join(names)}, sys; print(*(sys.modules[name].__path__[0] for name in {names}), sep='\\n')"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [Path(line).resolve() for line in run.stdout.splitlines()] == [ROOT / room for room in ROOMS]


def test_the_links_for_type_checkers_lead_to_the_rooms() -> None:
    links = {path.name: path for path in (ROOT / ".typing" / "scoped_fn").iterdir()}
    rooms = {room for room, name in ROOMS.items() if room != name}
    assert set(links) == {"__init__.py", *rooms}
    assert all(link.is_symlink() for link in links.values())
    assert links["__init__.py"].resolve() == ROOT / "scoped_fn" / "__init__.py"
    assert all(links[room].resolve() == ROOT / room for room in rooms)


def test_types_of_every_room_are_checked() -> None:
    folders = [ROOT / folder for folder in PYPROJECT["tool"]["mypy"]["files"]]
    assert {folder.resolve() for folder in folders} == {ROOT / room for room in ROOMS}


def test_every_dependency_is_pinned() -> None:
    pins = {line.split("==")[0].lower().replace("_", "-") for line in constraints()}
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    wanted += project["optional-dependencies"]["lint"]
    names = {name.split(">=")[0].lower().replace("_", "-") for name in wanted}
    assert names - pins == set()


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]
