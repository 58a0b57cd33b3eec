"""The tables of docs/rows.md, docs/models.md and docs/metrics.md are what the code has."""

import re
from pathlib import Path

import pytest

from treadle.policy.backends.fsdp.model_types import IN_ROWS, PACKED
from treadle.policy.backends.fsdp.model_types import REFUSED as REFUSED_BY_FSDP
from treadle.policy.backends.megatron.architecture import ACCEPTED, MODEL_TYPES, REFUSED
from treadle.trainer.config.keys import all_leaves, all_sections
from treadle.trainer.data.dataset import REQUIRED_COLUMNS
from treadle.trainer.data.row import completed
from treadle.trainer.demo import MODELS

ROOT = Path(__file__).parents[2]


def table(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the page's table whose first heading this is, row by row."""
    text = (ROOT / "docs" / page).read_text()
    match = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    assert match is not None, f"{page} has no table {heading}"
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in match[1].splitlines()]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_required_columns_of_a_row_are_written() -> None:
    rows = {row[0].strip("`"): row[2] for row in table("rows.md", "column")}
    given = completed({"prompt": "Hi."}, Path("game.jsonl"))
    assert given == {
        "prompt": [{"role": "user", "content": "Hi."}],
        "data_source": "game",
        "reward_model": {},
    }
    assert {name for name, required in rows.items() if required == "yes"} == {"prompt"}
    for name in set(REQUIRED_COLUMNS) - {"prompt"}:
        assert rows[name].startswith("no: ")


def test_the_architectures_that_can_be_trained_are_written() -> None:
    assert [row[0].strip("`") for row in table("models.md", "`model_type`")] == list(MODEL_TYPES)
    values = {
        row[0].strip("`"): re.findall("`(.*?)`", row[1])
        for row in table("models.md", "in `config.json`")
    }
    engine = ROOT / "packages/rollout_server/treadle/rollout_server/engines/torch/model.py"
    served = re.search(r"_TEXT_TYPES = \((.*?)\n\)", engine.read_text(), re.DOTALL)
    assert served is not None
    seeing = re.search(r"_VISION_TYPES = \((.*?)\)", engine.read_text())
    assert seeing is not None
    assert re.findall(r'"(\w+)"', served[1] + seeing[1]) == list(MODEL_TYPES)
    values["attention_bias"] = values["attention_bias"][:1]  # then the types where it may be true
    assert values == {name: [str(v) for v in accepted] for name, accepted in ACCEPTED.items()}
    text = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in REFUSED if f"`{name}`" not in text] == []


def test_the_types_of_the_fsdp_backend_are_written() -> None:
    def types(cell: str) -> list[str]:
        return re.findall("`(.*?)`", cell)

    rows = table("models.md", "sequences")
    assert [types(row[1]) for row in rows] == [sorted(part) for part in (PACKED, IN_ROWS)]
    assert [re.findall(r"\d+", row[0]) for row in rows] == [[f"{len(PACKED)}"], [f"{len(IN_ROWS)}"]]
    refused = table("models.md", "why it is refused")
    assert {name: row[0] for row in refused for name in types(row[1])} == REFUSED_BY_FSDP


def test_the_models_that_ship_are_written() -> None:
    assert [row[0].strip("`") for row in table("models.md", "`model.path`")] == list(MODELS)


def test_a_metric_of_some_runs_is_in_the_sources() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## Only in some runs")[2]
    cells = "".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE))
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+)`", cells)}
    assert len(named) > 20
    files = [p for p in (ROOT / "packages").rglob("*.py") if not p.name.endswith("_test.py")]
    words = set(re.findall(r"[^\W_]+(?:_[^\W_]+)*", "".join(p.read_text() for p in files)))
    # The code adds these endings to a common name.
    stems = {re.sub(r"_(mean|p99|max|s)$", "", name) for name in named - words}
    assert stems - words == set()


@pytest.mark.parametrize(
    ("page", "least"),
    [("troubleshooting.md", 40), ("coming_from_trl.md", 25), ("coming_from_verifiers.md", 3)],
)
def test_a_page_names_keys_that_exist(page: str, least: int) -> None:
    code = _code_of(page)
    roots = {key.partition(".")[0] for key in all_leaves()}
    keys = {name for name in code if re.fullmatch(r"[a-z_]+(\.\w+)+", name)}
    keys = {re.sub(r"^(reward\.weights)\.\w+", r"\1", name) for name in keys}
    keys = {name for name in keys if name.partition(".")[0] in roots}
    assert len(keys) > least
    assert {key for key in keys if key not in all_leaves() and key not in all_sections()} == set()


def test_the_troubleshooting_page_names_metrics_that_exist() -> None:
    code = _code_of("troubleshooting.md")
    page = (ROOT / "docs" / "metrics.md").read_text()
    known = set(re.findall(r"`([a-z_]+/\w+)`", page))
    metrics = {name for name in code if re.fullmatch(r"[a-z_]+/\w+", name)}
    assert len(metrics) > 20
    assert {n for n in metrics - known if not n.startswith(("stop/", "findings/"))} == set()


def _code_of(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / page).read_text(), flags=re.M | re.S)
    return [name.partition("=")[0] for name in re.findall(r"`([^`]+)`", text)]


def test_the_links_within_the_troubleshooting_page_lead_to_headings() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^## (.+)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
