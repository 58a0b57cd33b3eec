"""What the parts of the policy contract share: tiny models, and a backend that is built by name."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest

from treadle.policy.backend import PolicyBackend, Rendezvous
from treadle.policy.backends import registry
from treadle.policy.backends.description import Capabilities
from treadle.policy.client.types import NamedTensor
from treadle.policy.config.choices import BackendName
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig
from treadle.policy.testing.tiny import write_model

LINEAR = OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0, weight_decay=0.0)
"""With eps = 1, Adam's step is about lr * g / (|g| + 1): parameters compare as gradients do. With a
usual eps, a rounding difference in a gradient near 0 would become a difference of 2 * lr."""

Weights = Mapping[str, np.ndarray[Any, Any]]


class OpenPolicy(Protocol):
    """Builds a policy of one process, and closes the one before it: a process has one at a time."""

    def __call__(
        self,
        folder: Path,
        *,
        keep_reference: bool = False,
        reference_path: Path | None = None,
        **settings: Any,
    ) -> PolicyBackend:
        """Returns it; `settings` are those of `PolicyConfig`."""
        ...


class ContractBase:
    """Attributes of a backend's test class.

    Attributes:
        sizes: Settings of every tiny model that differ from those of `tiny.write_model`.
        models: The variants that are compared with transformers: model type and more settings.
        adapted: The model types whose adapters are merged.
    """

    backend: ClassVar[BackendName]
    sizes: ClassVar[Mapping[str, Any]] = {}
    models: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {"qwen2": ("qwen2", {})}
    adapted: ClassVar[Sequence[str]] = ("qwen2",)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend."""
        return registry.describe(self.backend).capabilities

    def parameters(self) -> Mapping[str, Sequence[Any]]:
        """Returns the values of each argument of tests that depends on the backend."""
        can = self.capabilities
        return {
            "variant": tuple(self.models),
            "dtype": can.dtypes,
            "adapted_type": self.adapted if can.lora else (),
        }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Gives the tests these arguments."""
        for name, values in self.parameters().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    def needs(self, name: str) -> None:
        """Skips a test of what the backend cannot do."""
        if not getattr(self.capabilities, name):
            pytest.skip(f"policy.backend={self.backend} has no {name}")

    @classmethod
    def write(cls, folder: Path, model_type: str = "qwen2", **settings: Any) -> Any:
        """Writes a tiny model that the backend trains; see `tiny.write_model`."""
        return write_model(folder, model_type, **{**cls.sizes, **settings})

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of a tiny Qwen2."""
        path = tmp_path_factory.mktemp("model") / "qwen2"
        cls.write(path)
        return path

    @pytest.fixture
    def open_policy(self) -> Iterator[OpenPolicy]:
        """See `OpenPolicy`; the last policy is closed after the test."""
        opened: list[PolicyBackend] = []

        def build(
            folder: Path,
            *,
            keep_reference: bool = False,
            reference_path: Path | None = None,
            **settings: Any,
        ) -> PolicyBackend:
            if opened:
                opened.pop().close()
            policy = registry.build(
                PolicyConfig(backend=self.backend, **settings),
                folder,
                Rendezvous(),
                keep_reference=keep_reference,
                reference_path=reference_path,
            )
            opened.append(policy)
            return policy

        yield build
        for policy in opened:
            policy.close()


def exported(policy: PolicyBackend) -> Weights:
    """Returns copies of the weights."""
    return {t.name: _numbers(t) for t in policy.export_weights()}


def _numbers(item: NamedTensor) -> np.ndarray[Any, Any]:
    numbers: np.ndarray[Any, Any] = item.tensor.detach().clone().float().numpy()
    return numbers


def largest_difference(one: Weights, two: Weights) -> float:
    """Returns the largest difference of two weights of the same name."""
    assert one.keys() == two.keys()
    return max(float(abs(one[name] - two[name]).max()) for name in one)
