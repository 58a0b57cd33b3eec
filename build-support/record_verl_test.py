import json
import zipfile
from pathlib import Path

import record_verl


def test_a_record_has_the_defaults_of_every_engine(tmp_path: Path) -> None:
    wheel = tmp_path / "verl-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for number, name in enumerate(record_verl.ENGINES):
            content = f"a: {{b: {number // 2}, c: false, d: {{}}}}\ne{number}: [1, x]\n"
            archive.writestr(f"verl/trainer/config/{name}", content)
    defaults = record_verl.record(wheel)
    assert defaults == {
        "a.b": [0, 1],
        "a.c": [False],
        "a.d": [{}],
        **{f"e{number}": [[1, "x"]] for number in range(4)},
    }
    assert json.loads(record_verl.written("1.2", defaults)) == {
        "about": record_verl.ABOUT,
        "version": "1.2",
        "defaults": defaults,
    }
