"""`elasticrec models …`: its output, and one line for a mistake of the user."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticrec import cli
from elasticrec.repository import tables, verify
from elasticrec.repository.repository import Repository
from elasticrec.repository.tables import age
from support.store import manifest_content, publish
from support.versions import write_version

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A repository with versions 1 ← 2 ← 3 and 4; 3 is current."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTICREC_CACHE", str(tmp_path / "cache"))
    repository = Repository.open("models", "demo")
    write_version(repository)
    write_version(repository, 1, rows=110, changed=20, removed=3)
    write_version(repository, 2, rows=120, metrics={"train": [{"auc": 0.71}], "eval": [{"auc": 0.8}]})
    write_version(repository, rows=130)
    repository.offer(3)
    return repository


def run(capsys: Capture, *arguments: str, code: int = 0) -> list[str]:
    assert cli.main(["models", *arguments]) == code
    output = capsys.readouterr()
    assert output.err == ""
    return output.out.splitlines()


def fails(capsys: Capture, *arguments: str) -> str:
    assert cli.main(["models", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


def json_of(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    (line,) = run(capsys, *arguments, "--json", code=code)
    return json.loads(line)


def test_list(capsys: Capture, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.pin(1)
    # a fixed clock, so that ages in several outputs are equal
    now = datetime.now(UTC)
    clock = SimpleNamespace(now=lambda _: now, fromisoformat=datetime.fromisoformat)
    monkeypatch.setattr(tables, "datetime", clock)
    lines = run(capsys, "list")
    assert lines == run(capsys, "list", "demo") == run(capsys, "list", "models/demo")
    assert lines[0] == "models/demo: current 3"
    assert [line.split()[0] for line in lines[1:]] == ["version", "4", "3", "2", "1"]
    assert lines[3].split()[1:5] == ["delta", "of", "2", "current"]
    assert "0.8000" in lines[3]
    assert "20, -3" in lines[4]
    assert lines[5].split()[1:3] == ["base", "pinned"]
    repository.rollback(2)
    assert run(capsys, "list")[0] == "models/demo: current 2, held by a rollback until `models resume`"
    repository.rollback(1, is_loaded=False)
    lines = run(capsys, "list")
    assert lines[0].startswith("models/demo: current 2, a rollback to 1 waits for the store, held by a rollback until ")
    assert lines[5].split()[1:4] == ["base", "wanted", "pinned"]
    assert json_of(capsys, "list")["models"][0]["wanted"] == 1
    found = json_of(capsys, "list")["models"]
    assert [(model["model"], model["current"], model["held"], model["pinned"]) for model in found] == [
        ("demo", 2, True, [1])
    ]
    assert [(one["version"], one["base"], one["rows"]) for one in found[0]["versions"]] == [
        (4, None, 130),
        (3, 1, 120),
        (2, 1, 110),
        (1, None, 100),
    ]


def test_list_with_several_models_and_a_damaged_version(capsys: Capture) -> None:
    write_version(Repository.open("models", "other"))
    Path("models/demo/4/manifest.json").write_bytes(b"{")
    lines = run(capsys, "list")
    assert "models/other: none offered yet" in lines
    assert any(line.startswith("models/demo/4/manifest.json: not JSON") for line in lines)
    assert any(line.split()[:2] == ["4", "damaged"] for line in lines if line)


def test_show(capsys: Capture, repository: Repository) -> None:
    lines = run(capsys, "show", "models/demo")
    text = "\n".join(lines)
    for words in ("models/demo/1/deltas/3", "delta on 2 of base 1", "1 2 3", "120 of f32 in 4 partitions: wide 1"):
        assert words in text
    assert "eval click auc: 0.8000" in lines
    assert run(capsys, "show", "demo:1")[1].split() == ["created", *run(capsys, "show", "demo:1")[1].split()[1:]]
    shown = json_of(capsys, "show", "demo:2")
    assert (shown["chain"], shown["current"], shown["manifest"]["version"]) == ([1, 2], False, 2)


def test_diff(capsys: Capture) -> None:
    lines = run(capsys, "diff", "demo:1", "demo:3")
    assert lines[0] == "demo:1 and demo:3"
    assert "table.rows: 100 → 120" in lines
    assert any(line.split() == ["train", "click", "auc", "0.7000", "0.7100", "+0.0100"] for line in lines)
    assert "dense.bin: changed" in lines
    assert "graph.onnx: removed" in lines
    # these cube files are not real, so rows cannot be compared
    assert lines[-1].startswith("rows are not compared: models/demo/1/cube/part-00000: expected a part file")
    found = json_of(capsys, "diff", "demo:1", "demo:3", "--no-rows")
    assert found["keys"]["table.rows"] == [100, 120]
    assert found["metrics"]["eval click auc"] == [None, 0.8]
    assert found["rows"] is None


def test_verify_reads_the_rows(capsys: Capture, repository: Repository) -> None:
    real = Repository.open("models", "real")
    publish(real)
    publish(real, 1)
    assert run(capsys, "verify", "real", "--all") == ["real:1: ok", "real:2: ok"]
    # the checksums are right, but the part is not a cube
    (line,) = run(capsys, "verify", "demo:4", code=1)
    assert line.startswith("demo:4: ") and "models/demo/4/cube/part-00000" in line
    # the number of rows differs from the manifest
    with real.begin_delta(2) as draft:
        shutil.copytree("models/real/1/deltas/2", draft.directory, dirs_exist_ok=True)
        (draft.directory / "manifest.json").unlink()
        real.commit(draft, manifest_content(1999), real.version(2).files)
    assert run(capsys, "verify", "real", "--all", code=1) == [
        "real:1: ok",
        "real:2: ok",
        "real:3: models/real/1/deltas/3: expected 1999 rows as in its manifest, got 2000",
    ]


def test_verify(capsys: Capture, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "row_problems", lambda *_: [])
    assert run(capsys, "verify", "demo") == ["demo:3: ok"]
    part = Path("models/demo/1/cube/part-00000")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    problem = "models/demo/1/cube/part-00000: sha-256 differs from the manifest, the file is damaged"
    assert run(capsys, "verify", "demo:2", code=1) == [f"demo:2: {problem}"]
    write_version(repository, dense=np.array([np.inf, 1], np.float32).tobytes())
    assert run(capsys, "verify", "demo", "--all", code=1) == [
        f"demo:1: {problem}",
        f"demo:2: {problem}",
        f"demo:3: {problem}",
        "demo:4: ok",
        "demo:5: models/demo/5/dense.bin: `w` has values that are not finite",
    ]
    assert json_of(capsys, "verify", "demo:4") == {"versions": {"4": []}}


def test_pin_rollback_resume_and_gc(capsys: Capture, repository: Repository) -> None:
    assert run(capsys, "pin", "demo:2") == ["pinned demo:2; pinned: 2"]
    assert run(capsys, "rollback", "demo:4") == [
        "models/demo: from version 3 to 4, generation 2; held until `elasticrec models resume models/demo`"
    ]
    assert run(capsys, "resume", "demo") == [
        "models/demo: resumed; current 4, newest 4; the next published version becomes current"
    ]
    assert run(capsys, "resume", "demo")[0].startswith("models/demo: was not held; ")
    # with a store, the rollout offers the newest version without a new publish
    repository.storage.write("STORE", b'{"shards": [["127.0.0.1:1"]], "min_ready": null}')
    assert run(capsys, "resume", "demo")[0].endswith(
        "the newest version that passes the gate becomes current once the store has loaded it"
    )
    lines = run(capsys, "gc", "demo", "--keep", "1", "--dry-run")
    assert lines[0].startswith("models/demo: would remove 3, ")
    assert lines[1:] == ["kept 1: version 2 needs it", "kept 2: pinned", "kept 4: current"]
    assert repository.versions() == [1, 2, 3, 4]
    assert json_of(capsys, "gc", "demo", "--keep", "1")["removed"] == [3]
    assert repository.versions() == [1, 2, 4]
    assert run(capsys, "unpin", "demo:2") == ["unpinned demo:2; pinned: none"]
    assert run(capsys, "gc", "demo", "--keep", "1")[0].startswith("models/demo: removed 1, 2, ")


def test_pack(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "row_problems", lambda *_: [])
    (line,) = run(capsys, "pack", "demo", "demo.tar.gz")
    size = Path("demo.tar.gz").stat().st_size
    assert line == f"packed demo:3 into demo.tar.gz, {size:,} bytes"
    assert run(capsys, "verify", "demo.tar.gz") == ["demo:3: ok"]
    assert "current 3" in run(capsys, "list", "demo.tar.gz")[0]
    assert "expected a name ending in .tar.gz" in fails(capsys, "pack", "demo", "demo.zip")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["show", "nothing"],
            "nothing: no such model, expected <repository>/<model> or <repository>/<model>/<version>",
        ),
        (["show", "demo:9"], "models/demo: no version 9; available: 1, 2, 3, 4"),
        (["rollback", "demo:9"], "models/demo: no version 9; available: 1, 2, 3, 4"),
        (["rollback", "demo"], "models rollback: expected MODEL:VERSION such as demo:3; available: 1, 2, 3, 4"),
        (["pin", "demo"], "models pin: expected MODEL:VERSION such as demo:3; available: 1, 2, 3, 4"),
        (["unpin", "demo:3"], "models/demo: version 3 is not pinned; pinned: none"),
        (["list", "."], ".: no models in it"),
        (["verify", "missing.tar.gz"], "missing.tar.gz: no such file or directory"),
        (["show", "nosuch://x/y"], "nosuch://x/y: expected a URL that fsspec supports: Protocol not known: nosuch"),
    ],
)
def test_a_mistake_is_one_line(capsys: Capture, arguments: list[str], line: str) -> None:
    assert fails(capsys, *arguments) == f"error: {line}"


def test_ages() -> None:
    now = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
    texts = {
        "2026-01-02T11:59:58+00:00": "2 s",
        "2026-01-02T11:57:00+00:00": "3 min",
        "2026-01-02T07:00:00Z": "5 h",
        "2025-12-30T12:00:00Z": "3 d",
        "2027-01-01T00:00:00Z": "0 s",
        "yesterday": "?",
    }
    assert {text: age(text, now) for text in texts} == texts
