"""Storage servers on free ports: a real S3 server, and the files of a directory over HTTP."""

import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from elasticrec.net.server import ListenOptions, WebServer
from elasticrec.repository.files import FileServer

_SERVING = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server and yield its address."""
    code = "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"
    process = subprocess.Popen([sys.executable, "-u", "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    # It logs every request: with a full pipe it would stop answering.
    draining = threading.Thread(target=process.stderr.read)
    with process.stderr:
        try:
            for line in process.stderr:
                if match := _SERVING.search(line):
                    draining.start()
                    yield match[1]
                    break
            else:
                raise RuntimeError("the S3 server did not start")
        finally:
            process.kill()
            process.wait()
            if draining.ident is not None:
                draining.join()
            _forget_clients()


def _forget_clients() -> None:
    """Clear the client cache of fsspec, whose keys do not contain the address of the server."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def environment(address: str) -> dict[str, str]:
    """Return the environment variables that a client needs."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def make_bucket() -> str:
    """Create a bucket and return its URL; the environment names the server."""
    import s3fs

    name = f"tests-{uuid.uuid4().hex[:8]}"
    assert os.environ["AWS_ENDPOINT_URL"]
    s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"


@contextmanager
def file_server(root: Path, token: str) -> Iterator[str]:
    """Serve a directory over HTTP and yield its URL."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code)

    app = Starlette(routes=FileServer(root, token).routes(), exception_handlers={HTTPException: refuse})
    server = WebServer(app, ListenOptions("files", "127.0.0.1", 0))
    server.start()
    try:
        yield f"{server.url}/files"
    finally:
        server.stop()
