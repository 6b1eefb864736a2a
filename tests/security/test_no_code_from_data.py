"""Nothing in the library turns data into code or objects: no pickle, no eval, no loader that would do it for us."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = [
    path
    for folder in ("actors", "dlo", "hwr", "messages", "src/hostweights")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not (
        folder.startswith("src") and path.relative_to(ROOT / folder).parts[0] in {"actors", "dlo", "hwr", "messages"}
    )
]

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
"""Of the language."""
METHODS = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch.jit", "load"),
    ("torch.package", "PackageImporter"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("runpy", "run_path"),
}
OBJECTS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"}
"""Collectives that pickle."""

IMPORTS_BY_NAME = {
    "actors/__init__.py": "this package's own modules, and torch by a fixed name",
    "dlo/__init__.py": "this package's own modules",
    "hwr/directories.py": "diffusers or transformers, and a class of theirs that a directory names",
    "dlo/devices/cuda_runtime.py": "CuPy, by a fixed name",
    "dlo/packed/cuda.py": "CuPy, by a fixed name",
    "src/hostweights/__init__.py": "this package's own modules",
    "src/hostweights/commands/cluster.py": "Ray, by a fixed name",
    "src/hostweights/commands/named.py": "what the person at the command line names",
    "src/hostweights/diffusers.py": "diffusers, by a fixed name",
    "src/hostweights/vllm.py": "vLLM, by a fixed name",
}
"""Where a module is imported by a name at run time, and whose name that is."""


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
        return {node.module.partition(".")[0]}
    return set()


def called(node: ast.AST) -> tuple[str, str] | None:
    """The owner and the name of what a call calls."""
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Name):
        return "", function.id
    return (ast.unparse(function.value), function.attr) if isinstance(function, ast.Attribute) else None


def test_S_the_library_is_looked_at_whole() -> None:
    assert len(LIBRARY) > 150


def test_S_no_module_that_makes_objects_of_bytes_is_imported() -> None:
    found = [(path.name, name) for path in LIBRARY for node in nodes(path) for name in imported(node) & MODULES]

    assert found == []


def test_S_nothing_evaluates_text_or_loads_pickled_objects() -> None:
    found = []
    for path in LIBRARY:
        for node in nodes(path):
            call = called(node)
            if call is not None and (call in METHODS or (not call[0] and call[1] in CALLS) or call[1] in OBJECTS):
                found.append(f"{path.relative_to(ROOT)}:{ast.unparse(node)[:60]}")

    assert found == []


def test_S_no_code_of_a_checkpoint_and_no_shell_is_ever_allowed() -> None:
    found = []
    for path in LIBRARY:
        for node in nodes(path):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                wrong = {
                    "trust_remote_code": value is not False,
                    "allow_pickle": value is not False,
                    "shell": bool(value),
                }
                if wrong.get(keyword.arg or ""):
                    found.append(f"{path.relative_to(ROOT)}:{ast.unparse(node)[:60]}")

    assert found == []


def test_S_modules_are_imported_by_name_only_where_it_is_known_whose_name_it_is() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in LIBRARY
        for node in nodes(path)
        if (call := called(node)) is not None and call[1] == "import_module"
    }

    assert found == IMPORTS_BY_NAME.keys()
