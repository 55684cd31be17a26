"""`data split` splits like a job; parts have every sample once; existing files are not overwritten."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from elasticrec import cli
from elasticrec.config import Job, load_job, parse_job
from elasticrec.data.init.job_file import write_job
from elasticrec.errors import ElasticRecError
from support.tables import WRITERS, as_csv, as_slots, batches_of, rows, samples_of, write, write_kind, write_parquet

Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("own_directory")


def with_data(job: Job, **data: Any) -> Job:
    """Return the job with other files."""
    return job.model_copy(update={"data": job.data.model_copy(update=data)})


def samples(job: Job, **options: bool) -> list[tuple[Any, ...]]:
    return list(samples_of(batches_of(job, **options)))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_split_by_ratio_equals_that_of_the_job(tmp_path: Path, kind: str, capsys: Capture) -> None:
    path = write_kind(tmp_path, kind, rows(1000))
    write_job(Path("job"), [path.name])
    job = load_job("job/job.yaml", ["data.eval={ratio: 0.25}"])
    assert cli.main(["data", "split", path.name, "out", "--ratio", "0.25"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for side, held_out in (("train", False), ("eval", True)):
        assert [file.name for file in Path("out", side).iterdir()] == [path.name]
        expected = samples(job, held_out=held_out)
        assert f"wrote out/{side}: {len(expected):,} samples" in printed
        assert samples(with_data(job, train=(str(tmp_path / "out" / side),), eval=())) == expected
    assert 150 < len(expected) < 350


@pytest.mark.parametrize("kind", ["csv", "csv.zst", "parquet"])
def test_a_split_by_time_equals_that_of_the_job(tmp_path: Path, kind: str) -> None:
    path = write_kind(tmp_path, kind, rows(1000))
    write_job(Path("job"), [path.name])
    time = "2023-11-14T23:30"
    job = load_job("job/job.yaml", [f"data.eval={{time: {time}}}"])
    assert cli.main(["data", "split", path.name, "out", "--time", time, "--job", "job/job.yaml"]) == 0
    for side, held_out in (("train", False), ("eval", True)):
        expected = samples(job, held_out=held_out)
        assert len(expected) > 100
        assert samples(with_data(job, train=(str(tmp_path / "out" / side),), eval=())) == expected


def test_hours_are_split_by_whole_files(tmp_path: Path) -> None:
    for hour in ("20260101/22", "20260101/23", "20260102/00"):
        write(tmp_path / "logs" / hour / "part-0.txt.gz", as_slots(rows(50)))
    assert cli.main(["data", "split", "logs", "out", "--time", "2026-01-01T23:00"]) == 0
    names = sorted(str(path.relative_to("out")) for path in Path("out").rglob("*.gz"))
    assert names == [
        "eval/20260101/23/part-0.txt.gz",
        "eval/20260102/00/part-0.txt.gz",
        "train/20260101/22/part-0.txt.gz",
    ]
    assert Path("out", names[0]).read_bytes() == (tmp_path / "logs/20260101/23/part-0.txt.gz").read_bytes()


@pytest.mark.parametrize("kind", ["slots.gz", "csv", "csv.zst", "json", "parquet"])
def test_parts_have_every_sample_once(tmp_path: Path, kind: str, capsys: Capture) -> None:
    path = write_kind(tmp_path, kind, rows(1000))
    write_job(Path("job"), [path.name])
    job = with_data(load_job("job/job.yaml"), eval=())
    assert cli.main(["data", "split", path.name, "out", "--parts", "3"]) == 0
    suffix = path.name.removeprefix("data")
    assert sorted(file.name for file in Path("out").iterdir()) == [f"part-{n:05}{suffix}" for n in range(3)]
    assert capsys.readouterr().out.splitlines() == [
        f"wrote out/part-{n:05}{suffix}: {334 if n == 0 else 333} samples" for n in range(3)
    ]
    expected = samples(job)
    for n in range(3):
        assert samples(with_data(job, train=(str(tmp_path / f"out/part-{n:05}{suffix}"),))) == expected[n::3]


def test_several_files_keep_their_names_and_headers(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"in/{number}/a.csv", as_csv(rows(200, number)).replace(b"\n", b"\r\n"))
    assert cli.main(["data", "split", "in", "out", "--ratio", "0.5"]) == 0
    files = sorted(Path("out").rglob("*.csv"))
    assert [str(file) for file in files] == [f"out/{side}/{n}/a.csv" for side in ("eval", "train") for n in (0, 1)]
    for file in files:
        assert file.read_bytes().splitlines()[0] == b"click,user_id,tags,price,visits,at,note"
    assert sum(len(file.read_bytes().splitlines()) - 1 for file in files) == 400


def test_the_training_data_of_a_job_is_split(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", as_slots(rows(300)))
    Path("job.yaml").write_text("name: a\ndata: {format: slots, train: a.txt, slots: [101]}\n")
    assert cli.main(["data", "split", "out", "--ratio", "0.5", "--job", "job.yaml"]) == 0
    assert Path("out/train/a.txt").exists() and Path("out/eval/a.txt").exists()


def test_parquet_keeps_types_and_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows(500))
    assert cli.main(["data", "split", "a.parquet", "out", "--ratio", "0.2"]) == 0
    tables = [pq.read_table(f"out/{side}/a.parquet") for side in ("train", "eval")]
    assert all(table.schema.equals(pq.read_schema("a.parquet")) for table in tables)
    assert sum(len(table) for table in tables) == 500
    assert pq.ParquetFile("out/train/a.parquet").metadata.num_row_groups == 1


def test_files_are_replaced_only_with_overwrite(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "a.txt", as_slots(rows(300)))
    command = ["data", "split", "a.txt", "out", "--ratio", "0.5"]
    assert cli.main(command) == 0
    before = Path("out/eval/a.txt").read_bytes()
    assert cli.main([*command[:-1], "0.2"]) == 2
    assert capsys.readouterr().err == "error: out/train/a.txt: exists already (--overwrite replaces it)\n"
    assert Path("out/eval/a.txt").read_bytes() == before
    assert cli.main([*command[:-1], "0.2", "--overwrite"]) == 0
    assert len(Path("out/eval/a.txt").read_bytes()) < 0.7 * len(before)
    # Other files would be read together with the new ones.
    Path("out/train/mine.txt").write_text("1 0 5:5\n")
    assert cli.main([*command, "--overwrite"]) == 2
    assert "expected an empty directory, got out/train/mine.txt in it" in capsys.readouterr().err
    assert Path("out/train/mine.txt").exists()


def test_mistakes_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "a.txt", as_slots(rows(30)))

    def error(*options: str) -> str:
        assert cli.main(["data", "split", "a.txt", "out", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert not [path for path in Path("out").rglob("*") if path.is_file()]
        return str(line)

    assert error() == "error: expected one of --ratio, --time and --parts, got none"
    assert error("--ratio", "0.1", "--parts", "3") == (
        "error: expected one of --ratio, --time and --parts, got --ratio and --parts"
    )
    assert error("--ratio", "1.5") == "error: --ratio: expected a share between 0 and 1, got `1.5`"
    assert error("--time", "soon") == "error: --time: expected a date and time such as `2026-01-31T18:00`, got `soon`"
    assert "data.eval.time: expected files in directories YYYYMMDD/HH" in error("--time", "2026-01-01")
    assert error("--ratio", "0.000001") == "error: out/eval: expected samples, got none with ratio 1e-06"
    assert error("--parts", "40") == "error: out: expected a sample for each of 40 parts, got 30 samples"
    assert cli.main(["data", "split", "out", "--ratio", "0.5"]) == 2


def test_a_damaged_file_leaves_no_output(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", as_slots(rows(20_000)))
    path.write_bytes(path.read_bytes()[:-1000])
    job = parse_job({"name": "a", "data": {"format": "slots", "train": "a.txt.gz", "slots": [1]}}, base=tmp_path)
    from elasticrec.data.convert.split import holdout_of, split_by

    with pytest.raises((OSError, ElasticRecError), match="damaged or truncated"):
        split_by(["a.txt.gz"], Path("out"), holdout_of(0.5, None), job=job)
    assert not [path for path in Path("out").rglob("*") if path.is_file()]
