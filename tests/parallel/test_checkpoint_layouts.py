"""Several ranks: what any layout saves, any other loads, to the bit; an error on one rank is the same error on all."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from pyfast.nn.layout import Layout, Shard, get_layout, set_layout
from pyfast.parallel import ParallelConfig, ParallelMesh
from pyfast.parallel.checkpoint import CheckpointState, latest, load, read_metadata, save

# Sizes that no number of ranks divides, blocks smaller than the number of ranks, a replicated and a 0-dimensional one.
LAYOUTS = {
    "embedding.weight": Layout((53, 8), (Shard("tp", 0, (53,)),)),
    "layers.0.attention.qkv.weight": Layout((10, 8), (Shard("tp", 0, (6, 2, 2)),)),
    "layers.0.attention.output.weight": Layout((8, 6), (Shard("tp", 1, (6,)),)),
    "layers.0.ffn.gate_up.weight": Layout((14, 8), (Shard("tp", 0, (7, 7)),)),
    "layers.0.ffn.both.weight": Layout((5, 9), (Shard("tp", 0, (5,)), Shard("dp", 1, (4, 5)))),
    "one.bias": Layout((1,), (Shard("tp", 0, (1,)),)),
    "empty": Layout((0, 4), (Shard("tp", 1, (4,)),)),
    "norm.weight": Layout((8,)),
    "scale": Layout(()),
}
SCALARS = {"step": 3, "data": {"position": [1, 2]}, "generator": torch.arange(5, dtype=torch.uint8)}


def full_tensor(name, kind, dtype):
    generator = torch.Generator().manual_seed(sum(map(ord, name + kind)))
    return torch.randn(LAYOUTS[name].shape, generator=generator).to(dtype)


def make_state(mesh, blank, low_precision=True):
    """bfloat16 parameters with masters, two moments and a counter without dimensions, in the layout of `mesh`."""

    def local(name, kind, dtype):
        value = LAYOUTS[name].shard(full_tensor(name, kind, dtype), mesh)
        return torch.full_like(value, 7) if blank else value

    masters = {name: local(name, "weight", torch.float32) for name in LAYOUTS}
    parameters = {name: (m.bfloat16() if low_precision else m).requires_grad_() for name, m in masters.items()}
    for name, parameter in parameters.items():
        set_layout(parameter, LAYOUTS[name])
    optimizer = {"master": masters} if low_precision else {}
    for kind, dtype in (("exp_avg", torch.float32), ("exp_avg_sq", torch.float64)):
        optimizer[kind] = {name: local(name, kind, dtype) for name in LAYOUTS}
    optimizer["counter"] = {name: torch.tensor(0 if blank else 11) for name in LAYOUTS}
    return CheckpointState(parameters, optimizer, {} if blank else dict(SCALARS))


def check_equal(state, expected):
    pairs = [(n, t, expected.model_parameters[n]) for n, t in state.model_parameters.items()]
    for kind, tensors in state.optimizer_state.items():
        pairs += [(f"{kind} {n}", t, expected.optimizer_state[kind][n]) for n, t in tensors.items()]
    for name, got, wanted in pairs:
        assert got.dtype == wanted.dtype and torch.equal(got.detach(), wanted.detach()), name
    assert state.scalars.keys() == SCALARS.keys() and state.scalars["data"] == SCALARS["data"]
    assert torch.equal(state.scalars["generator"], SCALARS["generator"])


def load_all_and_save(rank, world_size, directory, visit, tensor_sizes):
    """Under each layout of this world: load every checkpoint there is, compare, and save one more."""
    directory = Path(directory)
    present = sorted(path for path in directory.iterdir() if path.is_dir())
    for tensor in tensor_sizes:
        mesh = ParallelMesh.create(ParallelConfig(tensor=tensor), rank=rank, world_size=world_size)
        expected = make_state(mesh, blank=False)
        for path in present:
            state = make_state(mesh, blank=True)
            load(path, state, mesh)
            check_equal(state, expected)
        save(directory / f"{visit}-tp{tensor}", 3, expected, mesh)
    return len(present)


def test_every_layout_loads_what_every_other_saved(ranks, tmp_path):
    # Each world loads what all before it saved and saves under its own layouts; the last visits load everything.
    visits = [("a", 1, [1]), ("b", 4, [1, 2, 4]), ("c", 2, [1, 2]), ("d", 3, [1, 3]), ("e", 4, [4, 2]), ("f", 1, [1])]
    loaded = [ranks.run(load_all_and_save, world, str(tmp_path), name, sizes)[0] for name, world, sizes in visits]
    assert loaded == [0, 1, 4, 6, 8, 10]


def test_a_checkpoint_says_how_it_was_cut_and_holds_everything_once(ranks, tmp_path):
    ranks.run(load_all_and_save, 4, str(tmp_path), "run", [2])
    path = latest(tmp_path / "run-tp2")
    metadata = read_metadata(path)
    assert metadata.mesh == {"world": 4, "tp": 2, "cp": 1, "pp": 1, "dp": 2}
    qkv = metadata.tensors["model.layers.0.attention.qkv.weight"]
    assert qkv.layout == [{"mesh_dim": "tp", "dim": 0, "parts": [6, 2, 2]}] and qkv.dtype == torch.float32
    boxes = sorted((chunk.offset[0], chunk.shape[0]) for chunk in qkv.chunks)
    assert boxes == [(0, 3), (3, 3), (6, 1), (7, 1), (8, 1), (9, 1)]
    # Nothing twice: the bytes on disk are those of one copy, give or take headers; and all ranks write a fair share.
    once = sum(r.dtype.itemsize * torch.Size(r.shape).numel() for r in metadata.tensors.values())
    sizes = [file.size for file in metadata.files]
    headers = sum(int.from_bytes((path / file.name).read_bytes()[:8], "little") + 8 for file in metadata.files)
    assert sum(sizes) - headers == once
    assert len(sizes) == 4 and max(sizes) < 2 * min(sizes)


def load_float32(rank, world_size, directory):
    mesh = ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size)
    state = make_state(mesh, blank=True, low_precision=False)
    load(directory, state, mesh)
    check_equal(state, make_state(mesh, blank=False, low_precision=False))


def test_a_bfloat16_run_resumes_in_float32_under_another_layout(ranks, tmp_path):
    ranks.run(load_all_and_save, 1, str(tmp_path), "run", [1])
    ranks.run(load_float32, 2, str(tmp_path / "run-tp1"))


def own_names(rank, world_size, directory):
    """Each rank holds parameters of its own, as pipeline stages do, beside one that all hold."""
    mesh = ParallelMesh.create(ParallelConfig(data=world_size), rank=rank, world_size=world_size)
    mine = [0, 1, 2, 3][rank::world_size]
    state = CheckpointState({f"layers.{i}": torch.full((3,), float(i)) for i in mine} | {"all": torch.ones(2)})
    path = save(Path(directory) / str(world_size), 1, state, mesh)
    for other in sorted(Path(directory).iterdir()):
        target = CheckpointState({name: torch.zeros_like(t) for name, t in state.model_parameters.items()})
        load(other, target, mesh)
        assert all(torch.equal(target.model_parameters[n], t) for n, t in state.model_parameters.items())
    return sorted(read_metadata(path).tensors)


def test_ranks_may_hold_different_parameters(ranks, tmp_path):
    names = ["model.all", *(f"model.layers.{i}" for i in range(4))]
    for world_size in (2, 1, 4, 3):
        assert ranks.run(own_names, world_size, str(tmp_path)) == [names] * world_size


# --------------------------------------------------------------------------------------------------------- errors


def tiny_state(mesh, fill):
    parameter = LAYOUTS["embedding.weight"].shard(torch.full((53, 8), float(fill)), mesh)
    set_layout(parameter, LAYOUTS["embedding.weight"])
    return CheckpointState({"embedding.weight": parameter, "norm": torch.full((8,), float(fill))}, {}, {"fill": fill})


def outcome(function, *args, **options):
    """(type, text) of what `function` raises; ("", "") if it does not."""
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def fail_in_many_ways(rank, world_size, directory):
    mesh = ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size)
    directory = Path(directory)
    save(directory, 1, tiny_state(mesh, 1), mesh)
    results = {}

    results["exists"] = outcome(save, directory, 1, tiny_state(mesh, 2), mesh)

    odd = tiny_state(mesh, 2)
    odd.scalars["fill"] = rank
    results["scalars differ"] = outcome(save, directory, 2, odd, mesh)

    odd = tiny_state(mesh, 2)
    if rank == 1:
        odd.model_parameters["norm"] = odd.model_parameters["norm"].double()
    results["dtypes differ"] = outcome(save, directory, 2, odd, mesh)

    odd = tiny_state(mesh, 2)
    if rank == 1:
        cut = odd.model_parameters["embedding.weight"]
        odd.model_parameters["embedding.weight"] = cut[:-1].clone()
        set_layout(odd.model_parameters["embedding.weight"], get_layout(cut))
    results["wrong cut"] = outcome(save, directory, 2, odd, mesh)

    odd = tiny_state(mesh, 2)
    if rank == 1:
        del odd.model_parameters["embedding.weight"]
    results["part missing"] = outcome(save, directory, 2, odd, mesh)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # a real error of the operating system half way through this rank's file, as a full disk gives
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    results["disk full"] = outcome(save, directory, 2, tiny_state(mesh, 2), mesh, keep_last=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    absent = outcome(load, directory / "absent", tiny_state(mesh, 0), mesh)
    results["absent"] = absent
    odd = tiny_state(mesh, 0)
    if rank == 1:
        odd.model_parameters["norm"] = torch.zeros(9)
    results["shapes differ"] = outcome(load, directory, odd, mesh)

    # After all of this the checkpoint of step 1 is whole, and the next save works.
    state = tiny_state(mesh, 0)
    assert load(directory, state, mesh).step == 1 and state.model_parameters["norm"].eq(1).all()
    left = sorted(os.listdir(directory))
    mesh.group("world").barrier(name="listed")
    save(directory, 2, tiny_state(mesh, 2), mesh, keep_last=1)
    load(directory, state, mesh)
    assert state.model_parameters["embedding.weight"].eq(2).all()
    return results, left, sorted(os.listdir(directory))


def test_an_error_on_one_rank_is_the_same_error_on_all_and_costs_nothing(ranks, tmp_path):
    (results, left, at_last), (other, _, _) = ranks.run(fail_in_many_ways, 2, str(tmp_path))
    assert results == other
    expected = {
        "exists": ("FileExistsError", "step-00000001 exists already"),
        "scalars differ": ("ValueError", "scalars.fill is not the same on rank 1 as on rank 0"),
        "dtypes differ": ("ValueError", "model.norm is float64 (8,) on rank 1 and float32 (8,) on rank 0"),
        "wrong cut": ("ValueError", "rank 1: model.embedding.weight: this rank's tensor has shape (25, 8)"),
        "part missing": ("ValueError", "model.embedding.weight: the ranks hold 216 of its 424 elements"),
        "disk full": ("CheckpointError", "rank 1: writing "),
        "absent": ("FileNotFoundError", "holds no complete checkpoint"),
        "shapes differ": ("ValueError", "norm"),
    }
    for case, (kind, text) in expected.items():
        assert results[case][0] == kind and text in results[case][1], (case, results[case])
    assert "File too large" in results["disk full"][1]
    assert left == ["step-00000001"] and at_last == ["step-00000002"]


def damage_and_load(rank, world_size, directory):
    mesh = ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size)
    path = save(directory, 1, tiny_state(mesh, 1), mesh)
    if rank == 0:
        file = sorted(path.glob("*.safetensors"))[1]
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    mesh.group("world").barrier(name="damaged")
    state = tiny_state(mesh, 0)
    result = outcome(load, directory, state, mesh)
    return result, all(not t.any() for t in state.model_parameters.values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_file_that_one_rank_finds_damaged_is_named_on_all(ranks, tmp_path, world_size):
    for (kind, text), unchanged in ranks.run(damage_and_load, world_size, str(tmp_path)):
        assert kind == "CheckpointError" and "rank-00001-00000.safetensors is damaged" in text and unchanged
        assert "rank 1:" in text


def die_while_writing(rank, world_size, directory):
    import signal

    from pyfast.parallel.checkpoint.storage import SafetensorsWriter

    mesh = ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size)
    save(directory, 1, tiny_state(mesh, 1), mesh)
    if rank == 1:
        SafetensorsWriter._write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return outcome(save, directory, 2, tiny_state(mesh, 2), mesh)


def load_and_save(rank, world_size, directory):
    mesh = ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size)
    state = tiny_state(mesh, 0)
    assert load(directory, state, mesh).step == 1
    assert all(t.eq(1).all() for t in state.model_parameters.values())
    save(directory, 2, tiny_state(mesh, 2), mesh)


def test_a_rank_killed_during_a_save_costs_only_that_save(ranks, tmp_path):
    (kind, _), dead = ranks.run(die_while_writing, 2, str(tmp_path), dying=[1])
    assert kind == "RuntimeError" and dead is None
    assert latest(tmp_path).name == "step-00000001"
    ranks.run(load_and_save, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
