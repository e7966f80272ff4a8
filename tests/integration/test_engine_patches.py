"""The torch engine takes over a delta by writing only what changed: no bit differs from a full load."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from astraflow.models.loading import host_tensor, torch_tensor
from astraflow.types import GenerateRequest, Manifest, Sampling
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.snapshot import model_files
from drivers.engine_models import make_engine_on, make_model_folder, make_random_model, snapshot_of
from drivers.weight_fakes import WeightRig, weight_rig

TOKENS = tuple(range(2, 40))


def first_version(folder: Path) -> list[HostTensor]:
    """Published in bfloat16; the engine computes in float32. The output head is tied."""
    snapshot = snapshot_of(make_random_model(), folder)
    return [host_tensor(t.name, torch_tensor(t).to(torch.bfloat16)) for t in snapshot.tensors]


def stepped(tensors: list[HostTensor], seed: int, share: float = 0.01) -> list[HostTensor]:
    """Some elements one step away; norms, which are small, stay as they are."""
    random = np.random.default_rng(seed)
    result: list[HostTensor] = []
    for tensor in tensors:
        words = tensor.data.view(np.uint16).copy()
        if len(tensor.shape) > 1:
            words += (random.random(words.size) < share).astype(np.uint16)
        result.append(replace(tensor, data=words.view(np.uint8)))
    return result


async def publish(rig: WeightRig, version: int, tensors: list[HostTensor]) -> Manifest:
    files = model_files(rig.folder / "model") if version == 0 else {}
    return await rig.client.publish("actor", version, tensors, files)


async def full_scores(tensors: list[HostTensor], folder: Path) -> bytes:
    """What an engine that loads the version whole says of `TOKENS`."""
    engine = make_engine_on(WeightSnapshot("actor", 0, tuple(tensors), folder))
    scores = (await engine.score(TOKENS)).tobytes()
    await engine.close()
    return scores


async def test_deltas_are_patched_into_the_engine_while_it_generates(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = make_model_folder(tmp_path / "model")
    tensors = first_version(folder)
    async with weight_rig(tmp_path, delta=True) as rig:
        engine = make_engine_on(await rig.receiver.fetch(await publish(rig, 0, tensors)), max_context=512)
        request = GenerateRequest(token_ids=(5, 9, 3), sampling=Sampling(max_tokens=400, top_k=1))
        running = asyncio.create_task(engine.generate(request))
        for version in range(1, 6):
            tensors = stepped(tensors, version)
            snapshot = await rig.receiver.fetch(await publish(rig, version, tensors))
            assert snapshot.changes is not None
            await engine.load(snapshot, slot="live")
            assert engine.num_patched == version
            del snapshot
            assert (await engine.score(TOKENS)).tobytes() == await full_scores(tensors, folder)
        await running
        await engine.close()


async def test_several_deltas_at_once_are_patched_and_a_gap_is_loaded_whole(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = make_model_folder(tmp_path / "model")
    tensors = first_version(folder)
    async with weight_rig(tmp_path, delta=True) as rig:
        first = await rig.receiver.fetch(await publish(rig, 0, tensors))
        engine, late = make_engine_on(first), make_engine_on(first)
        del first
        for version in (1, 2, 3):
            tensors = stepped(tensors, version)
            manifest = await publish(rig, version, tensors)
        snapshot = await rig.receiver.fetch(manifest)
        await engine.load(snapshot, slot="live")
        assert engine.num_patched == 1
        tensors = stepped(tensors, 4)
        del snapshot
        snapshot = await rig.receiver.fetch(await publish(rig, 4, tensors))
        for one, num_patched in ((engine, 2), (late, 0)):
            await one.load(snapshot, slot="live")
            assert one.num_patched == num_patched
            assert (await one.score(TOKENS)).tobytes() == await full_scores(tensors, folder)
            await one.close()


async def test_a_delta_that_touches_much_is_loaded_whole(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = make_model_folder(tmp_path / "model")
    tensors = first_version(folder)
    async with weight_rig(tmp_path, delta=True) as rig:
        engine = make_engine_on(await rig.receiver.fetch(await publish(rig, 0, tensors)))
        tensors = stepped(tensors, 1, share=0.2)
        manifest = await publish(rig, 1, tensors)
        assert manifest.kind == "delta"
        await engine.load(await rig.receiver.fetch(manifest), slot="live")
        assert engine.num_patched == 0
        assert (await engine.score(TOKENS)).tobytes() == await full_scores(tensors, folder)
        await engine.close()
