"""The shape of the code: rooms that import one way, and a README that lists them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bitfit"
# A room imports only the rooms named here. The modules of the package root are the room "core".
ROOMS = {
    "core": (),
    "terminal": ("core",),
    "data": ("core",),
    "model": ("core", "data"),
    "delta": ("core", "data", "model"),
    "bank": ("core", "data", "model", "delta"),
    "tasks": ("core", "terminal", "data", "model", "delta", "bank"),
    "training": ("core", "terminal", "data", "model", "delta", "bank", "tasks"),
    "prediction": ("core", "terminal", "data", "model", "delta", "bank", "tasks"),
    "sklearn": ("core", "terminal", "data", "model", "delta", "bank", "tasks", "training", "prediction"),
    "study": ("core", "terminal", "data", "model", "delta", "bank", "tasks", "training", "prediction"),
    "report": ("core", "terminal", "data", "model", "delta", "bank", "tasks", "training", "prediction", "study"),
    "serve": ("core", "terminal", "data", "model", "delta", "bank", "tasks", "prediction"),
}
ROOMS["cli"] = tuple(ROOMS)
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in SOURCE.rglob("*.py")
}


def room(module: str) -> str:
    """The room a module lies in."""
    first = module.partition(".")[0]
    return first if first in ROOMS else "core"


def imports(module: str) -> set[str]:
    """Our modules that a module imports, at the top or inside functions."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if not node.level and not f"{node.module}.".startswith("bitfit."):
            continue
        parents = package[: len(package) - node.level + 1] if node.level else []
        name = (node.module or "").removeprefix("bitfit").lstrip(".")
        source = ".".join([*parents, *filter(None, [name])]).strip(".")
        for alias in node.names:
            member = f"{source}.{alias.name}".strip(".")
            imported.add(member if member in MODULES else source)
    return imported - {""}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"", "__main__"}))
def test_a_module_imports_only_rooms_below_its_own(module):
    allowed = {room(module), *ROOMS[room(module)]}
    above = {name for name in imports(module) if room(name) not in allowed}
    assert not above


def test_no_imports_run_in_a_circle():
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in finished:
            for name in imports(module):
                visit(name, (*path, module))
            finished.add(module)

    for module in MODULES:
        visit(module, ())


def test_the_package_root_has_at_most_seven_modules():
    assert len(list(SOURCE.glob("*.py"))) <= 7


def test_every_folder_with_code_is_a_room():
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROOMS) - {
        "core"
    }


def test_no_module_hides_a_public_name():
    import bitfit

    assert not set(bitfit.__all__) & {module.partition(".")[0] for module in MODULES}


def test_the_readme_lists_every_room():
    readme = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^  ([a-z]+)/ ", readme, re.M))
    assert listed == set(ROOMS) - {"core"}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_the_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert not [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()]


def test_test_modules_import_no_other_test_module():
    for path in (ROOT / "tests").glob("*.py"):
        assert not re.search(r"^\s*(from|import) (test_|conftest)", path.read_text(), re.M), path.name


def test_the_readmes_python_example_runs(base, csv_file, monkeypatch, tmp_path):
    import bitfit

    readme = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, re.S).group(1)
    monkeypatch.chdir(tmp_path)
    csv_file.rename(tmp_path / "reviews.csv") if csv_file.parent != tmp_path else None
    monkeypatch.setattr(bitfit, "load_base", lambda *_: base)
    scope: dict = {}
    exec(example, scope)
    assert (tmp_path / "reviews.safetensors").is_file()
