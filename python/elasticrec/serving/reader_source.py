"""Load the source of a version's custom reader and verify it; the code is not run here."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from elasticrec import _core
from elasticrec.data.reader import LineReader
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST
from elasticrec.repository.find import find_chain
from elasticrec.repository.version import READER_FILE


@dataclass(frozen=True)
class ReaderSource:
    """A custom reader and the features that it reads."""

    spec: str
    """File and class, such as `reader.py:MyReader`."""
    source: bytes
    """Content of the file."""
    features: str
    """Features of the version, JSON."""

    def line_reader(self, *, labels: bool = False) -> LineReader:
        """Run the file and create the reader; errors name the line of the file."""
        return LineReader(self.spec, self.source, _core.Parser(self.features), labels=labels)


def reader_source(directory: Path) -> ReaderSource | None:
    """Return the custom reader of a version, or None if it has none."""
    where = directory / MANIFEST
    version = find_chain(directory).version
    features, entry = version.manifest["features"], version.files.get(READER_FILE)
    if features.get("format") != "reader" or entry is None:
        return None
    spec = version.manifest["data"].get("reader")
    if not isinstance(spec, str) or ":" not in spec:
        raise ModelError(f"{where}: data.reader: expected a file and a class, got {spec!r}")
    source = (directory / READER_FILE).read_bytes()
    if hashlib.sha256(source).hexdigest() != entry.sha256:
        raise ModelError(f"{directory / READER_FILE}: sha-256 differs from the manifest, the file is damaged")
    return ReaderSource(spec, source, json.dumps(features))
