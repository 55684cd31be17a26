"""The ONNX Runtime library inside its Python wheel, which the server in Rust loads."""

import importlib.util
from pathlib import Path

from elasticrec.errors import ModelError


def library_path() -> Path:
    """Path of the shared library; the wheel is found without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    places = [] if spec is None else [Path(place) / "capi" for place in spec.submodule_search_locations or ()]
    for place in places:
        # libonnxruntime_providers_shared.so lies beside it
        found = sorted(place.glob("libonnxruntime.so*"))
        if found:
            return found[-1]
    raise ModelError("onnxruntime: expected its library inside the `onnxruntime` package; pip install onnxruntime")
