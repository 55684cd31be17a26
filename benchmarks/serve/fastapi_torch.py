"""FastAPI with uvicorn: bytes in, bytes out; concurrent requests can be scored together."""

import asyncio
import os
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from model import Floats, Model, Signs, arguments, split

# uvicorn's processes import this file and do not see its command line.
DIRECTORY, BATCH = "RIVAL_DIRECTORY", "RIVAL_BATCH"

app = FastAPI()


class BatchScorer:
    """Scores the requests of one turn of the event loop together."""

    def __init__(self, model: Model, most: int) -> None:
        self._model = model
        self._most = most
        self._waiting: list[tuple[Signs, Floats, asyncio.Future[bytes]]] = []

    async def predict(self, signs: Signs, dense: Floats) -> bytes:
        """Return the scores of one request."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._score)
        self._waiting.append((signs, dense, answer))
        return await answer

    def _score(self) -> None:
        waiting, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._score)
        scores = self._model.predict(
            np.concatenate([signs for signs, _, _ in waiting]), np.concatenate([dense for _, dense, _ in waiting])
        )
        start = 0
        for signs, _, answer in waiting:
            if not answer.done():
                answer.set_result(scores[start : start + len(signs)].tobytes())
            start += len(signs)


if DIRECTORY in os.environ:
    model = Model(Path(os.environ[DIRECTORY]))
    scorer = BatchScorer(model, int(os.environ[BATCH])) if os.environ[BATCH] != "1" else None


@app.post("/predict")
async def predict(request: Request) -> Response:
    """Return scores as bytes."""
    signs, dense = split(await request.body())
    if scorer is not None:
        return Response(await scorer.predict(signs, dense), media_type="application/octet-stream")
    return Response(model.predict(signs, dense).tobytes(), media_type="application/octet-stream")


def main() -> None:
    """Serve until killed."""
    options = arguments(__doc__)
    os.environ |= {DIRECTORY: str(options.directory), BATCH: str(options.batch)}
    uvicorn.run(
        "fastapi_torch:app",
        host="127.0.0.1",
        port=options.port,
        workers=options.workers,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
