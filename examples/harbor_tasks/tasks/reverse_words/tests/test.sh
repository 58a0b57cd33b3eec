#!/bin/bash
python3 - <<'PY' > /logs/verifier/reward.json
import json, pathlib

file = pathlib.Path("/data/reversed.txt")
words = file.read_text().split() if file.exists() else []
right = sum(a == b for a, b in zip(words, ["three", "two", "one"], strict=False))
print(json.dumps({"reward": right / 3, "written": float(file.exists())}))
PY
