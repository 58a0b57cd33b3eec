"""Tinker's SDK as the client of `serve_overhead`: it samples, one line of standard input at a time.

Runs in an environment with the SDK and without Treadle. Each line is a number of samples and how
many a request asks for; the answer is JSON, {"s": seconds, "cpu_s": seconds of this process}.
"""

import argparse
import asyncio
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

warnings.simplefilter("ignore")  # 0.38 has other names for some calls, which 0.36 does not have

import tinker  # noqa: E402
from tinker import types  # noqa: E402


async def _sample(
    client: Any, settings: Mapping[str, Any], count: int, group: int
) -> Mapping[str, float]:
    prompt = types.ModelInput.from_ints(settings["prompt"])
    params = types.SamplingParams(max_tokens=settings["tokens"], temperature=1.0, stop=[])
    requests = iter(range(count // group))

    async def ask(numbers: Iterator[int]) -> None:
        for _ in numbers:
            await client.sample_async(prompt=prompt, num_samples=group, sampling_params=params)

    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask(requests) for _ in range(settings["in_flight"] // group)))
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - used}


async def main() -> None:
    """Answers lines until they end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads)
    settings = parser.parse_args().settings
    service = tinker.ServiceClient(base_url=settings["address"], api_key=settings["key"])
    client = await service.create_sampling_client_async(base_model=settings["model"])
    print(json.dumps({}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        count, group = map(int, line.split())
        print(json.dumps(await _sample(client, settings, count, group)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
