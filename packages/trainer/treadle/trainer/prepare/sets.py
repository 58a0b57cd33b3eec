"""The data sets of `treadle data`: their places on the Hub, and what makes a row of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from treadle.trainer.prepare import boxed_math, geometry3k, gsm8k, retool_sft

__all__ = ["SETS", "DataSet", "MakeRow"]


class MakeRow(Protocol):
    """Makes a row of what is published."""

    def __call__(
        self, columns: Mapping[str, object], *, split: str, index: int
    ) -> dict[str, object]:
        """Returns the row.

        Args:
            split: Name of the written file.
            index: Number of the row in it.

        Raises:
            ValueError: The columns have another form.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A published data set.

    Attributes:
        files: Name of a written file -> the published ones, on the Hub below hf://datasets/.
        required: Columns that every published row has.
        once: Whether a row that is there again is left out.
        some: Whether a local copy may lack some of `files`.
    """

    summary: str
    files: Mapping[str, str]
    required: tuple[str, ...]
    make_row: MakeRow
    once: bool = False
    some: bool = False


_GSM8K, _GEOMETRY = "openai/gsm8k/main", "hiyouga/geometry3k/data"

SETS: Final[Mapping[str, DataSet]] = MappingProxyType(
    {
        "gsm8k": DataSet(
            summary="grade-school mathematics with the tool calc_gsm8k_reward",
            files={split: f"{_GSM8K}/{split}-*.parquet" for split in ("train", "test")},
            required=("question", "answer"),
            make_row=gsm8k.make_row,
        ),
        "gsm8k_single_turn": DataSet(
            summary="the same questions for a single turn, without a tool",
            files={split: f"{_GSM8K}/{split}-*.parquet" for split in ("train", "test")},
            required=("question", "answer"),
            make_row=gsm8k.make_single_turn_row,
        ),
        "geo3k": DataSet(
            summary="geometry with drawings (images)",
            files={split: f"{_GEOMETRY}/{split}-*.parquet" for split in ("train", "test")},
            required=("problem", "answer", "images"),
            make_row=geometry3k.make_row,
        ),
        "dapo_math": DataSet(
            summary="DAPO-Math-17k with code_interpreter; each question once",
            files={"train": "BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet"},
            required=("data_source", "prompt", "reward_model"),
            make_row=boxed_math.dapo_row,
            once=True,
        ),
        "aime": DataSet(
            summary="AIME 2024 and 2025 with code_interpreter, for validation",
            files={
                "aime_2024": "Maxwell-Jia/AIME_2024/aime_2024_problems.parquet",
                "aime_2025": "yentinglin/aime_2025/data/train-*.parquet",
            },
            required=(),
            make_row=boxed_math.aime_row,
            some=True,
        ),
        "retool_sft": DataSet(
            summary="ReTool's demonstrations with code_interpreter, for treadle sft",
            files={"train": "JoeYing/ReTool-SFT/data/train-*.parquet"},
            required=("messages",),
            make_row=retool_sft.make_row,
        ),
    }
)
"""By the name that the command takes."""
