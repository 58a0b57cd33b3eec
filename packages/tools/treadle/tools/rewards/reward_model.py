"""A reward by a model with a scalar head, as RLHF trains them: `reward_model.yaml` names it.

    reward_model: Skywork/Skywork-Reward-V2-Qwen3-0.6B    # or a directory
    batch_size: 16

The model reads the conversation as its own chat template writes it, and its one logit is the
reward. It is loaded where rewards run: in the driver, or in each loop worker.

Invariant: a checkpoint without a trained head of one number is refused when it is loaded, and a
conversation is scored whole or not at all.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from treadle.agent_loop import Message, RewardError, Score, SetupError, Trajectory, boundary
from treadle.tools.arguments import require_extra
from treadle.tools.yaml_config import section, string

__all__ = ["RewardModel", "RewardModelSettings", "read_settings"]

_EXTRA = "reward-model"
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
_Encode: TypeAlias = Callable[[list[dict[str, Any]]], list[int]]
_ScoreBatch: TypeAlias = Callable[[Sequence[list[int]]], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSettings:
    """The contents of the file.

    Attributes:
        path: A directory, or an id on the Hugging Face Hub.
        device: Torch's name of a device; None: a GPU if there is one.
        dtype: Torch's name of the type of the weights; "auto": as in the checkpoint.
        batch_size: Maximum number of conversations that are scored together.
        max_tokens: Maximum length of a conversation, which is refused above it.
    """

    path: str
    device: str | None = None
    dtype: str = "auto"
    batch_size: int = 8
    max_tokens: int = 8192


def read_settings(document: object, where: str, base: Path) -> RewardModelSettings:
    """Reads the settings of a file.

    Args:
        base: Folder that a relative directory starts from.

    Raises:
        SetupError: A key is unknown, or a value is invalid.
    """
    fields = section(
        document,
        where,
        required=("reward_model",),
        optional=("device", "dtype", "batch_size", "max_tokens"),
    )
    path = string(fields["reward_model"], f"{where}: reward_model")
    if (base / path).is_dir():
        path = str((base / path).absolute())
    counts: dict[str, Any] = {}
    for key in ("batch_size", "max_tokens"):
        if key in fields:
            value = fields[key]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SetupError(f"{where}: {key} must be a positive integer, got {value!r}")
            counts[key] = value
    texts: dict[str, Any] = {
        key: string(fields[key], f"{where}: {key}") for key in ("device", "dtype") if key in fields
    }
    if (dtype := texts.get("dtype", "auto")) not in _DTYPES:
        raise SetupError(f"{where}: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if _DEVICE.fullmatch(device := texts.get("device", "cpu")) is None:
        raise SetupError(f"{where}: device must be cpu, cuda, cuda:N, mps or xpu, got {device!r}")
    return RewardModelSettings(path=path, **texts, **counts)


class RewardModel:
    """A `RewardFn` by a reward model. An async context manager: entered, then called."""

    def __init__(self, settings: RewardModelSettings) -> None:
        """Loads nothing yet.

        Raises:
            SetupError: A library is not installed.
        """
        for library in ("torch", "transformers"):
            require_extra(f"the reward model {settings.path}", library, _EXTRA)
        self._settings = settings
        self._score: _ScoreBatch | None = None
        self._encode: _Encode | None = None
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._unscored: set[asyncio.Future[float]] = set()
        self._arrived = asyncio.Event()
        self._scorer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Loads the model.

        Raises:
            SetupError: It cannot be loaded, or is no reward model.
        """
        self._encode, self._score = await asyncio.to_thread(_load, self._settings)
        # An event is of the event loop in which it was first waited for.
        self._waiting, self._unscored, self._arrived = [], set(), asyncio.Event()
        self._scorer = asyncio.create_task(self._score_in_batches())
        self._scorer.add_done_callback(self._fail_unscored)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Frees the model; what waits is not scored, and its callers get a `RewardError`."""
        assert self._scorer is not None
        self._scorer.cancel()
        await asyncio.wait([self._scorer])
        self._score = self._encode = None

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Scores a trajectory.

        Raises:
            RewardError: The template refuses the conversation, it has images or is too long, the
                model's number is not finite, or the model was freed meanwhile.
        """
        assert self._scorer is not None, "the reward is entered before it is called"
        settings = self._settings
        if self._encode is None or self._scorer.done():
            raise self._ended()
        with boundary(RewardError, f"the chat template of {settings.path}"):
            ids = self._encode([_as_dict(message) for message in trajectory.messages])
        if len(ids) > settings.max_tokens:
            raise RewardError(
                f"the conversation has {len(ids)} tokens of {settings.path}, and max_tokens is "
                f"{settings.max_tokens}: raise it, or lower rollout.response_length"
            )
        scored: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._unscored.add(scored)
        scored.add_done_callback(self._unscored.discard)
        self._waiting.append((ids, scored))
        self._arrived.set()
        value = await scored
        if not math.isfinite(value):
            raise RewardError(f"{settings.path} gives the reward {value}, which is not finite")
        return Score(value=value)

    def _fail_unscored(self, _: object) -> None:
        for scored in self._unscored:
            if not scored.done():
                scored.set_exception(self._ended())

    def _ended(self) -> RewardError:
        cause = None
        if self._scorer is not None and self._scorer.done() and not self._scorer.cancelled():
            cause = self._scorer.exception()
        reason = "it was freed" if cause is None else f"{type(cause).__name__}: {cause}"
        error = RewardError(f"the reward model {self._settings.path} scores no more: {reason}")
        error.__cause__ = cause
        return error

    async def _score_in_batches(self) -> None:
        assert self._score is not None
        while True:
            await self._arrived.wait()
            batch = self._waiting[: self._settings.batch_size]
            del self._waiting[: len(batch)]
            if not self._waiting:
                self._arrived.clear()
            # One whose trajectory was cancelled meanwhile is not scored.
            batch = [(ids, scored) for ids, scored in batch if not scored.done()]
            if not batch:
                continue
            try:
                with boundary(RewardError, f"the reward model {self._settings.path}"):
                    values = await asyncio.to_thread(self._score, [ids for ids, _ in batch])
            except RewardError as error:
                for _, scored in batch:
                    if not scored.done():
                        scored.set_exception(error)
                continue
            for (_, scored), value in zip(batch, values, strict=True):
                if not scored.done():
                    scored.set_result(value)


def _load(settings: RewardModelSettings) -> tuple[_Encode, _ScoreBatch]:
    """Returns the functions that encode a conversation, and that score encoded ones.

    Raises:
        SetupError: It cannot be loaded onto the device, or is no reward model.
    """
    try:
        return _loaded(settings)
    except SetupError:
        raise
    except Exception as error:  # a border: files of anybody, and the drivers of devices
        where = "" if settings.device is None else f" onto device: {settings.device}"
        raise SetupError(
            f"the reward model {settings.path} cannot be loaded{where}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _loaded(settings: RewardModelSettings) -> tuple[_Encode, _ScoreBatch]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = settings.path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=settings.dtype, output_loading_info=True
    )
    if missing := sorted(loading["missing_keys"]):
        raise SetupError(
            f"{path} is no reward model: it has no trained weights {', '.join(missing[:3])}; name "
            "a checkpoint of a ...ForSequenceClassification"
        )
    if model.config.num_labels != 1:
        raise SetupError(
            f"{path} gives {model.config.num_labels} numbers per conversation: a reward model "
            "gives one (num_labels=1)"
        )
    if tokenizer.chat_template is None:
        raise SetupError(f"{path} has no chat template, which writes the conversation for it")
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).eval()
    text_config = model.config.get_text_config()
    own_pad = text_config.pad_token_id

    def encode(messages: list[dict[str, Any]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert isinstance(text, str)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def score(batch: Sequence[list[int]]) -> list[float]:
        longest = max(map(len, batch))
        pad = own_pad
        if pad is None:
            # The head reads the last token that is not padding, which is then each one's last.
            pad = next(i for i in range(len(batch) + 1) if all(each[-1] != i for each in batch))
            text_config.pad_token_id = pad
        ids = torch.full((len(batch), longest), pad, dtype=torch.long)
        mask = torch.zeros((len(batch), longest), dtype=torch.long)
        for row, each in enumerate(batch):
            ids[row, : len(each)] = torch.tensor(each)
            mask[row, : len(each)] = 1
        with torch.inference_mode():
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return [float(value) for value in logits[:, 0].float().cpu()]

    return encode, score


def _as_dict(message: Message) -> dict[str, Any]:
    if message.images:
        raise RewardError(
            f"a {message.role} message has images, and a reward model reads text alone: score rows "
            "with images by another reward"
        )
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        entry["name"] = message.name
    return entry
