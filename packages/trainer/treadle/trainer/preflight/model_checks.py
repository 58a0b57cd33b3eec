"""Checks of a model directory that the policy is to be trained from.

Reads config.json and names of files; no weights, and no torch.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from treadle.agent_loop import SetupError
from treadle.policy.backends.description import (
    BackendDescription,
    ModelShape,
    UnsupportedModelError,
    refusals,
)
from treadle.policy.backends.registry import choose
from treadle.policy.client.hf_files import missing_weights, quantisation, quantisation_method
from treadle.policy.config.policy import ParallelConfig, PolicyConfig
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import SftConfig
from treadle.trainer.data.load_data import read_model_config
from treadle.trainer.hub import is_model_id
from treadle.trainer.model_source import resolve_model
from treadle.trainer.problems import Problems

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer
    from treadle.policy.config.critic import CriticConfig

__all__ = [
    "check_backend",
    "check_config_file",
    "check_parallel",
    "check_policy_parallel",
    "check_reference",
    "check_served_weights",
    "check_training",
    "check_vocabulary",
    "check_weights",
    "read_architecture",
    "with_backend",
]


_HOLD_AS_STORED = ("vllm", "vllm_stock", "sglang")
AnyConfigT = TypeVar("AnyConfigT", Config, SftConfig)


def with_backend(config: AnyConfigT) -> tuple[AnyConfigT, str]:
    """Chooses `policy.backend` where it is not set; returns why too."""
    policy = config.policy
    if "backend" in policy.model_fields_set:
        return config, "as set"
    try:
        folder = resolve_model(config.model.path, weights=False)
        model_type = str(read_model_config(folder).get("model_type"))
        quantised = quantisation_method(folder)
    except SetupError:
        return config, "the default"  # the checks of the model tell what is wrong with it
    try:
        importlib.metadata.version("megatron-core")
        is_there = True
    except importlib.metadata.PackageNotFoundError:
        is_there = bool(policy.command)  # then ranks have an environment of their own
    backend, why = choose(model_type, megatron_is_there=is_there, quantised=quantised)
    policy = policy.model_copy(update={"backend": backend})
    return config.model_copy(update={"policy": policy}), why


def check_backend(
    backend: BackendDescription,
    policy: PolicyConfig,
    *,
    critic: CriticConfig | None = None,
    other_reference: bool = False,
) -> None:
    """Rejects what `policy.backend` can do for no model; see `refusals`.

    Raises:
        SetupError: The backend lacks one thing.
        SeveralProblems: It lacks more.
    """
    _raise_all(refusals(backend, policy, critic=critic, other_reference=other_reference))


def check_served_weights(config: Config, folder: Path) -> None:
    """Rejects a quantised model that servers would hold as it is stored: updates are whole.

    Raises:
        SetupError: `rollout.name` is such an engine.
    """
    if config.rollout.name in _HOLD_AS_STORED and (found := quantisation(folder)) is not None:
        raise SetupError(
            f"rollout.name={config.rollout.name} serves model.path={folder} quantised, and cannot "
            f"take whole weights then: {found}; set rollout.name=torch, or take the model's "
            "publication in bfloat16"
        )


def _raise_all(found: Iterable[str]) -> None:
    problems = Problems(SetupError)
    for problem in found:
        problems.add(SetupError(problem))
    problems.raise_if_any()


def check_config_file(folder: Path, model_types: Collection[str]) -> None:
    """Rejects a config.json that transformers cannot load.

    Args:
        model_types: Types that `BackendDescription` lists; models of other types are not checked.

    Raises:
        SetupError: It is no JSON object, or has a value of the wrong type.
    """
    if read_model_config(folder).get("model_type") not in model_types:
        return
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises errors of any type for a bad value
        raise SetupError(
            f"{folder / 'config.json'} cannot be used: {type(error).__name__}: {error}"
        ) from error


def read_architecture(folder: Path, backend: BackendDescription) -> ModelShape:
    """Returns the architecture of a model directory.

    Raises:
        SetupError: The policy cannot compute the model.
    """
    try:
        return backend.read_model(folder)
    except UnsupportedModelError as error:
        raise SetupError(
            f"{folder / 'config.json'}: {error}; docs/models.md lists the models that can be "
            "trained"
        ) from error


def check_weights(folder: Path, *, setting: str = "model.path") -> None:
    """Rejects a model directory without its weights.

    Raises:
        SetupError: A file is missing.
    """
    if (missing := missing_weights(folder)) is not None:
        raise SetupError(
            f"{setting}: {folder} holds {missing}; copy the whole model directory there"
        )


def check_vocabulary(folder: Path, architecture: ModelShape, renderer: HfRenderer) -> None:
    """Rejects a tokenizer with ids that the model does not have.

    Raises:
        SetupError: It has some.
    """
    if renderer.vocab_size > architecture.vocab_size:
        raise SetupError(
            f"the tokenizer in {folder} knows {renderer.vocab_size} ids, and the model's "
            f"config.json has vocab_size={architecture.vocab_size}: they belong to different models"
        )


def check_policy_parallel(
    backend: BackendDescription, parallel: ParallelConfig, architecture: ModelShape
) -> None:
    """Rejects numbers of policy ranks into which the model cannot be split.

    Raises:
        SetupError: One size does not divide the model.
        SeveralProblems: More than one does not.
    """
    _raise_all(backend.split_problems(architecture, parallel))


def check_training(
    backend: BackendDescription, policy: PolicyConfig, architecture: ModelShape
) -> None:
    """Rejects settings of the policy that do not go with the model's blocks, or their absence.

    Raises:
        SetupError: One does not fit.
        SeveralProblems: More than one does not.
    """
    _raise_all(backend.training_problems(architecture, policy))


def check_reference(
    source: Path, policy: Path, parallel: ParallelConfig, backend: BackendDescription
) -> ModelShape:
    """Returns the architecture of the reference model, which must be able to score the policy.

    Raises:
        SetupError: It is no model that the ranks can compute, or it has another tokenizer.
        SeveralProblems: More than one.
    """
    setting = "algorithm.reference_path"
    folder = resolve_model(source, weights=False, setting=setting)
    if source.expanduser().is_dir() or not is_model_id(str(source)):
        check_weights(folder, setting=setting)
    check_config_file(folder, backend.model_types)
    architecture = read_architecture(folder, backend)
    check_policy_parallel(backend, parallel, architecture)
    if read_model_config(policy).get("model_type") in backend.vision_types:
        _raise_all(backend.reference_problems(read_architecture(policy, backend), architecture))
    ours, theirs = _token_ids(policy), _token_ids(folder)
    if len(theirs) > architecture.vocab_size:
        raise SetupError(
            f"{setting}: the tokenizer in {folder} knows {len(theirs)} ids, and the model's "
            f"config.json has vocab_size={architecture.vocab_size}: they belong to different models"
        )
    differing = sorted(
        text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text)
    )
    if differing:
        text = differing[0]
        raise SetupError(
            f"{setting}: the tokenizer in {folder} gives {len(differing)} tokens other ids than "
            f"that of the policy in {policy}, as {text!r}: {theirs.get(text)} and "
            f"{ours.get(text)}. Log-probabilities of ids can be compared only where both models "
            "have one tokenizer: choose a reference of the same family"
        )
    return architecture


def _token_ids(folder: Path) -> Mapping[str, int]:
    """Returns the id of each token of a model directory's tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises errors of any type for a bad file
        raise SetupError(
            f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}"
        ) from error
    found: Mapping[str, int] = tokenizer.get_vocab()
    return found


def check_parallel(config: Config, backend: BackendDescription, architecture: ModelShape) -> None:
    """Rejects numbers of processes into which the model cannot be split.

    Raises:
        SetupError: One size does not divide the model.
        SeveralProblems: More than one does not.
    """
    problems = Problems(SetupError)
    with problems.collected():
        check_policy_parallel(backend, config.policy.parallel, architecture)
    with problems.collected():
        size = config.rollout.tensor_model_parallel_size
        if architecture.num_heads % size:
            raise SetupError(
                f"rollout.tensor_model_parallel_size={size} does not divide the model's "
                f"{architecture.num_heads} attention heads: take a size that does"
            )
    problems.raise_if_any()
