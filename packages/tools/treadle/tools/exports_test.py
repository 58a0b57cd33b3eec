import treadle.tools
from treadle.tools import rewards


def test_the_public_names_are_sorted_and_exist() -> None:
    for module in (treadle.tools, rewards):
        names = module.__all__
        assert names == sorted(names)
        assert all(hasattr(module, name) for name in names)
