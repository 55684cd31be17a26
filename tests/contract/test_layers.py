"""Imports point one way, and only training needs torch."""

import ast
import importlib.metadata
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticrec

PACKAGE = Path(elasticrec.__file__).parent
ROOT = Path(__file__).parents[2]

# The modules of elasticrec that each module or package imports; a package may always import itself. The sets are exact:
# an import that is gone is removed here too, so that it cannot come back unnoticed.
LAYERS = {
    "errors": set[str](),
    "durable": {"errors"},
    "machine": set[str](),
    "manifest": {"durable", "errors"},
    "config": {"errors"},
    "run": {"config", "durable", "errors"},
    "journal": {"durable", "errors"},
    "user_code": {"errors"},
    "options": set[str](),
    "terminal": set[str](),
    "fail_points": set[str](),
    "net": {"_core", "config", "durable", "errors"},
    "data": {"_core", "config", "durable", "errors", "machine", "net", "options", "terminal", "user_code"},
    "models": set[str](),
    "repository": {"_core", "config", "durable", "errors", "manifest", "net", "terminal"},
    "training": {
        "_core",
        "config",
        "data",
        "durable",
        "errors",
        "machine",
        "manifest",
        "models",
        "net",
        "run",
        "terminal",
        "user_code",
    },
    "publish": {
        "_core",
        "config",
        "durable",
        "errors",
        "fail_points",
        "machine",
        "manifest",
        "models",
        "net",
        "repository",
        "run",
        "training",
    },
    "coordinator": {
        "config",
        "data",
        "errors",
        "fail_points",
        "journal",
        "manifest",
        "net",
        "publish",
        "repository",
        "run",
    },
    "launch": {"config", "errors", "journal", "machine", "manifest", "net", "run"},
    "cube": {"_core", "errors", "machine", "net", "repository"},
    "roles": {
        "_core",
        "config",
        "coordinator",
        "data",
        "durable",
        "errors",
        "fail_points",
        "journal",
        "launch",
        "machine",
        "manifest",
        "net",
        "publish",
        "repository",
        "run",
        "training",
    },
    "serving": {"_core", "config", "data", "errors", "machine", "manifest", "net", "repository"},
    # The audit recounts independently: it may read the job and the run, but use no code that trains.
    "audit": {"config", "errors", "manifest", "run", "user_code"},
    "demo": {"_core", "errors", "serving"},
    "explain": {"_core", "config", "data", "errors", "repository", "run", "serving", "training"},
    "predict": {"_core", "config", "data", "errors", "repository", "run", "score_metrics", "serving", "training"},
    "score_metrics": {"_core", "errors", "training"},
}
# These may import everything. No other package imports them, because no set above contains them.
UNRESTRICTED = {"__init__", "__main__", "api", "bench", "cli"}
# Only these packages may import torch at the top; `bench` and the commands import it when they run.
WITH_TORCH = {"models", "training", "publish", "roles", "bench"}
WITHOUT_TORCH = sorted(
    {
        "elasticrec",
        "elasticrec.api",
        "elasticrec.cli",
        "elasticrec.predict",
        "elasticrec.run",
        *(f"elasticrec.publish.{name}" for name in ("content", "gate", "offer")),
        *(
            module.name
            for name in (
                "audit",
                "config",
                "coordinator",
                "cube",
                "data",
                "launch",
                "net",
                "publish/rollout",
                "publish/servers",
                "repository",
                "serving",
            )
            if (PACKAGE / name).is_dir()
            for module in pkgutil.walk_packages([str(PACKAGE / name)], f"elasticrec.{name}.".replace("/", "."))
        ),
    }
)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """Return the package or module of a file: `training` for training/loop.py, `run` for run.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each module that a file imports anywhere, with its line."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert "elasticrec" not in names, f"{path}:{node.lineno}: expected the import of a module or a name"
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: expected an absolute import"
            assert node.module is not None
            if node.module == "elasticrec":
                yield from ((f"elasticrec.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def elasticrec_imports(part: str) -> dict[str, str]:
    """Return the other modules of elasticrec that a module or package imports, each with one place of the import."""
    return {
        module.split(".")[1]: f"{path.relative_to(PACKAGE)}:{line}"
        for path in sources()
        if part_of(path) == part
        for module, line in imports(path)
        if module.startswith("elasticrec.") and module.split(".")[1] not in (part, "__version__")
    }


def test_every_module_has_a_rule() -> None:
    """A new or renamed package must not escape the rules."""
    assert {part_of(path) for path in sources()} == LAYERS.keys() | UNRESTRICTED


@pytest.mark.parametrize("part", LAYERS)
def test_imports_point_one_way(part: str) -> None:
    found = elasticrec_imports(part)
    forbidden = [f"{found[name]}: `{part}` may not import `{name}`" for name in sorted(found.keys() - LAYERS[part])]
    stale = [f"LAYERS: `{part}` does not import `{name}`: remove it" for name in sorted(LAYERS[part] - found.keys())]
    assert forbidden + stale == []


def test_the_coordinator_does_not_decide_about_delivery() -> None:
    """It begins the publishes of a running job, between two batches; rollouts are started beside it."""
    found = {
        module
        for path in sources()
        if part_of(path) == "coordinator"
        for module, _ in imports(path)
        if module.startswith("elasticrec.publish")
    }
    assert found == {"elasticrec.publish.servers.publishing", "elasticrec.publish.servers.target"}


def test_the_map_lists_packages_in_the_order_of_imports() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## Packages") : text.index("## Crates")]
    rows = [re.findall(r"`([a-z_]+)/?`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    position = {name: number for number, names in enumerate(rows) for name in names}
    assert LAYERS.keys() <= position.keys()
    wrong = [
        f"{name} imports {other}"
        for name, allowed in LAYERS.items()
        for other in allowed - {"_core"}
        if position[other] > position[name]
    ]
    assert wrong == []


def test_models_import_torch_alone() -> None:
    foreign = {
        module.split(".")[0]
        for path in sources()
        if part_of(path) == "models"
        for module, _ in imports(path)
        if module.split(".")[0] not in sys.stdlib_module_names
    }
    assert foreign == {"torch", "elasticrec"}


def test_torch_is_imported_only_by_packages_that_train() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sources()
        if part_of(path) not in WITH_TORCH
        for module, line in imports(path)
        if module.split(".")[0] in ("torch", "onnx", "onnxscript")
    ]
    assert wrong == []


def test_a_model_on_a_disk_needs_no_fsspec() -> None:
    """Importing fsspec takes longer than a whole command."""
    code = "import sys; sys.modules['fsspec'] = None; import elasticrec.cli, elasticrec.repository.find"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_import_without_torch(module: str) -> None:
    """As in an environment without torch."""
    code = f"import sys; sys.modules['torch'] = sys.modules['onnx'] = None; import {module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["serve", "--help"],
        ["data", "stats", "--help"],
        ["predict", "--help"],
        ["models", "list", "--help"],
        ["schema"],
    ],
    ids=" ".join,
)
def test_commands_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['onnx'] = None\n"
        f"from elasticrec.cli import main; sys.exit(main({arguments}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_only_the_binding_depends_on_python() -> None:
    """Dependencies between crates point one way, too."""
    order = ["sample", "table", "wire", "queue", "cube", "ps", "serve", "bench", "py"]
    for path in sorted((ROOT / "crates").glob("*/Cargo.toml")):
        crate = path.parent.name
        manifest = tomllib.loads(path.read_text())
        dependencies = manifest.get("dependencies", {})
        assert ("pyo3" in dependencies) == (crate == "py"), crate
        for name in dependencies:
            if name.startswith("elasticrec-"):
                assert order.index(name.removeprefix("elasticrec-")) < order.index(crate), f"{crate} on {name}"


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert importlib.util.find_spec("elasticrec._core") is not None
    assert importlib.metadata.version("elasticrec") == elasticrec.__version__
