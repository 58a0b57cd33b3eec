import subprocess
import sys

import treadle.tracing


def test_the_public_names_exist() -> None:
    assert all(hasattr(treadle.tracing, name) for name in treadle.tracing.__all__)


def test_importing_it_needs_the_standard_library_only() -> None:
    script = (
        "import sys, treadle.tracing\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "foreign = roots - set(sys.stdlib_module_names) - {'treadle'}\n"
        "assert not foreign & {'torch', 'numpy', 'grpc', 'google', 'pydantic', 'ray'}, foreign\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
