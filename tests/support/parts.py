"""Part files and manifests with changes and valid checksums, for tests of their readers."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from elasticrec.manifest import FileEntry, read_manifest, write_manifest

Blocks = list[dict[str, Any]]


def rewrite(path: Path, change: Callable[[Blocks, Any], None]) -> None:
    """Change the blocks of a part file and update its checksums."""
    content = path.read_bytes()
    trailer = struct.unpack("<8sIIQQQIIQQ", content[-64:])
    meta = json.loads(content[trailer[3] : trailer[3] + trailer[4]])
    blocks = []
    for at in range(trailer[6]):
        fields = struct.unpack_from("<IIQQQQQQQ", content, trailer[5] + 64 * at)
        block = bytearray(content[fields[4] : fields[4] + fields[5]])
        blocks.append({"partition": fields[0], "rows": fields[3], "block": block, "aux": fields[7:]})
    change(blocks, meta)
    out = bytearray(content[:64])
    directory = b""
    for one in blocks:
        block = bytes(one["block"])
        checksum = xxhash.xxh3_64_intdigest(block)
        directory += struct.pack(
            "<IIQQQQQQQ", one["partition"], 0, 0, one["rows"], len(out), len(block), checksum, *one["aux"]
        )
        out += block + bytes(-len(block) % 64)
    text = json.dumps(meta).encode()
    frame = text + bytes(-len(text) % 64) + directory
    end = (len(out), len(text), len(out) + len(frame) - len(directory), len(blocks), trailer[7], 0)
    frame += struct.pack("<8sIIQQQIIQ", *trailer[:3], *end)
    out += frame + struct.pack("<Q", xxhash.xxh3_64_intdigest(content[:64] + frame))
    path.write_bytes(out)


def reseal(checkpoint: Path, kind: str, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Update the checksums of a manifest after its files have changed."""
    manifest = read_manifest(checkpoint, kind)
    change(manifest)
    contents = {name: (checkpoint / name).read_bytes() for name in manifest.pop("files")}
    files = {name: FileEntry(len(text), hashlib.sha256(text).hexdigest()) for name, text in contents.items()}
    body = {key: value for key, value in manifest.items() if key not in ("format", "kind", "self_sha256")}
    write_manifest(checkpoint, kind, body, files)


def first_row(blocks: Blocks, meta: Any) -> tuple[dict[str, Any], int, tuple[int, int, int]]:
    """Return a block with rows, the size of a row, and sign, show and click of the first row."""
    block = next(one for one in blocks if one["rows"])
    size = meta["row_bytes"]
    (sign,) = struct.unpack_from("<Q", block["block"])
    return block, size, (sign, *struct.unpack_from("<II", block["block"], size - 10))
