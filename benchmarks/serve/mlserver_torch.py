"""MLServer: tensors of the Open Inference Protocol over REST (JSON) and gRPC (raw), with its own batching."""

from pathlib import Path

import numpy as np
import uvloop
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
from model import DENSE, SLOTS, Model, arguments


class WideDeep(MLModel):
    """The model for MLServer."""

    async def load(self) -> bool:
        """Load the model; MLServer calls it in a worker if it has workers."""
        self._model = Model(Path(self.settings.parameters.uri))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Return the scores of a request or a batch of requests."""
        signs, dense = payload.inputs
        scores = self._model.predict(
            np.array(signs.data.root, np.uint64).reshape(-1, SLOTS),
            np.array(dense.data.root, np.float32).reshape(-1, DENSE),
        )
        output = ResponseOutput(name="scores", shape=[len(scores), 1], datatype="FP32", data=scores.tolist())
        return InferenceResponse(model_name=self.name, outputs=[output])


async def serve() -> None:
    """Serve until killed; MLServer starts its workers inside an event loop."""
    options = arguments(__doc__)
    settings = Settings(
        debug=False,
        host="127.0.0.1",
        http_port=options.port,
        grpc_port=options.grpc_port,
        # Without workers the model is in the process that answers.
        parallel_workers=0 if options.workers == 1 else options.workers,
        metrics_endpoint=None,
        gzip_enabled=False,
    )
    model = ModelSettings(
        name="bench",
        implementation=WideDeep,
        parameters=ModelParameters(uri=str(options.directory)),
        max_batch_size=0 if options.batch == 1 else options.batch,
        max_batch_time=0.0 if options.batch == 1 else 0.001,
    )
    await MLServer(settings).start([model])


if __name__ == "__main__":
    uvloop.run(serve())
