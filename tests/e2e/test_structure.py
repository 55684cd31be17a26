"""A model that can learn the pattern of its demo data beats one that cannot, but not on shuffled data."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from elasticrec.config import parse_job
from elasticrec.data.demo import MAX_HISTORY, write_demo
from elasticrec.training.loop import train_job

# Required margins in AUC; measured margins are several times as large, and about zero without a pattern.
BETTER = 0.02
BETTER_ON_BUYS = 0.01

DEEP = {"dim": 4, "hidden": [32, 16]}
MMOE = {"kind": "mmoe", "dim": 4, "experts": 4, "expert_hidden": [32], "hidden": [16]}
ORDINARY = ["0-3", "item"]

Auc = Callable[..., float]


@pytest.fixture(scope="module")
def auc(tmp_path_factory: pytest.TempPathFactory) -> Auc:
    """Return a function that trains on one hour of demo data and returns the AUC on the next, with a cache."""

    @cache
    def data(kind: str, structure: bool, only_buys: bool) -> Path:
        directory = tmp_path_factory.mktemp(kind)
        samples = 300_000 if kind == "multitask" else 200_000
        slots = 6 if kind == "sequence" else 8
        write_demo(directory, samples=samples, slots=slots, hours=2, seed=3, kind=kind, structure=structure)
        for part in directory.glob("*/*/part-*.txt") if only_buys else ():
            part.write_text(re.sub(r"^1 [01] buy=", "1 ", part.read_text(), flags=re.MULTILINE))
        return directory

    results: dict[str, float] = {}

    def train(
        kind: str,
        structure: bool,
        model: dict[str, Any],
        *,
        slots: list[Any] | None = None,
        labels: tuple[str, ...] = ("click",),
        only_buys: bool = False,
        learning_rate: float = 0.05,
    ) -> float:
        directory = data(kind, structure, only_buys)
        raw = {
            "name": "tiny",
            "data": {
                "format": "slots",
                "train": "20260101/00",
                "eval": "20260101/01",
                "slots": slots or ["0-7"],
                "labels": list(labels),
            },
            "model": model,
            "sparse": {"partitions": 4, "init_scale": 0.05, "optimizer": {"learning_rate": learning_rate}},
            "dense": {"optimizer": {"learning_rate": 0.003}},
            "train": {"batch_size": 128, "threads": 1},
        }
        key = repr((directory, raw))
        if key not in results:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("run"))
                evaluation = train_job(parse_job(raw, base=directory)).evaluation
            assert evaluation is not None
            results[key] = evaluation[labels[-1]].auc
        return results[key]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fm", "dnn", "wide_deep", "deepfm", "dcn_v2"])
def test_all_but_a_linear_model_learn_pairs(auc: Auc, kind: str) -> None:
    lr, model = {"kind": "lr"}, {"kind": kind, **DEEP}
    assert auc("pairwise", True, model) > auc("pairwise", True, lr) + BETTER
    assert auc("pairwise", False, model) < auc("pairwise", False, lr) + BETTER


@pytest.mark.slow
def test_mmoe_learns_rare_purchases_from_clicks(auc: Auc) -> None:
    """Compared with the same network trained on purchases alone."""

    def gain(structure: bool) -> float:
        together = auc("multitask", structure, MMOE, labels=("click", "buy"))
        return together - auc("multitask", structure, MMOE, only_buys=True, labels=("buy",))

    assert gain(structure=True) > BETTER_ON_BUYS
    assert gain(structure=False) < BETTER_ON_BUYS


@pytest.mark.slow
def test_din_weighs_the_history(auc: Auc) -> None:
    """Compared with the same layers over the mean of the history."""

    def gain(structure: bool) -> float:
        sequence = {"name": "history", "share": "item", "sequence": MAX_HISTORY}
        mean = {"name": "history", "share": "item", "pooling": "mean"}
        network = {"dim": 8, "hidden": [32, 16]}
        din = auc("sequence", structure, {"kind": "din", **network}, slots=[*ORDINARY, sequence], learning_rate=0.1)
        dnn = auc("sequence", structure, {"kind": "dnn", **network}, slots=[*ORDINARY, mean], learning_rate=0.1)
        return din - dnn

    assert gain(structure=True) > BETTER
    assert gain(structure=False) < BETTER


@pytest.mark.slow
def test_one_pass_of_deepfm_comes_close_to_the_best_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_demo(Path("data"), samples=1_000_000, slots=20, hours=4, seed=1)
    raw = {
        "name": "close",
        "data": {
            "format": "slots",
            "train": ["20260101/00", "20260101/01", "20260101/02"],
            "eval": "20260101/03",
            "slots": "0-19",
        },
        "model": {"kind": "deepfm", "dim": 8, "hidden": [64, 32]},
        "sparse": {"init_scale": 0.02, "optimizer": {"learning_rate": 0.03}},
        "train": {"batch_size": 256, "threads": 1},
    }
    evaluation = train_job(parse_job(raw, base=tmp_path / "data")).evaluation
    assert evaluation is not None
    best = json.loads(Path("data/truth.json").read_text())["hours"][-1]["best_auc"]
    assert best - 0.01 < evaluation["click"].auc < best
