"""`elasticrec demo` as `make demo` runs it, with fewer samples, and small benchmarks."""

import json
import re
from pathlib import Path

import pytest

from support.harness import elasticrec, succeed


@pytest.mark.slow
def test_the_demo_shows_the_whole_loop(tmp_path: Path) -> None:
    for _ in range(2):  # The second demo replaces the first.
        output = succeed("demo", "demo", "--samples", "20000", cwd=tmp_path)
    best = [float(value) for value in re.findall(r"best possible[^\n]*?(0\.\d+)", output)]
    (reached,) = re.findall(r"AUC reached (0\.\d+)", output)
    assert best and 0.5 < float(reached) < max(best)
    assert "published models/demo/1" in output
    assert re.search(r"serving demo version 1 .* on http://127\.0\.0\.1:\d+/", output)
    pairs = re.findall(r"^ +[01] +(0\.\d+) +(0\.\d+) +\S+$", output, re.MULTILINE)
    assert len(pairs) == 5
    assert all(abs(float(trainer) - float(server)) < 1e-5 for trainer, server in pairs)
    rate, failed = re.findall(r"([\d,]+) requests/s, (\d+) failed", output)[0]
    assert int(rate.replace(",", "")) > 0 and failed == "0"


def test_a_directory_not_made_by_a_demo_is_refused(tmp_path: Path) -> None:
    for name in ("data", "runs", "models"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "precious").touch()
    result = elasticrec("demo", "mine", cwd=tmp_path)
    assert result.returncode == 2 and "expected an empty directory or an earlier demo" in result.stderr
    assert len(list((tmp_path / "mine").glob("*/precious"))) == 3


def test_demo_data_replaces_files_only_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("# mine")
    result = elasticrec("data", "demo", ".", "--samples", "100", cwd=tmp_path)
    assert result.returncode == 2 and "job.yaml: exists already (--overwrite replaces it)" in result.stderr
    assert (tmp_path / "job.yaml").read_text() == "# mine"
    succeed("data", "demo", ".", "--samples", "100", "--overwrite", cwd=tmp_path)
    assert "name: demo" in (tmp_path / "job.yaml").read_text()
    again = elasticrec("data", "demo", ".", "--samples", "100", cwd=tmp_path)
    assert again.returncode == 2 and "--overwrite" in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model", "labels"), [("multitask", "mmoe", 2), ("sequence", "din", 1)])
def test_every_kind_of_data_has_a_job_that_trains(tmp_path: Path, kind: str, model: str, labels: int) -> None:
    output = succeed("data", "demo", "data", "--kind", kind, "--samples", "4000", "--slots", "6", cwd=tmp_path)
    assert len(re.findall(r"best possible AUC (0\.\d+)", output)) == labels
    assert "best possible AUC on the last hour" in output
    shuffled = succeed(
        "data", "demo", "other", "--kind", kind, "--samples", "4000", "--slots", "6", "--no-structure", cwd=tmp_path
    )
    assert shuffled != output
    assert f"kind: {model}" in (tmp_path / "data/job.yaml").read_text()
    succeed("train", "data/job.yaml", "--set", "train.threads=1", cwd=tmp_path)
    succeed("publish", "demo", cwd=tmp_path)
    (part,) = (tmp_path / "data/20260101/03").glob("*.txt")
    trainer = succeed("predict", str(part), "--checkpoint", "demo", cwd=tmp_path).splitlines()
    version = succeed("predict", str(part), "--model", "models/demo", cwd=tmp_path).splitlines()
    assert len(trainer) == len(version) == 1000 and len(set(trainer)) > 500
    for ours, theirs in zip(trainer, version, strict=True):
        pairs = list(zip(ours.split("\t"), theirs.split("\t"), strict=True))
        assert len(pairs) == labels
        assert all(abs(float(a) - float(b)) < 1e-5 for a, b in pairs)


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    result = elasticrec("data", "demo", "data", "--kind", "triples", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: kind: expected pairwise, multitask or sequence, got `triples`\n"
    result = elasticrec("data", "demo", "data", "--kind", "sequence", "--format", "criteo", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: demo data: kind: expected `pairwise` for criteo\n"
    assert not (tmp_path / "data").exists()


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    result = elasticrec("demo", ".", cwd=tmp_path)
    assert result.returncode == 2 and "thesis.txt" in result.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_bench_parse(tmp_path: Path) -> None:
    output = succeed("bench", "parse", "--json", "--samples", "1000", "--repeats", "1", cwd=tmp_path)
    result = json.loads(output.splitlines()[-1])
    assert result["slots_mb_per_s"] > 0 and result["criteo_mb_per_s"] > 0


@pytest.mark.slow
def test_bench_spine_ends_with_one_json_object(tmp_path: Path) -> None:
    arguments = ["bench", "spine", "--json", "--samples", "16384", "--repeats", "1", "--seconds", "1"]
    result = json.loads(succeed(*arguments, cwd=tmp_path).splitlines()[-1])
    names = ["train_samples_per_s", "dense_only_samples_per_s", "serve_rps_1"]
    names += ["serve_instances_per_s_128", "engine_instances_per_s_128", "parse_mb_per_s"]
    assert all(result[name] > 0 for name in names)
    assert not any(tmp_path.iterdir()), "a benchmark leaves no files"
