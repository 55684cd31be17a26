"""The networks above the embeddings: one short file a model, torch only."""

from elasticrec.models.base import Column, Inputs, Model, Options, Sequence, Shape
from elasticrec.models.dcn_v2 import DCNv2
from elasticrec.models.deepfm import DeepFM
from elasticrec.models.dnn import DNN
from elasticrec.models.fm import FM
from elasticrec.models.lr import LR
from elasticrec.models.wide_deep import WideDeep

ZOO: dict[str, type[Model]] = {
    "lr": LR,
    "fm": FM,
    "dnn": DNN,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "dcn_v2": DCNv2,
}

__all__ = [
    "DNN",
    "FM",
    "LR",
    "ZOO",
    "Column",
    "DCNv2",
    "DeepFM",
    "Inputs",
    "Model",
    "Options",
    "Sequence",
    "Shape",
    "WideDeep",
]
