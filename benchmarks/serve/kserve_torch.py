"""KServe's Python server: tensors of the Open Inference Protocol over REST (binary) and gRPC (raw)."""

import logging
from typing import Any

import grpc
import numpy as np
import uvicorn
from kserve import InferOutput, InferRequest, InferResponse, ModelServer
from kserve import Model as KserveModel
from model import DENSE, SLOTS, Model, arguments

# Without this KServe logs a line per request. Its processes import this file, so the call is here.
logging.disable(logging.INFO)


class WideDeep(KserveModel):
    """The model for KServe."""

    def __init__(self, model: Model) -> None:
        super().__init__("bench")
        self._model = model
        self.ready = True

    async def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        """Return the scores of a request."""
        signs, dense = (tensor.as_numpy() for tensor in payload.inputs)
        scores = self._model.predict(
            signs.astype(np.uint64, copy=False).reshape(-1, SLOTS),
            dense.astype(np.float32, copy=False).reshape(-1, DENSE),
        )
        output = InferOutput("scores", [len(scores), 1], "FP32")
        output.set_data_from_numpy(scores.reshape(-1, 1), binary_data=payload.use_binary_outputs)
        return InferResponse(
            payload.id or "",
            self.name,
            [output],
            from_grpc=payload.from_grpc,
            use_binary_outputs=payload.use_binary_outputs,
        )


def stay_on_loopback() -> None:
    """Make KServe listen on the loopback interface only; it has no setting for that."""
    configure, create = uvicorn.Config.__init__, grpc.aio.server

    def config(self: uvicorn.Config, app: Any, **options: Any) -> None:
        configure(self, app, **options | {"host": "127.0.0.1"})

    def server(*positional: Any, **named: Any) -> grpc.aio.Server:
        made = create(*positional, **named)
        add = made.add_insecure_port
        made.add_insecure_port = lambda address: add(address.replace("[::]", "127.0.0.1"))
        return made

    uvicorn.Config.__init__ = config
    grpc.aio.server = server


def main() -> None:
    """Serve until killed."""
    options = arguments(__doc__)
    stay_on_loopback()
    ModelServer(
        http_port=options.port, grpc_port=options.grpc_port, workers=options.workers, enable_latency_logging=False
    ).start([WideDeep(Model(options.directory))])


if __name__ == "__main__":
    main()
