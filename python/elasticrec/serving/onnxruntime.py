"""Find the ONNX Runtime library in its Python wheel; the Rust server loads it."""

import importlib.util
from pathlib import Path

from elasticrec.errors import ModelError


def library_path() -> Path:
    """Return the path of the shared library without importing the package."""
    spec = importlib.util.find_spec("onnxruntime")
    directories = (
        [] if spec is None else [Path(directory) / "capi" for directory in spec.submodule_search_locations or ()]
    )
    for directory in directories:
        # The pattern excludes libonnxruntime_providers_shared.so.
        found = sorted(directory.glob("libonnxruntime.so*"))
        if found:
            return found[-1]
    raise ModelError("onnxruntime: expected its library inside the `onnxruntime` package; pip install onnxruntime")
