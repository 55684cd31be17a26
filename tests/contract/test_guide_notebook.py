"""The code of the guide "train from Python" runs, block after block, as in one session."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.harness import write_job

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs/guide/notebook.md"


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    job = write_job(tmp_path, format="slots", kind="wide_deep", samples=2000)
    text = job.read_text().replace("name: tiny", "name: demo").replace("data/2026", "2026")
    (tmp_path / "data/job.yaml").write_text(text)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/day2").symlink_to(tmp_path / "data/20260101/01")
    (tmp_path / "samples.txt").write_text("1 0 5:0\n")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        # Another job of the same name must start a new run.
        exec(block.replace("callback, quiet=True)", "callback, quiet=True, fresh=True)"), names)
    assert names["run"].finished
    assert "eval_click_auc" in capsys.readouterr().out
