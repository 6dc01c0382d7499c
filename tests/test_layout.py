"""The shape of the code: imports flow one way, and the README tells the truth about the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bitfit"
# From the bottom up: a module imports only what stands before it.
LAYERS = (
    *("errors", "anatomy", "selection", "tensorfile", "rows", "injection", "base", "delta", "sharing", "model"),
    *("folding", "dropout", "sparse", "layout", "layer", "packed", "bank"),
    *("examples", "formats", "columns", "sentences", "questions", "labelsets", "encode", "splits", "data"),
    *("named", "sources"),
    *("tasks.metrics", "tasks.sums", "tasks.task", "tasks.texts", "tasks.tagging", "tasks.answering", "tasks"),
    *("stop", "checkpoint", "plan", "loop", "training", "resident", "prediction", "glue", "exporting", "audit"),
    *("serve", "serve.settings", "serve.journal", "serve.client", "serve.load", "serve.wire", "serve.meters"),
    *("serve.folder", "serve.shelf", "serve.workers", "serve.batcher", "serve.service", "serve.gate"),
    *("serve.app", "serve.run"),
    *("study", "study.options", "study.spec", "study.grid", "study.store", "study.sources", "study.runner"),
    *("study.cluster", "doctor", "report", "report.changemap", "report.statistics", "report.page", "report.charts"),
    *("report.findings", "report.verdicts", "report.tables", "report.figures", "report.pages"),
    *("show", "study.terminal", "demo", "options", "cli", "__main__"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> set[str]:
    """Which of our modules a file imports, at the top or inside functions, types aside."""
    found = set()
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("bitfit")):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if package and node.level else []
            start = ".".join([*above, *([node.module.removeprefix("bitfit").lstrip(".")] if node.module else [])])
            for alias in node.names:
                whole = f"{start}.{alias.name}".strip(".")
                found.add(whole if whole in LAYERS else start)
    return found - {""}


def test_every_module_has_its_place():
    modules = {module_name(path) for path in SOURCE.rglob("*.py")} - {""}
    assert modules == set(LAYERS)


def test_no_module_hides_a_public_name():
    import bitfit

    assert not set(bitfit.__all__) & set(LAYERS)


def test_imports_flow_one_way():
    for path in SOURCE.rglob("*.py"):
        name = module_name(path)
        if name:
            below = set(LAYERS[: LAYERS.index(name)])
            assert imports(path) <= below, (name, imports(path) - below)


def test_the_readme_lists_every_file_with_its_role():
    readme = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^  *([a-z_]+(?:/[a-z_]+)?\.py)  ", readme, re.M))
    real = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name not in ("__main__.py",)}
    assert listed == real - {"__init__.py", "report/__init__.py", "serve/__init__.py", "study/__init__.py"}


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
