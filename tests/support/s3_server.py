"""S3 server of the package moto, on loopback in this process. It keeps everything in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"
# Any values work. boto does not look for the machine's own credentials, or ask a cloud's metadata service for them.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


@contextmanager
def s3_server() -> Iterator[str]:
    """Starts the server on a free port, and sets the environment for it. Yields the URL of a bucket there."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
                patch.setenv(name, value)
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
            yield f"s3://{BUCKET}"
    finally:
        server.stop()
