"""LitServe: bytes in, bytes out, over its faster queue, with its own batching."""

from pathlib import Path
from typing import Annotated

import litserve
import numpy as np
from fastapi import Depends, Request, Response
from model import Floats, Model, Signs, arguments, split


async def body_of(request: Request) -> bytes:
    """Return the bytes of a request; LitServe itself only reads JSON and forms."""
    return await request.body()


class Api(litserve.LitAPI):
    """Scores one request, or a batch of requests."""

    def __init__(self, directory: Path, batch: int) -> None:
        # With many connections some requests are waiting already, so a short timeout is enough.
        super().__init__(max_batch_size=batch, batch_timeout=0.001 if batch > 1 else 0.0)
        self._directory = directory

    def setup(self, device: str) -> None:
        """Load the model in a worker."""
        self._model = Model(self._directory)

    def decode_request(self, request: Annotated[bytes, Depends(body_of)]) -> tuple[Signs, Floats]:
        """Return signs and dense values."""
        return split(request)

    def batch(self, inputs: list[tuple[Signs, Floats]]) -> tuple[Signs, Floats]:
        """Join requests of one instance each."""
        return np.concatenate([signs for signs, _ in inputs]), np.concatenate([dense for _, dense in inputs])

    def predict(self, inputs: tuple[Signs, Floats]) -> Floats:
        """Return scores `[B]`."""
        return self._model.predict(*inputs)

    def unbatch(self, output: Floats) -> list[Floats]:
        """Return one score per request."""
        return np.split(output, len(output))

    def encode_response(self, output: Floats) -> Response:
        """Return scores as bytes."""
        return Response(output.tobytes(), media_type="application/octet-stream")


def main() -> None:
    """Serve until killed."""
    options = arguments(__doc__)
    server = litserve.LitServer(
        Api(options.directory, options.batch),
        accelerator="cpu",
        workers_per_device=options.workers,
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=options.port,
        num_api_servers=options.workers,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main()
