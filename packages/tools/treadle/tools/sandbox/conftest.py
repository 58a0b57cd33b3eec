from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from treadle.tools.sandbox import LocalSandbox, SandboxLimits
from treadle.tools.sandbox.testing import why_no_user_namespaces

LIMITS = SandboxLimits(
    memory_mib=256, processes=16, disk_mib=16, entries=2000, output_kib=64, timeout_s=60
)


@pytest.fixture(scope="session")
def user_namespaces() -> None:
    """Skips only where the kernel has none; a missing bubblewrap fails when it is looked for."""
    if reason := why_no_user_namespaces():
        pytest.skip(reason)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(user_namespaces: None) -> AsyncIterator[LocalSandbox]:
    """One for a module, small; programs start cold and see no library."""
    async with LocalSandbox(limits=LIMITS, places=4, warm=0, packages=(), preload=()) as local:
        yield local
