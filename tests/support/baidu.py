"""Requests of Paddle Serving and Cube clients, encoded by hand: protobuf and `baidu_std`."""

import json
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

GENERAL_MODEL = "baidu.paddle_serving.predictor.general_model.GeneralModelService"
DICT = "rec.mcube.DictService"
TIMEOUT_S = 60


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def field(number: int, value: int | bytes | str) -> bytes:
    """Encode a field of a message: a number, or bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(number: int, values: Sequence[int]) -> bytes:
    return field(number, b"".join(map(varint, values)))


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message in order."""
    at = 0

    def read() -> int:
        nonlocal at
        number, shift = 0, 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7

    while at < len(message):
        key = read()
        if key & 7 == 0:
            yield key >> 3, read()
        else:
            assert key & 7 == 2, "no other wire type is sent here"
            length = read()
            yield key >> 3, message[at : at + length]
            at += length


def of(message: bytes, number: int) -> list[Any]:
    """Return all values of a field."""
    return [value for key, value in fields(message) if key == number]


def slots_of(lines: Sequence[bytes]) -> dict[str, tuple[list[int], list[int]]]:
    """Return the signs of each slot of slot text, with the ends of each line's signs."""
    rows = [[part.decode().split(":") for part in line.split()[2:] if b":" in part] for line in lines]
    names = sorted({slot for row in rows for _, slot in row})
    slots = {}
    for name in names:
        signs: list[int] = []
        ends = [0]
        for row in rows:
            signs += [int(sign) for sign, slot in row if slot == name]
            ends.append(len(signs))
        slots[name] = signs, ends
    return slots


def paddle_request(lines: Sequence[bytes], log_id: int, fetch: Sequence[str] = ()) -> bytes:
    """Encode a `Request` with a ragged tensor per slot."""
    tensors = []
    for name, (signs, ends) in slots_of(lines).items():
        shape = packed(11, [len(signs), 1])
        tensors.append(field(1, packed(1, signs) + shape + packed(12, ends) + field(13, name) + field(14, name)))
    return b"".join(tensors) + b"".join(field(2, name) for name in fetch) + field(4, log_id)


def paddle_json(lines: Sequence[bytes], log_id: int) -> dict[str, Any]:
    """Return the same request as JSON, with signs as text, as protobuf writes 64-bit integers."""
    tensors = [
        {
            "int64_data": [str(sign) for sign in signs],
            "shape": [len(signs), 1],
            "lod": ends,
            "elem_type": 0,
            "name": name,
            "alias_name": name,
        }
        for name, (signs, ends) in slots_of(lines).items()
    ]
    return {"tensor": tensors, "fetch_var_names": [], "log_id": log_id}


def paddle_scores(response: bytes, log_id: int) -> dict[str, list[float]]:
    """Return the values of each output of a `Response` without an error."""
    assert (of(response, 5), of(response, 6), of(response, 4)) == ([], [], [log_id]), response
    (output,) = of(response, 1)
    scores = {}
    for tensor in of(output, 1):
        (name,), (values,) = of(tensor, 14), of(tensor, 2)
        scores[name.decode()] = list(struct.unpack(f"<{len(values) // 4}f", values))
    return scores


class Answer(NamedTuple):
    """The answer of a call over `baidu_std`."""

    id: int
    code: int
    text: str
    message: bytes


class Connection:
    """A client connection that can have several calls in flight."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._token = token

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, service: str, method: str, id: int, message: bytes) -> None:
        request = field(1, service) + field(2, method)
        meta = field(1, request) + field(4, id) + (field(7, self._token) if self._token else b"")
        self._socket.sendall(struct.pack(">4sII", b"PRPC", len(meta) + len(message), len(meta)) + meta + message)

    def read(self) -> Answer:
        magic, body_bytes, meta_bytes = struct.unpack(">4sII", self._exactly(12))
        assert magic == b"PRPC"
        body = self._exactly(body_bytes)
        meta, message = body[:meta_bytes], body[meta_bytes:]
        (response,), (id,) = of(meta, 2), of(meta, 4)
        text = b"".join(of(response, 2)).decode()
        return Answer(id, of(response, 1)[0], text, message)

    def call(self, service: str, method: str, message: bytes) -> Answer:
        self.send(service, method, 1, message)
        return self.read()

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            assert piece, "the server closed the connection"
            data += piece
        return bytes(data)


def post(url: str, body: bytes | dict[str, Any], content_type: str = "application/json") -> tuple[int, bytes]:
    """Return the status and body of an answer, including errors."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
