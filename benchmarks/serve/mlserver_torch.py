"""MLServer: tensors of the Open Inference Protocol over REST (JSON) and gRPC (raw); batches are its own."""

from pathlib import Path

import numpy as np
import uvloop
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
from model import DENSE, SLOTS, Model, arguments


class WideDeep(MLModel):
    """The model as MLServer has it."""

    async def load(self) -> bool:
        """Load the model, in a worker if there are any."""
        self._model = Model(Path(self.settings.parameters.uri))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Scores of a request, or of a batch of them."""
        signs, dense = payload.inputs
        scores = self._model.predict(
            np.array(signs.data.root, np.uint64).reshape(-1, SLOTS),
            np.array(dense.data.root, np.float32).reshape(-1, DENSE),
        )
        output = ResponseOutput(name="scores", shape=[len(scores), 1], datatype="FP32", data=scores.tolist())
        return InferenceResponse(model_name=self.name, outputs=[output])


async def serve() -> None:
    """Serve until killed; the pool of workers wants a loop when it is made."""
    given = arguments(__doc__)
    settings = Settings(
        debug=False,
        host="127.0.0.1",
        http_port=given.port,
        grpc_port=given.grpc_port,
        # without a pool of workers the model is in the process that answers
        parallel_workers=0 if given.workers == 1 else given.workers,
        metrics_endpoint=None,
        gzip_enabled=False,
    )
    model = ModelSettings(
        name="bench",
        implementation=WideDeep,
        parameters=ModelParameters(uri=str(given.directory)),
        max_batch_size=0 if given.batch == 1 else given.batch,
        max_batch_time=0.0 if given.batch == 1 else 0.001,
    )
    await MLServer(settings).start([model])


if __name__ == "__main__":
    uvloop.run(serve())
