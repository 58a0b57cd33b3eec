"""A Hub with what the seeds' commands download: models without weights, and a few rows of each set.

The models have the real sizes and a small tokenizer: a dry run reads both, and no weights.
"""

import hashlib
import io
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from e2e.seeing import TEMPLATE
from treadle.trainer.demo import DEMO

__all__ = ["served_hub"]

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_QWEN = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "vocab_size", "tie_word_embeddings")  # fmt: skip
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-3B-Instruct": {
        "model_type": "qwen2",
        **dict(zip(_SIZES, (2048, 11008, 36, 16, 2, 151936, True), strict=True)),
    },
    "Qwen/Qwen2-7B-Instruct": {
        "model_type": "qwen2",
        **dict(zip(_SIZES, (3584, 18944, 28, 28, 4, 152064, False), strict=True)),
    },
    "font-info/qwen3-4b-sft": {
        "model_type": "qwen3",
        "head_dim": 128,
        "max_position_embeddings": 262144,
        **dict(zip(_SIZES, (2560, 9728, 36, 32, 8, 151936, True), strict=True)),
    },
    "Qwen/Qwen2.5-32B-Instruct": {
        "model_type": "qwen2",
        **dict(zip(_SIZES, (5120, 27648, 64, 40, 8, 152064, False), strict=True)),
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **dict(zip(_SIZES, (3584, 18944, 28, 28, 4, 152064, False), strict=True)),
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}
_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _model(name: str, config: Mapping[str, Any]) -> dict[str, bytes]:
    folder = DEMO.parent / "model"
    files = {file: (folder / file).read_bytes() for file in _TOKENIZER}
    settings = _QWEN | dict(config)
    if "vision_config" in config:
        tokenizer = json.loads(files["tokenizer.json"])
        added = tokenizer["added_tokens"]
        place = max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in added)) + 1
        added.append({**added[0], "id": place, "content": "<|image_pad|>"})
        settings["image_token_id"] = place
        files |= {
            "tokenizer.json": json.dumps(tokenizer).encode(),
            "chat_template.jinja": TEMPLATE.replace("<|vision_start|>", "")
            .replace("<|vision_end|>", "")
            .encode(),
            "preprocessor_config.json": json.dumps(_IMAGES).encode(),
        }
    return files | {"config.json": json.dumps(settings).encode()}


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), written)
    return written.getvalue()


def _gsm8k(count: int) -> bytes:
    """Questions with the answers' form, enough of them for a step of the largest batch."""
    return _parquet(
        [
            {"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1:,}"}
            for n in range(count)
        ]
    )


def _geometry(count: int) -> bytes:
    from PIL import Image

    drawing = io.BytesIO()
    Image.new("RGB", (56, 56), "white").save(drawing, "PNG")
    images = [{"bytes": drawing.getvalue(), "path": None}]
    return _parquet(
        [{"problem": f"<image>Find {n}.", "answer": str(n), "images": images} for n in range(count)]
    )


def _dapo(count: int) -> bytes:
    return _parquet(
        [
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": f"Compute {n} squared."}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(n * n), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": str(n)},
            }
            for n in range(count)
        ]
    )


def _retool(count: int) -> bytes:
    answer = "I compute.\n<code>\n```python\nprint(6 * 7)\n```\n</code>\n<interpreter>\n42\n"
    answer += "</interpreter>\n<answer>\n\\boxed{42}\n</answer>"
    messages = [
        {"role": "user", "content": "Solve it.\n*user question:*\nWhat is 6 times 7?"},
        {"role": "assistant", "content": answer},
    ]
    return _parquet([{"messages": messages}] * count)


def _repositories() -> dict[str, dict[str, bytes]]:
    part = "00000-of-00001.parquet"
    aime = [{"ID": f"2024-I-{n}", "Problem": f"Find {n}.", "Answer": n} for n in range(1, 31)]
    return {
        **{f"models/{name}": _model(name, config) for name, config in _MODELS.items()},
        "datasets/openai/gsm8k": {
            f"main/train-{part}": _gsm8k(1024),
            f"main/test-{part}": _gsm8k(8),
        },
        "datasets/hiyouga/geometry3k": {
            f"data/train-{part}": _geometry(512),
            f"data/test-{part}": _geometry(4),
        },
        "datasets/BytedTsinghua-SIA/DAPO-Math-17k": {"data/dapo-math-17k.parquet": _dapo(64)},
        "datasets/Maxwell-Jia/AIME_2024": {
            "aime_2024_problems.parquet": _parquet(aime),
            "README.md": b"# AIME 2024",
        },
        "datasets/JoeYing/ReTool-SFT": {f"data/train-{part}": _retool(32)},
    }


class _Hub(BaseHTTPRequestHandler):
    """The part of the Hub's protocol that huggingface_hub and `hf download` use."""

    repositories: Mapping[str, Mapping[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(self.path.partition("?")[0]).removeprefix("/")
        for repo, files in self.repositories.items():
            where = repo.removeprefix("models/")
            if path.startswith((f"api/{repo}/", f"api/{repo}")) and (
                path == f"api/{repo}" or path[len(f"api/{repo}")] == "/"
            ):
                return self._send(200, {}, _listing(repo, files, path), body=body)
            if path.startswith(f"{where}/resolve/"):
                name = path.split("/", where.count("/") + 3)[-1]
                if name not in files:
                    return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", body=body)
                etag = hashlib.sha1(files[name]).hexdigest()
                head = {"ETag": f'"{etag}"', "X-Repo-Commit": _COMMIT}
                return self._send(200, head, files[name], body=body)
        return self._send(401, {"X-Error-Code": "RepoNotFound"}, b"", body=body)

    def _send(self, status: int, head: Mapping[str, str], content: bytes, *, body: bool) -> None:
        self.send_response(status)
        for key, value in head.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _listing(repo: str, files: Mapping[str, bytes], path: str) -> bytes:
    listed = [
        {
            "rfilename": name,
            "path": name,
            "type": "file",
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }
        for name, content in files.items()
    ]
    info = {"id": repo.partition("/")[2], "sha": _COMMIT, "siblings": listed}
    return json.dumps(listed if "/tree/" in path else info).encode()


@contextmanager
def served_hub() -> Iterator[str]:
    """Serves it; gives the address for `HF_ENDPOINT` (and for Weave, which only has to answer)."""
    _Hub.repositories = _repositories()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
