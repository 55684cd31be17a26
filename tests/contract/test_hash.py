"""Hash version 1: other programs must compute the same signs to find the same rows."""

import json

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from elasticrec import _core
from elasticrec.config.data import CRITEO_DENSE, CRITEO_SLOTS
from elasticrec.config.job import HASH_VERSION
from elasticrec.errors import ConfigError

FEATURES = {
    "format": "criteo",
    "hash": HASH_VERSION,
    "slots": [{"name": name, "pooling": "sum"} for name in CRITEO_SLOTS],
    "dense": [{"name": name, "normalize": {"kind": "log"}} for name in CRITEO_DENSE],
    "labels": ["click"],
}
PARSER = _core.Parser(json.dumps(FEATURES))


def expected(slot: str, value: bytes) -> int:
    return xxhash.xxh3_64_intdigest(value, seed=xxhash.xxh3_64_intdigest(slot.encode()))


@given(slot=st.text(min_size=1, max_size=300), value=st.binary(max_size=600))
def test_a_sign_is_xxh3_of_the_value_seeded_by_the_slot(slot: str, value: bytes) -> None:
    parser = _core.Parser(json.dumps({**FEATURES, "format": "paddlerec", "slots": [{"name": slot, "pooling": "sum"}]}))
    assert parser.sign(slot, value) == expected(slot, value)


@pytest.mark.parametrize(
    ("slot", "value", "sign"),
    [
        ("C1", b"", 0xA6A7A7B5F160F36A),
        ("C1", b"68fd1e64", 0xBB7B4148340AC23E),
        ("C2", b"68fd1e64", 0x8D420E03CE77E537),
        ("C1", bytes(range(256)) * 4, 0x640046A3E1B7934C),
    ],
)
def test_version_1_never_changes(slot: str, value: bytes, sign: int) -> None:
    assert HASH_VERSION == 1
    assert PARSER.sign(slot, value) == sign


def test_rows_of_criteo_have_these_signs() -> None:
    values = [f"{column:08x}".encode() if column % 4 else b"" for column in range(26)]
    line = b"\t".join([b"1", *[b""] * 13, *values])
    batch = PARSER.parse(line, labels=True)
    signs = [expected(name, value) for name, value in zip(CRITEO_SLOTS, values, strict=True) if value]
    assert batch.signs.tolist() == signs
    # An empty column is an empty slot.
    lengths = np.diff(batch.offsets)
    assert lengths.tolist() == [int(bool(value)) for value in values]


def test_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="hash"):
        _core.Parser(json.dumps({**FEATURES, "hash": 2}))
