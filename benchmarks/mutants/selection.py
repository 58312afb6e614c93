"""Which tests concern a module: those that import its room, by themselves, through helpers or by a public name."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = "equipoise"


def module_name(root: Path, path: Path) -> str:
    """Dotted name that a file of the tree is imported by."""
    relative = path.relative_to(root)
    inside = relative.relative_to("plugin") if relative.parts[0] == "plugin" else Path(PACKAGE) / relative
    return ".".join(inside.with_suffix("").parts).removesuffix(".__init__")


def files_concerning(root: Path, path: Path) -> list[Path]:
    """Test files that use the room of a module."""
    room = module_name(root, path).rpartition(".")[0]
    return [
        file
        for file in sorted((root / "tests").rglob("test_*.py"))
        if any(_within(used, room) or (used.count(".") > 1 and _within(room, used)) for used in uses(root, file))
    ]


def _within(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + ".")


@cache
def uses(root: Path, path: Path) -> frozenset[str]:
    """Modules of the package that a test file uses, also through helpers in ``tests``."""
    public, found, helpers = _public_names(root), set[str](), set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "eq":
            names = [f"{PACKAGE}.{node.attr}"]
        for name in names:
            if name.startswith("tests."):
                helpers.add(name)
            elif name.startswith(PACKAGE + "."):
                found.add(public.get(name.removeprefix(PACKAGE + "."), name))
    for helper in helpers:
        for name in (helper, helper.rpartition(".")[0]):
            file = root.joinpath(*name.split(".")).with_suffix(".py")
            if file.exists() and file != path:
                found |= uses(root, file)
    return frozenset(found)


@cache
def _public_names(root: Path) -> dict[str, str]:
    """Public names and the modules that they come from, as the stub tells."""
    stub = ast.parse((root / "plugin" / PACKAGE / "__init__.pyi").read_text())
    return {
        alias.name: f"{PACKAGE}.{node.module}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
