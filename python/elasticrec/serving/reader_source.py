"""The reader that a version carries: named by its manifest and checked; whoever has it may run it, or not."""

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
    """A reader of the user's own, and what it reads for."""

    spec: str
    """File and class, such as `reader.py:MyReader`."""
    source: bytes
    """What the file says."""
    features: str
    """Feature handling of the version, JSON."""

    def line_reader(self, *, labels: bool = False) -> LineReader:
        """Run the file and make a reader; what goes wrong in it is told with its line."""
        return LineReader(self.spec, self.source, _core.Parser(self.features), labels=labels)


def source_of(directory: Path) -> ReaderSource | None:
    """The reader of a version; None for a format that needs none, and for one that was published without it."""
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
