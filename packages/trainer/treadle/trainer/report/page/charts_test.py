import math
from itertools import pairwise

from treadle.trainer.report.metrics import Record
from treadle.trainer.report.page.charts import MORE, make_panels
from treadle.trainer.report.page.colours import hue, rgb


def names(records: list[Record]) -> dict[str, list[tuple[str, ...]]]:
    return {
        section: [tuple(series.name for series in panel.series) for panel in panels]
        for section, panels in make_panels(records).items()
    }


def test_every_measured_metric_is_in_one_panel() -> None:
    records: list[Record] = [
        {"step": 0, "val/reward": 0.5, "val/reward/mine": 0.5},
        {"step": 1, "reward/mean": -7.0, "reward/format": 0.5, "shop/orders": 3, "x": math.nan},
        {"step": 2, "reward/min": -9.0, "time/rollout_s": 1.0, "time/step_s": 2.0},
    ]
    assert names(records) == {
        "Reward": [("reward/mean", "reward/min"), ("val/reward", "val/reward/mine")],
        "Time": [("time/rollout_s", "time/step_s")],
        "Metrics of rewards": [("reward/format",)],
        MORE: [("shop/orders",)],
    }
    assert make_panels([]) == {}


def test_means_of_k_samples_share_a_panel_without_their_bounds() -> None:
    at = "val/openai/gsm8k/accuracy/maj@4"
    records: list[Record] = [{"step": 1, at: 0.5, f"{at}/low": 0.25, f"{at}/high": 0.75}]
    assert names(records) == {"Reward": [(at,)]}


def test_the_axes_follow_the_data() -> None:
    records: list[Record] = [{"step": s, "reward/mean": -8.4 + s / 10} for s in range(1, 5)]
    (panel,) = make_panels(records)["Reward"]
    assert all(-8.4 <= float(text) <= -8.0 for _, text in panel.y_ticks)
    assert len(panel.y_ticks) >= 2
    heights = [y for _, y in panel.series[0].dots]
    assert max(heights) - min(heights) > 100
    assert all(one > two for one, two in pairwise(heights))


def test_one_value_and_equal_values_are_drawn() -> None:
    for value in (0.0, 3.0, -1e-9):
        (panel,) = make_panels([{"step": 5, "reward/mean": value}])["Reward"]
        assert len(panel.series[0].dots) == 1
        assert panel.y_ticks


def test_a_long_series_is_drawn_by_the_means_of_parts() -> None:
    records: list[Record] = [{"step": step, "reward/mean": step % 2} for step in range(10_000)]
    (series,) = make_panels(records)["Reward"][0].series
    assert len(series.values) <= 300
    assert set(series.values) == {0.5}
    assert series.steps[-1] == 9_999


def test_a_colour_depends_on_the_name_alone() -> None:
    assert hue("shop/orders") == hue("shop/orders") != hue("shop/returns")
    assert all(0 <= part <= 1 for part in rgb("time/a_phase_s"))
    assert len({hue(f"time/{phase}_s") for phase in ("rollout", "train", "sync", "save")}) == 4


def test_shares_of_the_time_are_bars_on_top_of_each_other() -> None:
    records: list[Record] = [
        {"step": step, "servers/time_share/tools": tools, "servers/time_share/decode": 1 - tools}
        for step, tools in ((1, 0.25), (2, 0.75))
    ]
    (panel,) = make_panels(records)["Time"]
    decode, tools = panel.series
    assert (decode.name, decode.values) == ("servers/time_share/decode", (0.75, 0.25))
    outline = [tuple(map(float, point.split(","))) for point in decode.area.split()]
    left, middle, right = 52.0, 201.0, 350.0
    assert [x for x, _ in outline] == [left, middle, middle, right, right, middle, middle, left]
    assert [y for _, y in outline] == [47.0, 47.0, 121.0, 121.0, 158.0, 158.0, 158.0, 158.0]
    assert {float(point.split(",")[1]) for point in tools.area.split()[:4]} == {10.0}
    assert tools.area.split()[4:] == decode.area.split()[3::-1]
    (one,) = make_panels(records[:1])["Time"]
    assert {float(point.split(",")[0]) for point in one.series[0].area.split()} == {left, right}
