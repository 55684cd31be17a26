"""`bench table`: that it measures a table and says what it found; how fast that is, is no test's business."""

import json

import pytest

from elasticrec.cli import main


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--json", "--rows", "20000", "--repeats", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["rows"], result["repeats"], result["row_bytes"]) == (20_000, 1, 98)
    assert result["pull_ratio"] == pytest.approx(result["pulls_per_s"] / result["probe_pulls_per_s"], abs=0.001)
    assert result["update_ratio"] == pytest.approx(result["updates_per_s"] / result["probe_updates_per_s"], abs=0.001)
    assert result["bytes_per_key"] > 10
    assert any(line.startswith("pulls: ") for line in lines)
    assert any(line.startswith("updates: ") for line in lines)
