"""The examples of README.md, of docs/ and of docstrings run."""

import doctest
import importlib
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

from tests.source_rules.rooms import ROOT, module_name, room_files

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
DOCTEST_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def python_of(page: str) -> str:
    """The python blocks of a page, each at its own line, so that a failure shows the page's line number."""
    code, end = "", 0
    for block in BLOCK.finditer(page):
        code += "\n" * page.count("\n", end, block.start("code")) + block["code"]
        end = block.end("code")
    return code


@pytest.mark.parametrize("page", PAGES)
def test_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / (Path(page).stem + "_page.py")
    file.write_text(python_of((ROOT / page).read_text()))
    monkeypatch.chdir(tmp_path)
    # A real file and a real module: what reads source (Dynamo, dataclasses) finds it.
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, file.stem, module)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_the_names_in_a_page_are_there(page: str) -> None:
    rooms = {"sf": "scoped_fn", "scoped_fn": "scoped_fn"}
    rooms |= {room: f"scoped_fn.{room}" for room in ("kernels", "stages", "interop")}
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(rf"`((?:{'|'.join(rooms)})(?:\.\w+)+)", text):
        first, rest = name.split(".", 1)
        pkgutil.resolve_name(f"{rooms[first]}.{rest}")  # raises what the name is not in


def test_a_page_keeps_its_line_numbers() -> None:
    page = "# Title\n\n```python\na = 1\n```\ntext\n```console\n$ a\n```\n\n```python\nb = a\n```\n"
    code = python_of(page).splitlines()
    assert {number: line for number, line in enumerate(code, 1) if line} == {4: "a = 1", 12: "b = a"}


@pytest.mark.parametrize("name", [module_name(path) for path in room_files() if not path.endswith("__main__.py")])
def test_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=DOCTEST_OPTIONS)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)
