"""The networks above the embeddings: one short file a model, torch only."""

from elasticrec.models.base import Column, Inputs, Model, Shape
from elasticrec.models.dnn import DNN
from elasticrec.models.wide_deep import WideDeep

ZOO: dict[str, type[Model]] = {"dnn": DNN, "wide_deep": WideDeep}

__all__ = ["DNN", "ZOO", "Column", "Inputs", "Model", "Shape", "WideDeep"]
