"""`data stats` compared with counts in the test, for every format; leakage, drift, bad records, unused columns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import cli
from elasticrec.config import Job, load_job, parse_job
from elasticrec.data.init.job_file import write_job
from elasticrec.data.stats import collect as collecting
from elasticrec.data.stats.arrays import BucketAuc, SignCounts, distance
from elasticrec.data.stats.collect import collect
from elasticrec.data.stats.report import report_lines
from elasticrec.data.stats.result import Stats
from support.tables import Row, as_csv, as_paddlerec, as_slots, rows, write, write_kind

Capture = pytest.CaptureFixture[str]

COLUMNS = {
    "labels": "click",
    "sparse": ["user_id", {"name": "tags", "separator": "|"}],
    "dense": ["price", {"name": "visits", "normalize": "minmax", "min": 0, "max": 5}],
}


pytestmark = pytest.mark.usefixtures("own_directory")


def csv_job(tmp_path: Path, train: list[Row], held_out: list[Row] | None = None, **data: Any) -> Job:
    write(tmp_path / "train.csv", as_csv(train))
    raw: dict[str, Any] = {"format": "csv", "train": "train.csv", "columns": COLUMNS}
    if held_out is not None:
        write(tmp_path / "eval.csv", as_csv(held_out))
        raw["eval"] = "eval.csv"
    return parse_job({"name": "a", "data": raw | data}, base=tmp_path, source="job.yaml")


def find(stats: Stats, name: str) -> Any:
    return next(one for one in [*stats.slots, *stats.dense] if one.name == name)


def exact_auc(scores: list[float], labels: list[int]) -> float:
    clicks = [score for score, label in zip(scores, labels, strict=True) if label]
    others = [score for score, label in zip(scores, labels, strict=True) if not label]
    wins = sum((a > b) + 0.5 * (a == b) for a in clicks for b in others)
    return wins / (len(clicks) * len(others))


def test_statistics_equal_simple_counts(tmp_path: Path) -> None:
    train, held_out = rows(1200), rows(400, seed=2)
    stats = collect(csv_job(tmp_path, train, held_out), num_samples=10_000)
    assert (stats.num_train, stats.num_eval, stats.is_sample, stats.num_bad) == (1200, 400, False, 0)
    base = sum(row["click"] for row in train) / len(train)
    rate, held_out_rate = stats.labels["click"]
    assert rate == pytest.approx(base) and held_out_rate == pytest.approx(sum(r["click"] for r in held_out) / 400)

    user, tags, price = find(stats, "user_id"), find(stats, "tags"), find(stats, "price")
    assert (user.coverage, user.mean_signs) == (1, 1)
    assert user.num_signs == len({row["user_id"] for row in train})
    with_tags = [row for row in train if row["tags"]]
    assert tags.coverage == pytest.approx(len(with_tags) / 1200)
    assert tags.num_signs == 10
    assert tags.mean_signs == pytest.approx(sum(len(row["tags"]) for row in train) / 1200)
    assert tags.click_rate == pytest.approx(sum(row["click"] for row in with_tags) / len(with_tags))
    known = {row["user_id"] for row in train}
    assert user.unseen == pytest.approx(sum(row["user_id"] not in known for row in held_out) / 400)

    prices = [row["price"] for row in train if row["price"] is not None]
    assert price.coverage == pytest.approx(len(prices) / 1200)
    assert (price.min, price.max) == pytest.approx((min(prices), max(prices)))
    assert price.mean == pytest.approx(sum(prices) / len(prices))
    assert price.quantiles["50%"] == pytest.approx(float(np.median(prices)), rel=1e-5)
    # Dense statistics are before normalisation.
    assert find(stats, "visits").max == max(row["visits"] for row in train)

    scores = []
    for row in held_out:
        clicks = [other["click"] for other in train if other["user_id"] == row["user_id"]]
        scores.append((sum(clicks) + 20 * base) / (len(clicks) + 20))
    assert user.auc == pytest.approx(exact_auc(scores, [row["click"] for row in held_out]), abs=2e-3)
    assert user.auc > 0.75
    assert abs(price.auc - 0.5) < 0.1
    assert stats.warnings == []
    assert [one.name for one in stats.unused] == ["at", "note"]


def test_without_evaluation_data_all_samples_count(tmp_path: Path) -> None:
    train = rows(1000)
    stats = collect(csv_job(tmp_path, train), num_samples=10_000)
    assert (stats.num_train, stats.has_eval) == (1000, False)
    user = find(stats, "user_id")
    assert user.num_signs == len({row["user_id"] for row in train})
    assert user.auc > 0.7 and user.drift is None
    assert find(stats, "price").coverage == pytest.approx(sum(row["price"] is not None for row in train) / 1000)
    assert any("held-out share" in line for line in report_lines(stats))


@pytest.mark.parametrize("kind", ["slots", "slots.gz", "paddlerec", "criteo", "csv.zst", "json", "parquet"])
def test_statistics_of_every_format(tmp_path: Path, kind: str, capsys: Capture) -> None:
    write_kind(tmp_path, kind, rows(2000))
    written = write_job(Path("job"), [str(next(tmp_path.glob("data.*")))])
    stats = collect(load_job(written.path), num_samples=10_000)
    assert stats.num_train + stats.num_eval == 2000
    slot = max(stats.slots, key=lambda slot: slot.auc or 0)
    assert slot.name in ("101", "user", "C1", "user_id")
    assert slot.auc is not None and slot.auc > 0.65
    if kind in ("criteo", "json", "parquet", "csv.zst"):
        name = "I2" if kind == "criteo" else "price"
        coverage = find(stats, name).coverage
        assert coverage == 0 if kind == "criteo" else 0.85 < coverage < 0.95
    capsys.readouterr()
    assert cli.main(["data", "stats", "job/job.yaml", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["num_train"] == stats.num_train
    assert [slot["name"] for slot in printed["slots"]] == [slot.name for slot in stats.slots]


def test_leaking_slots_are_a_warning(tmp_path: Path) -> None:
    lines = []
    for number, row in enumerate(rows(1500)):
        # Slot 9 occurs only with a click, and the value of slot 2 reveals the click.
        after = " 7:9" if row["click"] else ""
        lines.append(f"1 {row['click']} {row['user_id']}:1 {50 + row['click']}:2{after} {number}:other\n")
    write(tmp_path / "a.txt", "".join(lines).encode())
    raw = {"name": "a", "data": {"format": "slots", "train": "a.txt", "eval": {"ratio": 0.2}, "slots": [1, 2, 9]}}
    stats = collect(parse_job(raw, base=tmp_path, source="job.yaml"), num_samples=10_000)
    assert stats.warnings == [
        "slot `2` alone has AUC 1.00: is it known only after the click?",
        "slot `9` alone has AUC 1.00: is it known only after the click?",
    ]
    assert report_lines(stats)[-1] == f"warning: {stats.warnings[1]}"


def test_drift_is_a_warning(tmp_path: Path) -> None:
    shifted = [{**row, "user_id": row["user_id"] + 10_000, "price": (row["price"] or 0) + 90} for row in rows(600, 3)]
    stats = collect(csv_job(tmp_path, rows(1500), shifted), num_samples=10_000)
    user = find(stats, "user_id")
    assert user.unseen == 1.0 and user.drift > 0.8
    assert find(stats, "price").drift > 0.5
    assert find(stats, "tags").drift < 0.1
    assert "slot `user_id`: 100% of its signs in eval are not in train" in stats.warnings
    assert any(line.startswith("dense column `price` differs between train and eval") for line in stats.warnings)


def test_a_partial_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = collect(csv_job(tmp_path, rows(1500), rows(500, 2)), num_samples=400)
    assert (stats.num_train, stats.num_eval, stats.is_sample) == (400, 100, True)
    assert "(a part of the data; raise --samples to read more)" in report_lines(stats)[0]
    assert not collect(csv_job(tmp_path, rows(400), rows(100, 2)), num_samples=400).is_sample
    monkeypatch.setattr(collecting, "_BATCH_SIZE", 100)
    monkeypatch.setattr(collecting, "_MAX_SIGNS", 0)
    monkeypatch.setattr(SignCounts, "add", _add_and_merge(SignCounts.add))
    assert collect(csv_job(tmp_path, rows(1500)), num_samples=10_000).num_train == 200


def _add_and_merge(add: Any) -> Any:
    def both(self: SignCounts, *arrays: Any) -> None:
        add(self, *arrays)
        self.merge()

    return both


def test_bad_records_and_empty_slots(tmp_path: Path, capsys: Capture) -> None:
    content = as_slots(rows(300)) + b"1 0 x:101\n" * 9
    write(tmp_path / "a.txt", content)
    Path("job.yaml").write_text("name: a\ndata: {format: slots, train: a.txt, slots: [101, 5]}\n")
    assert cli.main(["data", "stats", "job.yaml"]) == 0
    out = capsys.readouterr().out
    assert "bad records: 9 of 309 (2.913%), the first of them:" in out
    assert "a.txt:301: slot `101`: sign `x` is not a u64" in out
    assert "warning: slot `5` has no value in any inspected sample: is its name correct?" in out
    assert "not used by the job: 103 (in 97.1% of the samples), 102 (in 7" in out
    assert cli.main(["data", "stats", "job.yaml", "--samples", "5"]) == 2


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"format": "paddlerec", "slots": ["user"], "dense": [{"name": "dense_feature", "count": 2}]}, {"3", "tags"}),
        ({"format": "paddlerec", "slots": ["user", "tags", "3"]}, {"dense_feature"}),
    ],
)
def test_unused_names_are_listed(tmp_path: Path, data: dict[str, Any], names: set[str]) -> None:
    write(tmp_path / "a.txt", as_paddlerec(rows(200)))
    job = parse_job({"name": "a", "data": data | {"train": "a.txt"}}, base=tmp_path, source="job.yaml")
    assert {one.name for one in collect(job, num_samples=1000).unused} == names


def test_empty_data_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    Path("job.yaml").write_text("name: a\ndata: {format: slots, train: a.txt, slots: [1]}\n")
    assert cli.main(["data", "stats", "job.yaml"]) == 2
    assert capsys.readouterr().err == "error: job.yaml: data.train: expected samples, got none\n"


def test_histogram_auc_equals_the_exact_auc() -> None:
    draw = np.random.default_rng(1)
    scores = np.round(draw.random(400) ** 3, 2)
    labels = (draw.random(400) < scores).astype(np.float64)
    auc = BucketAuc()
    for part in np.array_split(np.arange(400), 7):
        auc.add(scores[part], np.ones(len(part)), labels[part])
    assert auc.result() == pytest.approx(exact_auc(scores.tolist(), [int(one) for one in labels]), abs=1e-9)
    alone = BucketAuc()
    alone.add(scores, np.ones(400), np.ones(400))
    assert alone.result() is None


def test_sign_counts_equal_a_dictionary() -> None:
    draw = np.random.default_rng(1)
    counts, expected = SignCounts(), dict[int, list[float]]()
    for _ in range(20):
        signs = draw.integers(0, 3000, 9000).astype(np.uint64) * np.uint64(2**52)
        shows, clicks = draw.random(9000), draw.random(9000)
        counts.add(signs, shows, clicks)
        for sign, show, click in zip(signs.tolist(), shows, clicks, strict=True):
            both = expected.setdefault(sign, [0.0, 0.0])
            both[0] += show
            both[1] += click
    counts.merge()
    assert counts.signs.tolist() == sorted(expected)
    assert np.allclose(counts.shows, [expected[sign][0] for sign in sorted(expected)])
    assert np.allclose(counts.clicks, [expected[sign][1] for sign in sorted(expected)])
    at, known = counts.find(np.array([sorted(expected)[5], 1], np.uint64))
    assert (at[0], known.tolist()) == (5, [True, False])


def test_distance_of_equal_and_disjoint_distributions() -> None:
    draw = np.random.default_rng(1)
    chances = draw.dirichlet(np.ones(200))
    same = distance(draw.multinomial(5000, chances).astype(float), draw.multinomial(2000, chances).astype(float))
    assert same < 0.05
    assert distance(np.array([500.0, 0.0]), np.array([0.0, 500.0])) == pytest.approx(1, abs=0.01)
