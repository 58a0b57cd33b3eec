"""Trains a tiny random model of each family of this year, end to end; prints a table of them.

    ./pants run tests/e2e/families.py -- DATA --folder FOLDER [--only NAME ...]

DATA holds `chat_templates/*.jinja` and `tokenizers/tiny`. Of each family a tiny random model is
made, with its own chat template and the tokens of that. `treadle sft` teaches it to call the
calculator as the template writes it, by which its own parser is tried; three steps of GRPO follow,
with the tool loop, the torch engine and `policy.backend=fsdp`. The last rows of the table are other
settings of such a run. Exits with 1 when a run failed, or server and policy differ by more than
1e-4 nats in a token.
"""

import argparse
import json
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sft.make_conversations import conversations

from chat_templates.table import make_tokenizer
from treadle.agent_loop.parsers import parser_for_template
from treadle.policy.testing.any_model import write_any
from treadle.policy.testing.quantised import FP8, MXFP4, quantise
from treadle.trainer.demo import DEMO

from .seeing import REWARD, write_rows, write_seeing_model
from .testing import SMALL, Trainer

__all__ = ["CASES", "LARGEST", "Case", "Outcome", "run_case"]

LARGEST: Final = 1e-4
"""Nats by which server and policy may differ in a token."""
_STEPS, _ROWS = 100, 4
_THINKING: Final = ("agent.template_kwargs.enable_thinking=true",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the table.

    Attributes:
        template: Name of the template's file; None where a model sees, and has its own.
        quantised: How the weights are stored that both are given; None: whole.
        thinks: Whether the model is taught to think before the call, as the template opens.
        settings: Further settings of the run.
    """

    name: str
    model_type: str
    template: str | None
    thinks: bool = False
    settings: Sequence[str] = ()
    quantised: Mapping[str, Any] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)


# Where DeepSeek V4 leaves positions out, the engine may choose others (docs/models.md).
_V4: Final = {"index_topk": 256}
CASES: Final = (
    Case(name="Qwen3.5", model_type="qwen3_5_text", template="Qwen3.5-4B"),
    Case(name="Qwen3-Next", model_type="qwen3_next", template="Qwen-Qwen3-0.6B"),
    Case(
        name="DeepSeek V3",
        model_type="deepseek_v3",
        template="deepseek-ai-DeepSeek-V3.2",
        thinks=True,
    ),
    Case(
        name="DeepSeek V4",
        model_type="deepseek_v4",
        template="deepseek-ai-DeepSeek-V4",
        sizes=_V4,
    ),
    Case(name="GLM-4.5", model_type="glm4_moe", template="GLM-4.6"),
    Case(name="Kimi K2", model_type="deepseek_v3", template="moonshotai-Kimi-K2"),
    Case(name="gpt-oss", model_type="gpt_oss", template="openai-gpt-oss-120b"),
    Case(name="Gemma 4", model_type="gemma4_text", template="google-gemma-4-31B-it", thinks=True),
    Case(
        name="Nemotron 3",
        model_type="nemotron_h",
        template="NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        thinks=True,
    ),
    Case(name="MiniMax M2", model_type="minimax_m2", template="MiniMax-M2", thinks=True),
    Case(name="images, Qwen2.5-VL", model_type="qwen2_5_vl", template=None),
    Case(
        name="images, Qwen3-VL, tower trained",
        model_type="qwen3_vl",
        template=None,
        settings=("policy.freeze_vision_tower=false",),
    ),
    Case(
        name="Muon, two ranks",
        model_type="glm4_moe",
        template="GLM-4.6",
        settings=("policy.optimizer.name=muon", "policy.parallel.data=2"),
    ),
    Case(
        name="FP8 base",
        model_type="minimax_m2",
        template="MiniMax-M2",
        thinks=True,
        quantised=FP8,
    ),
    Case(
        name="MXFP4 base",
        model_type="gpt_oss",
        template="openai-gpt-oss-120b",
        quantised=MXFP4,
    ),
)
_REINFORCED: Final = (
    *("policy.backend=fsdp", "policy.optimizer.lr=1e-3", "algorithm.entropy_coef=0.01"),
    *("policy.optimizer.warmup_steps=0", "algorithm.kl_coef=0.01"),
    *("schedule.val_every=null", "schedule.val_before_train=false", "schedule.total_steps=3"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run.

    Attributes:
        parser: The parser that was found by the template.
        difference: Largest difference of a log-probability, in nats, over all steps.
        mean: The largest of the steps' mean differences.
        called: Share of the trajectories that called a tool.
    """

    parser: str
    difference: float
    mean: float
    called: float

    @property
    def agrees(self) -> bool:
        """Whether server and policy do."""
        return self.difference <= LARGEST


def run_case(case: Case, data: Path, folder: Path) -> Outcome:
    """Makes the model, teaches it to call a tool, and runs three steps of GRPO.

    Args:
        data: Holds the templates and the tokenizer.
        folder: Empty; what is made stays there.

    Raises:
        AssertionError: A process of a run failed; the message is what it wrote.
    """
    model = folder / "model"
    parser = "none"
    if case.template is None:
        settings = _of_images(case, folder)
    else:
        text = (data / "chat_templates" / f"{case.template}.jinja").read_text(encoding="utf-8")
        parser = parser_for_template(text) or "none"
        _write_model(case, make_tokenizer(data / "tokenizers/tiny", case.template, text), model)
        told = _THINKING if case.thinks and "enable_thinking" in text else ()
        taught = _teach(folder, *told, thinks=case.thinks)
        if case.quantised is not None:
            quantise(taught, case.quantised)
        rows = (DEMO.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()[:_ROWS]
        (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
        settings = (
            *(f"--config={DEMO}", f"model.path={taught}", *told),
            *(f"data.train_files={folder / 'rows.jsonl'}", "rollout.prompt_length=800"),
            "rollout.response_length=160",
        )
    run = _run(folder / "run", *settings, *SMALL, *_REINFORCED, *case.settings)
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3], run.output
    assert not any(line["rollout/num_failed"] for line in lines), run.output
    return Outcome(
        parser=parser,
        difference=max(line["rollout/logprob_diff_max"] for line in lines),
        mean=max(line["rollout/logprob_diff_mean"] for line in lines),
        called=sum(line.get("tool/call_rate", 0.0) for line in lines) / len(lines),
    )


def _of_images(case: Case, folder: Path) -> Sequence[str]:
    write_seeing_model(folder / "model", case.model_type)
    for name in ("train", "val"):
        write_rows(folder / f"{name}.parquet", 8)
    (folder / "reward.py").write_text(REWARD)
    return (
        f"model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"reward.name={folder / 'reward.py'}:score",
        *("rollout.prompt_length=100", "rollout.response_length=12"),
    )


def _write_model(case: Case, tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    vocabulary = 64 * (len(tokenizer) // 64 + 1)  # blocks of quantised weights are of 16 and 32
    write_any(
        folder,
        case.model_type,
        vocab_size=vocabulary,
        vocab_size_per_layer_input=vocabulary,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        **case.sizes,
    )


def _teach(folder: Path, *settings: str, thinks: bool) -> Path:
    """Has the model imitate calls of the tool; returns the folder of the trained model."""
    rows: list[Any] = list(conversations("train", _ROWS))
    for row in rows:
        row["messages"] = row["messages"][:-2]  # to the call
        if thinks:
            row["messages"][-1]["reasoning_content"] = "I compute."
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    _run(
        folder / "sft",
        f"model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.jsonl'}",
        *(f"data.batch_size={_ROWS}", f"schedule.total_steps={_STEPS}", "data.max_length=1024"),
        *("policy.backend=fsdp", "policy.optimizer.lr=5e-3", "launch.policy_threads=1"),
        *settings,
        command=("sft",),
    )
    taught = folder / "taught"
    weights = sorted((folder / "sft" / "checkpoints").glob("step-*/hf"))[-1]
    shutil.copytree(weights, taught)
    return taught


def _run(run_dir: Path, *arguments: str, command: Sequence[str] = ()) -> Trainer:
    trainer = Trainer(run_dir, arguments, command=command)
    try:
        assert trainer.wait() == 0, trainer.output
        return trainer
    finally:
        trainer.process.kill()
        trainer.process.wait()


def _rows(cases: Sequence[Case], data: Path, folder: Path) -> Iterator[tuple[bool, str]]:
    """Yields whether a case is well, and its row."""
    for case in cases:
        place = folder / case.name.lower().replace(" ", "_").replace(",", "")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        head = f"| {case.name} | `{case.model_type}` | {case.template or 'its own'} "
        try:
            outcome = run_case(case, data, place)
        except Exception:
            traceback.print_exc()
            yield False, f"{head}| failed | | | |"
            continue
        yield (
            outcome.agrees,
            f"{head}| {outcome.parser} | {outcome.called:.2f} | {outcome.difference:.1e} "
            f"| {outcome.mean:.1e} |",
        )


def main() -> int:
    """Prints the table; returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--only", nargs="+", metavar="NAME", help="these rows")
    arguments.add_argument("--folder", type=Path, required=True, help="for models and runs")
    options = arguments.parse_args()
    cases = [case for case in CASES if not options.only or case.name in options.only]
    heads = "| | `model_type` | template | parser | calls | largest | mean |"
    sys.stdout.write(f"{heads}\n{'|---' * (heads.count('|') - 1)}|\n")
    all_well = True
    for is_well, row in _rows(cases, options.data, options.folder.absolute()):
        all_well &= is_well
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
