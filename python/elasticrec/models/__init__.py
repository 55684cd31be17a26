"""The networks on top of the embeddings: one short file per model, torch only."""

from elasticrec.models.base import Column, Inputs, Model, Options, Sequence, Shape, mlp
from elasticrec.models.dcn_v2 import DCNv2
from elasticrec.models.deepfm import DeepFM
from elasticrec.models.din import DIN
from elasticrec.models.dnn import DNN
from elasticrec.models.fm import FM
from elasticrec.models.lr import LR
from elasticrec.models.mmoe import MMoE
from elasticrec.models.wide_deep import WideDeep

ZOO: dict[str, type[Model]] = {
    "lr": LR,
    "fm": FM,
    "dnn": DNN,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "dcn_v2": DCNv2,
    "mmoe": MMoE,
    "din": DIN,
}

__all__ = [
    "DIN",
    "DNN",
    "FM",
    "LR",
    "ZOO",
    "Column",
    "DCNv2",
    "DeepFM",
    "Inputs",
    "MMoE",
    "Model",
    "Options",
    "Sequence",
    "Shape",
    "WideDeep",
    "mlp",
]
