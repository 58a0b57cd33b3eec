"""The torch engine with a tiny Qwen2.5-VL, against transformers."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.conformance.contracts.image_contract import ImageContract
from treadle.conformance.contracts.reference import VisionReference
from treadle.rollout_server.engine import (
    Engine,
    EngineRequest,
    FinishReason,
    InFlightPolicy,
    PromptImage,
    Sampling,
)
from treadle.rollout_server.engines.images.reader import PlacedImage
from treadle.rollout_server.engines.torch import TorchEngine, core
from treadle.rollout_server.engines.torch.testing.text_model import (
    Output,
    collected,
    named_tensors,
    request,
    serving,
    weights_of,
)
from treadle.rollout_server.engines.torch.testing.vision_model import (
    PLACEHOLDER,
    picture,
    placed,
    write_vision_model,
)
from treadle.rollout_server.errors import ImageUnreadable, InvalidField, PlaceholderMismatch

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = Sampling(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
WIDE, TALL, SMALL = picture(48, 16, seed=1), picture(24, 40, seed=2), picture(16, 16, seed=3)
CONVERSATIONS: dict[str, list[int | bytes]] = {
    "text": [5, 6, 7, 8],
    "one": [5, 6, 58, WIDE, 57, 8, 9],
    "image first": [TALL, 7, 8, SMALL, 9],
    "the same twice": [5, SMALL, 7, SMALL, 8, WIDE, 9],
    "three": [5, 58, WIDE, 57, 6, 7, 58, TALL, 57, 8, 58, SMALL, 57, 9],
    "sampled placeholder": [5, 6, WIDE, 57, 8, PLACEHOLDER, PLACEHOLDER, 9],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision-0")
    write_vision_model(directory, 0)
    return directory


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision-1")
    write_vision_model(directory, 1)
    return directory


def asked(parts: Sequence[int | bytes], sampling: Sampling = SAMPLED) -> EngineRequest:
    ids, images = placed(parts)
    return request(ids, sampling, images=images)


async def run(engine: TorchEngine, wanted: EngineRequest) -> Output:
    return collected([event async for event in engine.generate(wanted)])


async def check(engine: TorchEngine, reference: VisionReference, wanted: EngineRequest) -> Output:
    """Runs a request, and compares its log-probs with transformers'."""
    output = await run(engine, wanted)
    expected = reference.logprobs(wanted.prompt, wanted.images, output.ids)
    assert output.logprobs == pytest.approx(expected, abs=1e-4)
    return output


def watch(engine: TorchEngine, seen: list[int]) -> None:
    """Notes the place of each image that the vision tower sees."""
    see = engine._model.encode_image

    def note(image: PlacedImage) -> torch.Tensor:
        seen.append(image.start)
        return see(image)

    engine._model.encode_image = note  # type: ignore[method-assign,assignment]


class TestTorchEngineSees(ImageContract):
    @pytest.fixture(autouse=True)
    def _model(self, path: Path) -> None:
        self._path = path

    @asynccontextmanager
    async def engine(self, weights: int = 0) -> AsyncIterator[Engine]:
        async with serving(self._path) as engine:
            yield engine

    def pictured(self, which: int) -> tuple[tuple[int, ...], PromptImage]:
        parts = [*range(4, 24), picture(48, 16, seed=which), *range(4, 44)]
        ids, images = placed(parts)
        return ids, images[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if "sampled" not in name])
async def test_greedy_tokens_are_those_of_generate(path: Path, name: str) -> None:
    wanted = asked(CONVERSATIONS[name], GREEDY)
    expected = VisionReference(path).greedy(wanted.prompt, wanted.images, 12)
    async with serving(path) as engine:
        assert (await run(engine, wanted)).ids == expected


@pytest.mark.asyncio
async def test_logprobs_are_those_of_transformers_in_one_batch(path: Path) -> None:
    reference = VisionReference(path)
    wanted = [asked(parts) for name, parts in CONVERSATIONS.items() if "sampled" not in name]
    async with serving(path) as engine:
        outputs = await asyncio.gather(*(check(engine, reference, one) for one in wanted))
    assert len({tuple(output.ids) for output in outputs}) == len(wanted)


@pytest.mark.asyncio
async def test_a_placeholder_that_the_model_sampled_is_text(path: Path) -> None:
    async with serving(path) as engine:
        output = await run(engine, asked(CONVERSATIONS["sampled placeholder"]))
        bare = await run(engine, request([5, 6, PLACEHOLDER, 7], SAMPLED))
    assert len(output.ids) == len(bare.ids) == 12


@pytest.mark.asyncio
async def test_images_of_later_turns_go_on_from_the_prefix(path: Path) -> None:
    reference = VisionReference(path)
    parts: list[int | bytes] = [5, 6, 58, WIDE, 57, 8, 9]
    read = 0
    async with serving(path) as engine:
        for image in (TALL, SMALL, WIDE):
            wanted = asked(parts)
            output = await check(engine, reference, wanted)
            assert output.cached >= read
            read = len(wanted.prompt)
            parts += [*output.ids, 58, image, 57, 7]
        await check(engine, reference, asked(parts))


@pytest.mark.asyncio
async def test_an_image_that_steps_read_in_parts_is_seen_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_STEP_TOKENS", 8)
    seen: list[int] = []
    async with serving(path, prefix_cache_bytes=0) as engine:
        watch(engine, seen)
        await check(engine, VisionReference(path), asked(CONVERSATIONS["three"]))
    assert seen == [2, 18, 36]


@pytest.mark.asyncio
async def test_samples_of_one_prompt_see_its_images_once(path: Path) -> None:
    seen: list[int] = []
    parts = [*range(4, 44), WIDE, 57, 8]
    async with serving(path) as engine:
        watch(engine, seen)
        sampling = [Sampling(max_tokens=4, seed=seed) for seed in range(8)]
        await asyncio.gather(*(run(engine, asked(parts, one)) for one in sampling))
    assert seen == [40]


@pytest.mark.asyncio
async def test_a_prompt_that_ends_with_an_image_reads_its_last_id_again(path: Path) -> None:
    reference = VisionReference(path)
    wanted = asked([*range(4, 44), TALL])
    async with serving(path) as engine:
        first = await check(engine, reference, wanted)
        second = await check(engine, reference, wanted)
    assert (first.cached, second.cached) == (0, len(wanted.prompt) - 1)


@pytest.mark.asyncio
async def test_new_weights_reach_the_vision_tower(path: Path, other_path: Path) -> None:
    wanted = asked(CONVERSATIONS["three"])
    async with serving(path) as engine:
        names = {spec.name for spec in engine.info.parameters or ()}
        assert names == {tensor.spec.name for tensor in named_tensors(path)}
        old = await check(engine, VisionReference(path), wanted)
        await engine.pause(InFlightPolicy.DRAIN)
        tower = {
            tensor.spec.name: torch.frombuffer(tensor.data, dtype=torch.float32).view(
                tensor.spec.shape
            )
            for tensor in named_tensors(path)
            if not tensor.spec.name.startswith("visual.")
        }
        await engine.load_weights(weights_of(other_path, **tower), version=1)
        await engine.resume()
        mixed = await run(engine, wanted)
        await engine.pause(InFlightPolicy.DRAIN)
        await engine.load_weights(weights_of(other_path), version=2)
        await engine.resume()
        new = await check(engine, VisionReference(other_path), wanted)
    assert old.logprobs != mixed.logprobs != new.logprobs
    assert new.cached == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["jpeg", "webp"])
async def test_other_formats_are_read(path: Path, kind: str) -> None:
    ids, images = placed([5, picture(48, 16, kind=kind), 6], media_type=f"image/{kind}")
    async with serving(path) as engine:
        await check(engine, VisionReference(path), request(ids, SAMPLED, images=images))


@pytest.mark.asyncio
async def test_what_does_not_fit_is_refused_and_the_engine_goes_on(path: Path) -> None:
    ids, (image,) = placed([5, WIDE, 6])
    cut = PromptImage(
        data=WIDE[:-60], media_type="image/png", start=image.start, num_tokens=image.num_tokens
    )
    jpeg = PromptImage(data=WIDE, media_type="image/jpeg", start=1, num_tokens=12)
    short = PromptImage(data=WIDE, media_type="image/png", start=1, num_tokens=11)
    async with serving(path) as engine:
        with pytest.raises(ImageUnreadable, match=r"images\[0\] cannot be read as image/png: "):
            await run(engine, request(ids, images=(cut,)))
        with pytest.raises(ImageUnreadable, match="cannot be read as image/jpeg"):
            await run(engine, request(ids, images=(jpeg,)))
        with pytest.raises(PlaceholderMismatch, match=r"11 placeholder ids at 1 .* makes 12"):
            await run(engine, request(ids, images=(short,)))
        with pytest.raises(InvalidField, match=r"prompt_token_ids\[1\] is 7, expected 60"):
            await run(engine, request((5, *[7] * 12, 6), images=(image,)))
        await check(engine, VisionReference(path), request(ids, SAMPLED, images=(image,)))
        assert engine.counters.started == engine.counters.finished == 1


class HeldDecoder:
    """Makes an engine's reader wait before it decodes."""

    def __init__(self, engine: TorchEngine) -> None:
        reader = engine._model.images
        assert reader is not None
        self._decode = reader._decode
        self._begun, self._go_on = threading.Event(), threading.Event()
        reader._decode = self  # type: ignore[method-assign]

    def __call__(self, image: PromptImage) -> torch.Tensor:
        self._begun.set()
        assert self._go_on.wait(60)
        return self._decode(image)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 60)

    def go_on(self) -> None:
        self._go_on.set()


@pytest.mark.asyncio
async def test_the_engine_runs_while_an_image_is_read(path: Path) -> None:
    async with serving(path) as engine:
        held = HeldDecoder(engine)
        slow = asyncio.create_task(run(engine, asked(CONVERSATIONS["one"])))
        await held.begun()
        assert len((await run(engine, asked(CONVERSATIONS["text"]))).ids) == 12
        held.go_on()
        assert len((await slow).ids) == 12


@pytest.mark.asyncio
async def test_only_prompts_with_images_are_laid_out_on_a_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(path) as engine:
        make, on_the_loop = engine._core.new_sequence, list[bool]()

        def note(*arguments: Any) -> Any:
            on_the_loop.append(threading.current_thread() is threading.main_thread())
            return make(*arguments)

        monkeypatch.setattr(engine._core, "new_sequence", note)
        for name in ("text", "one"):
            await run(engine, asked(CONVERSATIONS[name]))
    assert on_the_loop == [True, False]


@pytest.mark.asyncio
async def test_a_sequence_may_go_while_its_images_are_read(path: Path) -> None:
    async with serving(path) as engine:
        held = HeldDecoder(engine)
        gone = asyncio.create_task(run(engine, asked(CONVERSATIONS["one"])))
        await held.begun()
        gone.cancel()
        await asyncio.wait({gone})
        held.go_on()
        await engine.pause(InFlightPolicy.DRAIN)
        assert gone.cancelled() and engine.counters.started == 0


@pytest.mark.asyncio
async def test_new_weights_do_not_wait_for_images_and_sample_what_reads_them(
    path: Path, other_path: Path
) -> None:
    wanted = asked(CONVERSATIONS["one"])
    async with serving(path) as engine:
        held = HeldDecoder(engine)
        reading = asyncio.create_task(run(engine, wanted))
        await held.begun()
        await engine.pause(InFlightPolicy.DRAIN)
        await engine.load_weights(weights_of(other_path), version=1)
        await engine.resume()
        held.go_on()
        output = await reading
    expected = VisionReference(other_path).logprobs(wanted.prompt, wanted.images, output.ids)
    assert output.logprobs == pytest.approx(expected, abs=1e-4)
    assert set(output.versions) == {1}


@pytest.mark.asyncio
async def test_closing_ends_a_sequence_whose_images_are_read(path: Path) -> None:
    async with serving(path) as engine:
        held = HeldDecoder(engine)
        reading = asyncio.create_task(run(engine, asked(CONVERSATIONS["one"])))
        await held.begun()
        await engine.aclose()
        held.go_on()
        output = await reading
    assert (output.ids, output.reason) == ([], FinishReason.INTERRUPTED)


def publish(source: Path, target: Path) -> None:
    """Copies a model with the configuration files that Qwen2.5-VL was published with."""
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {
        **{key: text[key] for key in text if key not in ("model_type", "layer_types")},
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "vision_config": {
            key: value
            for key, value in config["vision_config"].items()
            if key not in ("model_type", "rope_parameters")
        },
    }
    (target / "config.json").write_text(json.dumps(flat))
    processor = json.loads((source / "preprocessor_config.json").read_text())
    size = processor.pop("size")
    processor |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (target / "preprocessor_config.json").write_text(json.dumps(processor))
    shutil.copy(source / "model.safetensors", target)


@pytest.mark.asyncio
async def test_the_files_of_published_checkpoints_are_read(path: Path, tmp_path: Path) -> None:
    publish(path, tmp_path)
    async with serving(tmp_path) as engine:
        assert engine.info.model.architecture == "Qwen2_5_VLForConditionalGeneration"
        assert (engine.info.model.vocab_size, engine.info.model.context_length) == (64, 1024)
        await check(engine, VisionReference(path), asked(CONVERSATIONS["three"]))


@pytest.mark.asyncio
async def test_a_model_without_its_image_processor_is_refused(path: Path, tmp_path: Path) -> None:
    publish(path, tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no preprocessor_config\.json: copy"):
        async with serving(tmp_path):
            pass


@pytest.mark.asyncio
async def test_processor_and_tower_must_cut_alike(tmp_path: Path) -> None:
    write_vision_model(tmp_path, 0, patch_size=8)
    with pytest.raises(ValueError, match=r"merge sizes \(4, 2, 2\) .* \(8, 2, 2\)"):
        async with serving(tmp_path):
            pass
