"""Every format is trained, published and served, with the same scores everywhere."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticrec.config.document import dump
from elasticrec.serving.client import Client
from support.harness import serving, succeed

TOLERANCE = 1e-5

READER = """
class Pipes:
    def parse(self, line):
        click, user, item, tags, price = line.split("|")
        return {"click": float(click), "user": user, "item": int(item), "tags": tags.split(), "price": float(price)}
"""


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        user, item = chance.randint(0, 50), chance.randint(0, 30)
        tags = [f"t{chance.randint(0, 9)}" for _ in range(chance.randint(0, 3))]
        click = int(chance.random() < (0.6 if user % 3 == 0 else 0.1))
        price = round(chance.random() * 9, 2)
        made.append({"click": click, "user": f"u{user}", "item": item, "tags": tags, "price": price})
    return made


def write(path: Path, format: str, data: list[dict[str, Any]]) -> None:
    if format == "parquet":
        pq.write_table(pa.table({name: [row[name] for row in data] for name in data[0]}), path, row_group_size=500)
        return
    lines = []
    for row in data:
        tags = row["tags"]
        if format == "csv":
            lines.append(f"{row['click']},{row['user']},{row['item']},{';'.join(tags)},{row['price']}")
        elif format == "paddlerec":
            fields = [f"click:{row['click']}", f"price:{row['price']}", f"user:{row['user']}", f"item:{row['item']}"]
            lines.append(" ".join([*fields, *(f"tags:{tag}" for tag in tags)]))
        else:
            lines.append(f"{row['click']}|{row['user']}|{row['item']}|{' '.join(tags)}|{row['price']}")
    header = ["click,user,item,tags,price"] if format == "csv" else []
    content = "\n".join([*header, *lines, ""]).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


SECTIONS: dict[str, dict[str, Any]] = {
    "csv": {
        "columns": {
            "labels": "click",
            "sparse": ["user", "item", {"name": "tags", "separator": ";"}],
            "dense": ["price"],
        }
    },
    "parquet": {"columns": {"labels": "click", "sparse": ["user", "item", "tags"], "dense": ["price"]}},
    "paddlerec": {"slots": ["user", "item", "tags"], "dense": [{"name": "price", "normalize": "log"}]},
    "reader": {"reader": "pipes.py:Pipes", "slots": ["user", "item", "tags"], "dense": ["price"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("format", SECTIONS)
def test_trained_published_and_served(tmp_path: Path, format: str) -> None:
    suffix = "parquet" if format == "parquet" else "txt.gz"
    write(tmp_path / f"train.{suffix}", format, rows(3000, 1))
    (tmp_path / "pipes.py").write_text(READER)
    data = {"format": format, "train": f"train.{suffix}", "eval": {"ratio": 0.2}, **SECTIONS[format]}
    job = {
        "name": "tiny",
        "data": data,
        "model": {"kind": "deepfm", "dim": 4, "hidden": [16]},
        "dense": {"optimizer": {"learning_rate": 0.01}},
        "train": {"threads": 1, "batch_size": 64, "epochs": 3},
    }
    (tmp_path / "job.yaml").write_text(dump(job))
    succeed("train", "job.yaml", cwd=tmp_path)
    succeed("publish", "tiny", cwd=tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    evaluation = [line["eval"][0] for line in metrics if line.get("eval")][-1]
    assert evaluation["auc"] > 0.6, "there is something to learn in every format"

    samples = rows(1000, 2)
    name = f"samples.{'parquet' if format == 'parquet' else 'txt'}"
    write(tmp_path / name, format, samples)
    text = succeed("predict", name, "--checkpoint", "tiny", cwd=tmp_path)
    trainer = np.array([[float(value)] for value in text.split()])
    assert trainer.shape == (1000, 1) and len(np.unique(trainer.round(6))) > 100
    if format in ("csv", "paddlerec"):
        text = succeed("predict", name, "--model", "models/tiny", cwd=tmp_path)
        np.testing.assert_allclose(
            np.array([[float(value)] for value in text.split()]), trainer, atol=TOLERANCE, rtol=0
        )
    with serving("models/tiny", cwd=tmp_path) as server, Client(server.url) as client:
        instances = [{key: value for key, value in row.items() if key != "click"} for row in samples]
        named = client.predict(instances)
        if format in ("csv", "paddlerec"):
            lines = client.predict_lines((tmp_path / name).read_bytes())
            np.testing.assert_allclose(lines, trainer, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(named, trainer, atol=TOLERANCE, rtol=0)
