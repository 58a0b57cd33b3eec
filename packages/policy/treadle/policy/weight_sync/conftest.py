"""The fixtures of weight updates: a policy of one rank, and servers that only receive weights."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc.aio
import pytest
import pytest_asyncio

from treadle.policy.testing.weights_only import FakeServer, Serve, Weights
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc


@pytest.fixture
def weights() -> Weights:
    """Four tensors, of which one is empty and one a scalar."""
    return Weights()


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a fake server under a name."""
    async with AsyncExitStack() as stack:

        async def start(name: str) -> tuple[FakeServer, WeightSyncClient]:
            fake, server = FakeServer(), grpc.aio.server()
            pb_grpc.add_WeightSyncServiceServicer_to_server(fake, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            client = WeightSyncClient(
                name, f"127.0.0.1:{port}", control_deadline_s=60, commit_deadline_s=60
            )
            stack.push_async_callback(client.aclose)
            return fake, client

        yield start
