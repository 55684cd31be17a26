"""LitServe: bytes in, bytes out, over its faster queue; batches are its own."""

from pathlib import Path
from typing import Annotated

import litserve
import numpy as np
from fastapi import Depends, Request, Response
from model import Floats, Model, Signs, arguments, split


async def body_of(request: Request) -> bytes:
    """The bytes of a request, which LitServe itself only takes as JSON or forms."""
    return await request.body()


class Api(litserve.LitAPI):
    """One request, or a list of them with batches."""

    def __init__(self, directory: Path, batch: int) -> None:
        # of many connections some are there already
        super().__init__(max_batch_size=batch, batch_timeout=0.001 if batch > 1 else 0.0)
        self._directory = directory

    def setup(self, device: str) -> None:
        """Load the model in a worker."""
        self._model = Model(self._directory)

    def decode_request(self, request: Annotated[bytes, Depends(body_of)]) -> tuple[Signs, Floats]:
        """Signs and dense values."""
        return split(request)

    def batch(self, inputs: list[tuple[Signs, Floats]]) -> tuple[Signs, Floats]:
        """Requests of one instance each, together."""
        return np.concatenate([signs for signs, _ in inputs]), np.concatenate([dense for _, dense in inputs])

    def predict(self, inputs: tuple[Signs, Floats]) -> Floats:
        """Scores `[B]`."""
        return self._model.predict(*inputs)

    def unbatch(self, output: Floats) -> list[Floats]:
        """One score a request."""
        return np.split(output, len(output))

    def encode_response(self, output: Floats) -> Response:
        """Scores as bytes."""
        return Response(output.tobytes(), media_type="application/octet-stream")


def main() -> None:
    """Serve until killed."""
    given = arguments(__doc__)
    server = litserve.LitServer(
        Api(given.directory, given.batch),
        accelerator="cpu",
        workers_per_device=given.workers,
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=given.port,
        num_api_servers=given.workers,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main()
