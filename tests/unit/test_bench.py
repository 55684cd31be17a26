"""`bench`: that it measures and says what it found; how fast that is, is no test's business."""

import json

import pytest

from elasticrec.cli import main


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--json", "--rows", "20000", "--repeats", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["rows"], result["repeats"], result["row_bytes"]) == (20_000, 1, 98)
    assert result["pull_ratio"] == pytest.approx(result["pulls_per_s"] / result["probe_pulls_per_s"], abs=0.001)
    assert result["update_ratio"] == pytest.approx(result["updates_per_s"] / result["probe_updates_per_s"], abs=0.001)
    assert result["bytes_per_key"] > 10
    assert any(line.startswith("pulls: ") for line in lines)
    assert any(line.startswith("updates: ") for line in lines)


@pytest.mark.slow
def test_train_beside_its_network_and_the_rival(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--samples", "16384", "--rows", "2600", "--repeats", "1", "--seconds", "0.1"]
    assert main(["bench", "train", "--json", "--rivals", *sizes]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    for size in (512, 4096):
        ours, alone = result[f"samples_per_s_{size}"], result[f"dense_only_samples_per_s_{size}"]
        assert result[f"ratio_{size}"] == pytest.approx(ours / alone, abs=0.001)
        assert sum(result[f"shares_{size}"].values()) > 0.9
        assert any(line.startswith(f"batch {size}: ") for line in lines)
    for rival in ("torch", "torch_one_bag"):
        expected = result["samples_per_s"] / result[f"{rival}_samples_per_s"]
        assert result[f"vs_{rival}"] == pytest.approx(expected, abs=0.001)
