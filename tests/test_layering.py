"""Which package and which room may import which, and private JAX and Orbax in one place each."""

import ast
import collections
import copy
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("scheduler", "mpmd", "reshard")
STDLIB = sys.stdlib_module_names | {"scheduler"}
# What the extra `search` may speed up, where it is installed; imported by the functions that use it.
SEARCH_EXTRA = {"numba", "numpy"}
# What is imported under another name than it is installed by.
DISTRIBUTIONS = {"jaxlib": "jax", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}
JAX_SHIM = "mpmd/_jax_compat"
# What JAX does not document, or says may change without notice.
PRIVATE_JAX = (
    "jax._src",
    "jaxlib",
    "jax.extend.core",
    "jax.interpreters",
    "jax.experimental.transfer",
)


ORBAX_SHIM = "reshard/_orbax_compat.py"
# A room is a folder of a package. It imports these rooms of its package, and modules below all rooms. The rooms stand
# in the order of the flow: none imports a room that comes after it.
ROOMS = {
    "mpmd/arrays": (),
    "mpmd/ops": ("arrays",),
    "mpmd/tracing": ("arrays", "ops"),
    "mpmd/graphs": ("ops", "tracing"),
    "mpmd/costs": ("arrays", "ops", "tracing", "graphs"),
    "mpmd/cutting": ("arrays", "ops", "tracing", "graphs", "costs"),
    "mpmd/partition": ("arrays", "ops", "tracing", "graphs"),
    "mpmd/compile": ("arrays", "tracing", "graphs", "partition"),
    "mpmd/observe": (),
    "mpmd/goodput": ("observe",),
    "mpmd/job": ("arrays", "observe"),
    "mpmd/resilience": ("arrays", "observe", "job"),
    "mpmd/run": ("arrays", "ops", "tracing", "graphs", "cutting", "compile", "observe", "job"),
    "mpmd/report": ("arrays", "graphs", "partition", "costs", "compile", "observe", "job"),
    "mpmd/planning": ("arrays", "graphs", "partition", "costs", "compile", "report"),
    "mpmd/tuning": ("arrays", "graphs", "partition", "costs", "compile", "report", "planning", "cutting"),
    "reshard/storage": (),
    "reshard/moving": (),
    "reshard/edits": ("storage",),
    "reshard/checkpoint": ("storage", "edits"),
    "reshard/conversion": ("storage", "edits"),
    "reshard/streams": ("storage", "edits"),
    "scheduler/base": (),
    "scheduler/timing": ("base",),
    "scheduler/schedules": ("base", "timing"),
    "scheduler/programs": ("base", "schedules"),
    "scheduler/optimize": ("base", "timing", "schedules"),
}
# Folders of names above the public ones: nothing of their package imports them.
ABOVE_ALL_ROOMS = ("mpmd/jaxpp",)
BELOW_ALL_ROOMS = {
    "mpmd": ("_jax_compat", "errors", "pytrees", "users_frame"),
    "reshard": ("_orbax_compat", "places", "sizes", "trees"),
    "scheduler": ("engine", "errors", "ordering", "task"),
}


def _sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def _tree(source: Path) -> ast.Module:
    """What the file says, parsed once for all tests."""
    return ast.parse(source.read_text(), str(source))


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
    return ""


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that a module imports, inside functions too: both `m` and `m.x` for `from m import x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@functools.cache
def _names(text: str, package: str) -> frozenset[str]:
    tree = ast.parse(text)
    return frozenset(_imported(tree, package)) | {_dotted(x) for x in ast.walk(tree) if isinstance(x, ast.Attribute)}


def _reached(text: str, package: str, forbidden: tuple[str, ...]) -> list[str]:
    """The forbidden names that a text imports, or reaches as attributes: `jax._src` needs just `import jax`."""
    return sorted(name for name in _names(text, package) if any(_within(name, prefix) for prefix in forbidden))


def _violations(source: Path, forbidden: tuple[str, ...]) -> list[str]:
    path = source.relative_to(ROOT)
    return [f"{path}: {name}" for name in _reached(source.read_text(), path.parts[0], forbidden)]


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("import jax.extend.core as jexc", ["jax.extend.core"]),
        ("def late():\n    from jax._src import core", ["jax._src", "jax._src.core"]),
        ("from jax.interpreters.mlir import lower_fun", ["jax.interpreters.mlir", "jax.interpreters.mlir.lower_fun"]),
        ("import jax\nunsafe = jax._src.core.Literal", ["jax._src", "jax._src.core", "jax._src.core.Literal"]),
        ("from jax.extend import core", ["jax.extend.core"]),
        ("from jax import lax\nimport jaxtyping", []),
    ],
)
def test_the_search_for_forbidden_names_finds_each_way_to_reach_one(text, reached):
    assert _reached(text, "mpmd", PRIVATE_JAX) == reached


def test_a_package_imports_only_the_packages_below_it():
    found = []
    for index, package in enumerate(PACKAGES):
        for source in _sources(package):
            found += _violations(source, PACKAGES[index + 1 :])
    assert found == []


def test_each_folder_is_a_room_of_the_table():
    folders = {f"{package}/{p.name}" for package in PACKAGES for p in (ROOT / package).iterdir() if any(p.glob("*.py"))}
    assert folders - {JAX_SHIM, *ABOVE_ALL_ROOMS} == set(ROOMS)


@pytest.mark.parametrize("folder", ABOVE_ALL_ROOMS)
def test_what_is_above_all_rooms_is_imported_by_no_other_file(folder):
    package, name = folder.split("/")
    others = [source for source in _sources(package) if not source.is_relative_to(ROOT / folder)]
    assert [fault for source in others for fault in _violations(source, (f"{package}.{name}",))] == []


def test_no_room_may_import_one_that_comes_later_in_the_flow():
    rooms = [tuple(room.split("/")) for room in ROOMS]
    imported = [(k, (package, m)) for k, (package, name) in enumerate(rooms) for m in ROOMS[f"{package}/{name}"]]
    assert [(rooms[k], other) for k, other in imported if other not in rooms[:k]] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_before_it(room):
    package, name = room.split("/")
    allowed = tuple(f"{package}.{m}" for m in (name, *ROOMS[room], *BELOW_ALL_ROOMS[package]))
    found = []
    for source in sorted((ROOT / room).glob("*.py")):
        for module in sorted(set(_modules(_tree(source)))):
            if _within(module, package) and not any(_within(module, prefix) for prefix in allowed):
                found.append(f"{source.relative_to(ROOT)}: {module}")
    assert found == []


def _modules(tree: ast.AST) -> Iterator[str]:
    """The modules that a module imports: of `from package import name` the dotted `package.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (alias.name for alias in node.names)
            yield from (f"{node.module}.{name}" for name in names) if node.module in PACKAGES else (node.module,)


def test_scheduler_imports_the_standard_library_alone():
    found = []
    for source in _sources("scheduler"):
        tree = _tree(source)
        at_import = set(_roots(_without_functions(tree)))
        later = set(_roots(tree)) - at_import
        found += [f"{source.name}: {root}" for root in sorted(at_import - STDLIB)]
        found += [f"{source.name}, in a function: {root}" for root in sorted(later - STDLIB - SEARCH_EXTRA)]
    assert found == []


def _declared() -> tuple[set[str], set[str]]:
    """The names that pyproject.toml declares: of what is always needed, and of all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements}

    extras = project["optional-dependencies"].values()
    return names(project["dependencies"]), set().union(*map(names, extras))


def _third_party(folder: str) -> set[str]:
    """The distributions that the modules of a folder import."""
    sources = _sources(folder)
    own = {*PACKAGES, *(name for source in sources for name in (source.stem, source.parent.name))}
    roots = set().union(*(set(_roots(_tree(source))) for source in sources))
    return {DISTRIBUTIONS.get(root, root) for root in roots - own - sys.stdlib_module_names}


def test_what_the_packages_import_is_what_is_declared():
    always, _ = _declared()
    assert set().union(*map(_third_party, PACKAGES)) - SEARCH_EXTRA == always - SEARCH_EXTRA


def test_what_the_examples_import_is_declared():
    assert _third_party("examples") <= set().union(*_declared())


def _roots(tree: ast.AST) -> Iterator[str]:
    return (name.partition(".")[0] for name in _imported(tree, "scheduler"))


def _without_functions(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported."""

    class Remover(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

    return Remover().visit(copy.deepcopy(tree))


def test_what_jax_does_not_document_is_touched_in_one_folder():
    found = []
    for package in PACKAGES:
        for source in _sources(package):
            if not source.is_relative_to(ROOT / JAX_SHIM):
                found += _violations(source, PRIVATE_JAX)
    assert found == []


# What `jax.extend` has is documented, and so is `jax.core`. Lower it when a name goes; a new one needs a good reason.
MOST_UNDOCUMENTED_NAMES = 79


def _undocumented_names() -> set[str]:
    """The names of JAX that the shim reaches, and of the modules that it hands on those that the packages reach."""
    undocumented = tuple(name for name in PRIVATE_JAX if name != "jax.extend.core")
    found: set[str] = set()
    for source in _sources(JAX_SHIM):
        tree, known = _tree(source), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        dotted = [_dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        attributes = {name for name in dotted if name.count(".") == 1}
        modules = {name.partition(".")[0] for name in attributes}
        reached = {f"{known[a]}.{b}" for a, _, b in (name.partition(".") for name in attributes) if a in known}
        reached |= {full for name, full in known.items() if name not in modules}
        found |= {name for name in reached if any(_within(name, prefix) for prefix in undocumented)}
    handed_on = {"ad", "batching", "mlir", "pe"}
    for source in (source for package in PACKAGES for source in _sources(package)):
        names = (_dotted(node) for node in ast.walk(_tree(source)) if isinstance(node, ast.Attribute))
        parts = [name.split(".") for name in names]
        found |= {
            f"jax.interpreters.{p[1]}.{p[2]}" for p in parts if p[0] == "compat" and len(p) == 3 and p[1] in handed_on
        }
    return found


def test_the_number_of_names_that_jax_does_not_document_does_not_grow():
    names = _undocumented_names()
    assert len(names) <= MOST_UNDOCUMENTED_NAMES, sorted(names)
    assert len(names) > MOST_UNDOCUMENTED_NAMES - 5, "lower the bound"


def test_what_orbax_does_not_document_is_touched_in_one_file():
    sources = [source for package in PACKAGES for source in _sources(package)]
    others = [source for source in sources if source.relative_to(ROOT).as_posix() != ORBAX_SHIM]
    assert [fault for source in others for fault in _violations(source, ("orbax.checkpoint._src",))] == []


# Lower it when a name goes; a new one needs a good reason.
MOST_ORBAX_NAMES = 53


def _names_of_orbax() -> set[str]:
    """What the shim imports, what is reached in the modules that it hands on, and what is asked for by its name."""
    shim = ast.parse((ROOT / ORBAX_SHIM).read_text())
    imports = [node for node in ast.walk(shim) if isinstance(node, ast.ImportFrom) and "orbax" in str(node.module)]
    known = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    found, modules = set(known.values()), set()
    for source in _sources("reshard/checkpoint"):
        tree = _tree(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                head, _, name = _dotted(node).partition(".")
                if head in known and name:
                    modules.add(known[head])
                    found.add(f"{known[head]}.{name}")
            if isinstance(node, ast.Constant) and re.fullmatch(r"_(?!_|mpmd)\w+|.*\b_src\..*", str(node.value)):
                found.add(str(node.value))
            if isinstance(node, ast.Call) and _dotted(node.func) in ("optional", "getattr", "hasattr"):
                asked = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                is_of_orbax = _dotted(node.func) == "optional" or _dotted(node.args[0]) in known
                found.update(asked if is_of_orbax else ())
        if source.name == "orbax_calls.py":  # whose classes are all Orbax's
            attributes = (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            found |= {name for name in attributes if name.startswith("_") and not name.startswith("_mpmd")}
    return found - modules


def test_the_number_of_names_that_orbax_does_not_document_does_not_grow():
    names = _names_of_orbax()
    assert len(names) <= MOST_ORBAX_NAMES, sorted(names)
    assert len(names) > MOST_ORBAX_NAMES - 5, "lower the bound"


# Where the tests of a room are, if not in the folder of its name.
ELSEWHERE = {
    "mpmd/tracing": "compat", "mpmd/job": "multiprocess",
    "mpmd/observe": "multiprocess", "reshard/conversion": "convert", "reshard/edits": "safetensors",
    "reshard/moving": "reshard", "reshard/storage": "convert", "reshard/streams": "reshard",
}  # fmt: skip


def test_a_room_has_a_folder_of_tests():
    rooms = [room for room in ROOMS if not room.startswith("scheduler/")]
    folders = {room: ROOT / "tests" / ELSEWHERE.get(room, room.partition("/")[2]) for room in rooms}
    assert {*ELSEWHERE} <= {*rooms}
    assert [room for room, folder in folders.items() if not list(folder.glob("test_*.py"))] == []


def test_a_file_of_tests_has_a_name_of_its_own():
    count = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))  # pytest imports them by it
    assert [name for name, times in count.items() if times > 1] == []


def test_a_class_name_has_one_meaning():
    places = collections.defaultdict(list)
    for source in (source for package in PACKAGES for source in _sources(package)):
        for node in ast.walk(_tree(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.relative_to(ROOT).as_posix())
    assert len(places) > 300 and {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_typed(package):
    assert (ROOT / package / "py.typed").exists()


def _loaded_after(statement: str) -> set[str]:
    return set(_output(f"import sys; {statement}; print(*[name for name in sys.modules if '.' not in name])").split())


def _output(script: str) -> str:
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    return run.stdout


def test_importing_scheduler_loads_neither_jax_nor_numpy():
    assert _loaded_after("import scheduler").isdisjoint({"jax", "jaxlib", "numpy", "mpmd", "reshard"})


@pytest.mark.parametrize("package", ["mpmd", "reshard"])
def test_an_older_jax_is_refused_in_one_line(package, tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text('__version__ = "0.9.1"\n__version_info__ = (0, 9, 1)\n')
    command = [sys.executable, "-c", f"import {package}"]
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.run(command, cwd=tmp_path, env=path, text=True, stderr=subprocess.PIPE)
    assert run.stderr.splitlines()[-1] == (
        "ImportError: jax-mpmd needs jax>=0.10.2; jax 0.9.1 is installed. Upgrade it: pip install -U jax"
    )


def test_importing_mpmd_starts_no_backend():
    script = "import mpmd; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert _output(script) == "False\n"
