"""The bottleneck of a training as a line of advice."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticrec.training.bottleneck import Setup, Shares, bottleneck
from elasticrec.training.clock import StageClock
from elasticrec.training.loop import train_job
from elasticrec.training.report import describe_shares
from support.small import MakeJob, WriteSamples

SETUP = Setup(workers=1, threads=2, cores=4)


@pytest.mark.parametrize(
    ("shares", "setup", "words"),
    [
        (Shares({"wait": 0.61, "forward": 0.2}), SETUP, "waiting for data 61 %: raise `data.workers` (1 for 4 cores)"),
        (
            Shares({"wait": 0.61}, read=0.1, parse=0.99),
            Setup(workers=1, threads=2, cores=4, has_workers=False),
            "waiting for data 61 %: Parquet is read by one thread; fewer columns or text files are faster",
        ),
        (
            Shares({"wait": 0.61}, read=0.1, parse=0.99),
            SETUP,
            "waiting for data 61 %: raise `data.workers` (1 for 4 cores)",
        ),
        (
            Shares({"wait": 0.61}, read=0.08, parse=0.11),
            SETUP,
            "waiting for data 61 %: but the reader's threads are idle (read 8 %, parse 11 %); other processes may "
            "use the cores, or `data.unit_bytes` is too large for this amount of data",
        ),
        (
            Shares({"wait": 0.9}, read=0.97, parse=0.1),
            SETUP,
            "waiting for data 90 %: the disk is slow, reading takes 97 % of its thread; copy the data to a faster one",
        ),
        (
            Shares({"wait": 0.9}, read=0.1, parse=0.9),
            Setup(workers=4, threads=4, cores=4),
            "waiting for data 90 %: parsing uses all cores; use fewer `data.slots`",
        ),
        (
            Shares({"wait": 0.9}),
            Setup(workers=4, threads=4, cores=4),
            "waiting for data 90 %: use a faster disk or more cores; `data.workers` already equals the number of cores",
        ),
        (
            Shares({"pull": 0.3, "push": 0.25, "forward": 0.2, "backward": 0.2}),
            SETUP,
            "pulling and pushing rows 55 %: use a smaller `model.dim` or fewer `data.slots`",
        ),
        (
            Shares({"wait": 0.3, "forward": 0.2, "backward": 0.25, "step": 0.05}),
            SETUP,
            "the network 50 %: raise `train.threads` (2 for 4 cores) or use a smaller `model.hidden`",
        ),
        (
            Shares({"forward": 0.4, "backward": 0.4}),
            Setup(workers=1, threads=4, cores=4),
            "the network 80 %: use a smaller `model.hidden` or a larger `train.batch_size`",
        ),
        (
            Shares({"checkpoint": 0.6}),
            SETUP,
            "saving checkpoints 60 %: raise `train.checkpoint.every_s`, or `every_epochs` if epochs are short",
        ),
        (
            Shares({"checkpoint": 0.6}),
            Setup(1, 2, 4, saves_by_steps=True),
            "saving checkpoints 60 %: raise `train.checkpoint.every_steps`, or `every_epochs` if epochs are short",
        ),
        (
            Shares({"checkpoint": 0.6}),
            Setup(1, 2, 4, evaluates_inside=True, keeps_best=True),
            "saving checkpoints 60 %: `train.checkpoint.keep_best` saves every new best; evaluate less often",
        ),
        (Shares({"evaluate": 0.5}), SETUP, "evaluating 50 %: use fewer files in `data.eval`"),
        (Shares({"publish": 0.5}), SETUP, "publishing 50 %: raise `publish.every`"),
        (
            Shares({"evaluate": 0.5}),
            Setup(1, 2, 4, evaluates_inside=True),
            "evaluating 50 %: raise `train.evaluate.every_steps` or `every_s`, or use fewer files in `data.eval`",
        ),
        (Shares({}), SETUP, None),
        (Shares({"wait": 0.1, "metrics": 0.9}), SETUP, None),
    ],
)
def test_advice_for_the_largest_share(shares: Shares, setup: Setup, words: str | None) -> None:
    assert bottleneck(shares, setup) == words


@pytest.mark.parametrize(("workers", "busy"), [(1, 1.8), (4, 0.45)])
def test_the_parse_share_is_divided_by_the_number_of_workers(
    make_job: MakeJob,
    write_samples: WriteSamples,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    busy: float,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(count=300)
    seconds = {"wait": 0.5, "read": 0.3, "parse": 1.8}
    for name in ("lap", "shares"):
        monkeypatch.setattr(StageClock, name, lambda _: dict(seconds))
    summary = train_job(make_job(data={"workers": workers}, train={"print_every_s": 1e-9}))
    assert (summary.shares, summary.read, summary.parse) == ({"wait": 0.5}, 0.3, busy)
    records = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    shares = [record["shares"] for record in records if record["event"] == "progress"]
    assert shares[0] == {"wait": 0.5, "read": 0.3, "parse": busy}


def test_the_description_of_shares() -> None:
    assert describe_shares(Shares({"pull": 0.25, "wait": 0.5, "save": 0.001})) == "wait 50%, pull 25%"
    shares = Shares({"wait": 0.5}, read=0.031, parse=0.97)
    assert describe_shares(shares) == "wait 50%; reader threads: read 3%, parse 97%"
    assert shares.to_dict() == {"wait": 0.5, "read": 0.031, "parse": 0.97}


def test_imports_are_not_counted_as_waiting_for_data(tmp_path: Path) -> None:
    """pyarrow imports pandas at its first conversion; the import must happen before the loop is timed."""
    pq.write_table(pa.table({"click": [0, 1] * 50, "user": ["a", "b"] * 50, "price": [0.5] * 100}), tmp_path / "a.pq")
    script = """
import sys
from pathlib import Path
from elasticrec.config import parse_job
from elasticrec.training.loop import Trainer, train_job

train, loaded = Trainer.train, set()
Trainer.train = lambda self: (loaded.update(sys.modules), train(self))[1]
columns = {"labels": "click", "sparse": ["user"], "dense": ["price"]}
data = {"format": "parquet", "train": "a.pq", "eval": {"ratio": 0.2}, "columns": columns}
train_job(parse_job({"name": "a", "data": data, "model": {"hidden": [4]}, "train": {"threads": 1}}, base=Path()))
print(*{name.partition(".")[0] for name in sys.modules.keys() - loaded})
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not {"pyarrow", "pandas", "elasticrec"} & set(done.stdout.split())
