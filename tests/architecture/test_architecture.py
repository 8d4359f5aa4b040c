"""The rules of the house: floors, who may import what, sizes of files and functions, words, the environment."""

import ast
import re
import sys

import pytest
from sources import LIBRARY, ROOT, Source, everything, library

FLOORS = {
    "core": 0,
    "comm": 1,
    "memory": 2,
    "parallel": 3,
    "optim": 4,
    "checkpoint": 4,
    "hf": 5,
    "booster": 6,
    "proof": 7,
    "corpus": 7,
    "inference": 7,
    "planner": 8,
    "train": 8,
    "fleet": 8,
    "cli": 9,
    "testing": 9,
}
PUBLIC_INDEX = 7.5  # lindos/__init__.py itself: above what it gathers, below train and the command line
COMMAND = 9.5  # python -m lindos
LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 7
WORDS = ("manager", "handler", "helper", "utils", "engine", "context", "wrapper")
STANDARD = {"contextmanager", "asynccontextmanager", "contextlib", "contextvars"}


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (LIBRARY / parts[1]).is_dir() else ""


def floor_of(module: str) -> float:
    package = package_of(module)
    if not package:
        return COMMAND if module == "lindos.__main__" else PUBLIC_INDEX
    return FLOORS[package]


def inner_imports(source: Source) -> list[tuple[int, str]]:
    return [(line, name) for line, name in source.imports if name.split(".")[0] == "lindos"]


def test_every_package_has_a_floor():
    packages = {path.name for path in LIBRARY.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= set(FLOORS), "give the new package a floor here and in pyproject.toml"
    assert {package_of(source.module) for source in library()} >= {"core", "comm", "memory"}


def test_a_file_imports_only_from_floors_below():
    wrong = []
    for source in library():
        for line, name in inner_imports(source):
            here, there = floor_of(source.module), floor_of(name)
            if package_of(name) != package_of(source.module) and there >= here:
                wrong.append(source.at(line, f"floor {here} imports {name} of floor {there}"))
    assert not wrong, "\n".join(wrong)


def test_axes_never_import_each_other():
    """Packages in lindos/parallel meet in the ledger; parallel/axis.py is what they share."""
    wrong = []
    axes = {path.name for path in (LIBRARY / "parallel").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {"tensor", "data"} <= axes
    for source in library():
        parts = source.module.split(".")
        if parts[1:2] != ["parallel"]:
            continue
        own = parts[2] if len(parts) > 2 and parts[2] in axes else None
        for line, name in inner_imports(source):
            there = name.split(".")[2] if name.startswith("lindos.parallel.") else None
            if there in axes and there != own:
                wrong.append(source.at(line, f"imports {name}"))
    assert not wrong, "\n".join(wrong)


ONLY = {"transformers": ("hf",), "ray": ("fleet",), "tyro": ("train", "cli")}


@pytest.mark.parametrize("library_name", ONLY)
def test_only_one_package_imports(library_name):
    wrong = [
        source.at(line, f"imports {name}")
        for source in library()
        for line, name in source.imports
        if name.split(".")[0] == library_name and package_of(source.module) not in ONLY[library_name]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_reference_shares_nothing_with_what_it_checks():
    checked = {"parallel", "memory", "optim", "booster", "checkpoint"}
    modules = {source.module: source for source in library()}
    waiting, seen, wrong = ["lindos.proof.reference"], set(), []
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for line, name in inner_imports(modules[module]):
            if package_of(name) in checked:
                wrong.append(modules[module].at(line, f"imports {name}"))
            waiting += [part for part in (name, name.rpartition(".")[0]) if part in modules and part != "lindos"]
    assert len(seen) > 1
    assert not wrong, "\n".join(wrong)


def test_files_are_short():
    wrong = []
    for source in library():
        lines = source.text.count("\n")
        if lines > LINES:
            wrong.append(f"{source.name}: {lines} lines; at most {LINES}")
    assert not wrong, "\n".join(wrong)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [a.arg for a in (given.vararg, given.kwarg) if a is not None]
    return names[1:] if names[:1] in (["self"], ["cls"], ["ctx"]) else names


def test_functions_are_short_and_take_few_parameters():
    wrong = []
    for source in library():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                wrong.append(source.at(node.lineno, f"{node.name} has {lines} lines; at most {FUNCTION_LINES}"))
            count = len(parameters_of(node))
            if count > PARAMETERS:
                wrong.append(source.at(node.lineno, f"{node.name} has {count} parameters; at most {PARAMETERS}"))
    assert not wrong, "\n".join(wrong)


def names_made(source: Source) -> list[tuple[int, str]]:
    """Names that a file makes itself: of files, classes, functions, parameters, variables and attributes."""
    found: list[tuple[int, str]] = [(1, source.path.stem)]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            found.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.alias) and node.asname:
            found.append((1, node.asname))
    return found


def test_nouns_that_say_nothing_are_missing():
    wrong = []
    for source in everything():
        for line, name in names_made(source):
            if name not in STANDARD and any(word in name.lower() for word in WORDS):
                wrong.append(source.at(line, f"the name {name!r}"))
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_in_one_file():
    wrong = []
    for source in library():
        if source.module == "lindos.comm.launch" or package_of(source.module) == "cli":
            continue
        for node in ast.walk(source.tree):
            text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.ImportFrom) else ""
            if re.fullmatch(r"os\.(environb?|getenvb?|putenv|unsetenv)", text):
                wrong.append(source.at(node.lineno, text))  # pyright: ignore[reportAttributeAccessIssue]
            if re.fullmatch(r"from os import .*\b(environ|getenv).*", text):
                wrong.append(source.at(node.lineno, text))  # pyright: ignore[reportAttributeAccessIssue]
    assert not wrong, "\n".join(wrong)


def test_every_package_says_what_it_is():
    packages = [source for source in library() if source.path.name == "__init__.py"]
    bare = [source.name for source in packages if not ast.get_docstring(source.tree)]
    assert not bare, f"packages without a docstring: {bare}"
    folders = {path.parent for path in LIBRARY.rglob("*.py")}
    assert folders == {source.path.parent for source in packages}, "a folder without __init__.py"


def test_the_architecture_page_names_every_package():
    page = ROOT / "ARCHITECTURE.md"
    assert page.is_file(), "ARCHITECTURE.md is missing: it describes every package under lindos/"
    text = page.read_text("utf-8")
    packages = [s.path.parent.relative_to(LIBRARY) for s in library() if s.path.name == "__init__.py"]
    unnamed = [str(p) for p in packages if p.parts and not re.search(rf"\b{p.name}\b", text)]
    assert not unnamed, f"ARCHITECTURE.md does not name {unnamed}"


def test_files_of_tests_have_names_of_their_own():
    """Tests are no packages, so two files of one name would hide each other."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    names = [path.name for path in paths]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert "__init__.py" not in names
    known = {path.stem for path in paths}
    assert not known & set(sys.stdlib_module_names)
