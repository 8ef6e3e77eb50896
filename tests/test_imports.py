"""The house's plan: who may import whom. Holds for imports inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROTOCOLS = ("pipeline", "toploc", "shardcast", "grpo", "testnet")
ROLES = {
    "stage", "head", "validator", "origin", "relay", "client", "worker", "trainer", "registry", "orchestrator", "tune",
}  # fmt: skip
FILES = sorted([*ROOT.glob("refimpl/**/*.py"), *ROOT.glob("sim/**/*.py")])


def imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports, at any depth; `from a import b` counts as a, and as a.b if that is a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            for alias in node.names:
                as_module = f"{node.module}.{alias.name}"
                if (ROOT / (as_module.replace(".", "/") + ".py")).exists():
                    yield as_module


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


CASES = [(module(path), name) for path in FILES for name in imports(path)]


def broken(rule: str, importer: str, imported: str) -> str:
    return f"{importer} imports {imported}: {rule}"


def test_there_is_something_to_check() -> None:
    assert len(CASES) > 100


def test_the_reference_implementation_knows_nothing_of_the_simulator() -> None:
    for importer, imported in CASES:
        if inside(importer, "refimpl"):
            assert not inside(imported, "sim") and not inside(imported, "simpy"), broken(
                "refimpl runs without sim", importer, imported
            )


def test_nothing_imports_experiments_or_tests() -> None:
    for importer, imported in CASES:
        assert imported.split(".")[0] not in ("experiments", "tests"), broken("never", importer, imported)


def test_only_worlds_knows_asyncio_and_aiohttp() -> None:
    for importer, imported in CASES:
        if imported.split(".")[0] in ("asyncio", "aiohttp"):
            assert inside(importer, "refimpl.worlds"), broken("only refimpl/worlds may", importer, imported)


def test_only_the_simulator_imports_simpy_and_it_never_imports_torch() -> None:
    for importer, imported in CASES:
        if inside(imported, "simpy"):
            assert inside(importer, "sim"), broken("only sim may", importer, imported)
        if inside(importer, "sim"):
            assert not inside(imported, "torch"), broken("sim has no torch", importer, imported)


def test_the_protocols_do_not_import_each_other() -> None:
    for importer, imported in CASES:
        for ours in PROTOCOLS:
            if inside(importer, f"refimpl.{ours}"):
                for theirs in PROTOCOLS:
                    assert (
                        theirs == ours or not inside(imported, f"refimpl.{theirs}") or _allowed(importer, imported)
                    ), broken("swarm.py hands one to the other", importer, imported)


def _allowed(importer: str, imported: str) -> bool:
    """Proofs are the pipeline's commitments: its blame is settled by the same arithmetic, a core."""
    return inside(importer, "refimpl.pipeline") and imported.startswith("refimpl.toploc.")


def test_cores_import_no_roles() -> None:
    for importer, imported in CASES:
        parts, target = importer.split("."), imported.split(".")
        if (
            len(parts) == 3
            and parts[1] in PROTOCOLS
            and parts[2] not in ROLES
            and parts[2] not in ("__main__", "__init__", "node")
        ):
            same_house = len(target) == 3 and target[:2] == parts[:2]
            assert not (same_house and target[2] in ROLES), broken("a core does not wait", importer, imported)


def test_imports_make_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    known = {module(path) for path in FILES}
    for importer, imported in CASES:
        if imported in known and imported != importer:
            graph.setdefault(importer, set()).add(imported)
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            pytest.fail("a circle: " + " → ".join([*trail[trail.index(name) :], name]))
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            visit(target, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_no_two_messages_share_a_name() -> None:
    """One table of names for the whole project, tests included: they may all be loaded in one process."""
    seen: dict[str, Path] = {}
    for path in [*FILES, *sorted(ROOT.glob("tests/*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(mark) == "wire" for mark in node.decorator_list):
                assert node.name not in seen or node.name == "Bad", f"{path} and {seen.get(node.name)}: {node.name}"
                seen[node.name] = path
