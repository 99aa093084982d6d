"""One process: what is saved is loaded to the bit, and what is not a whole checkpoint of this model is refused."""

from __future__ import annotations

import json
import math
import os
import pickletools
import random
import stat

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import _TYPES as SAFETENSORS_DTYPES
from torch.distributed import checkpoint as dcp

from pyfast.parallel import ParallelMesh
from pyfast.parallel.checkpoint import CheckpointError, CheckpointState, latest, load, read_metadata, save
from pyfast.parallel.checkpoint.metadata import CheckpointMetadata, decode, encode
from pyfast.parallel.checkpoint.state import LoadPlanner, SavePlanner
from pyfast.parallel.checkpoint.storage import SafetensorsReader, SafetensorsWriter, chunk_key

DTYPES = [dtype for dtype in SAFETENSORS_DTYPES.values() if dtype is not None]
MESH = ParallelMesh.single()


def random_bits(shape, dtype, seed=0):
    """Any bit pattern at all (NaNs with payload among them), so that only a bitwise copy is equal."""
    count = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same_bits(a, b):
    flat_a, flat_b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(flat_a, flat_b)


def small_state(fill=1.0, names=("a.weight", "b.weight"), shape=(3, 4), **scalars):
    parameters = {name: torch.full(shape, float(fill)) for name in names}
    moments = {name: torch.full(shape, 2.0 * fill) for name in names}
    return CheckpointState(parameters, {"exp_avg": moments}, scalars)


def files_of(path):
    return sorted(path.glob("*.safetensors"))


# ------------------------------------------------------------------------------------------------- to the bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path, dtype):
    shapes = [(), (1,), (5, 3), (2, 3, 4), (0,), (0, 4), (4, 0, 2)]
    full = {f"t{i}": random_bits(shape, dtype, seed=i) for i, shape in enumerate(shapes)}
    save(tmp_path, 1, CheckpointState(full), MESH)
    target = CheckpointState({name: random_bits(t.shape, dtype, seed=99) for name, t in full.items()})
    load(tmp_path, target, MESH)
    for name, tensor in full.items():
        assert same_bits(target.model_parameters[name], tensor), name


def test_an_unsupported_dtype_or_a_sparse_tensor_is_refused_and_nothing_stays_behind(tmp_path):
    for tensor in (torch.zeros(2, dtype=torch.complex128), torch.zeros(2, 2).to_sparse()):
        with pytest.raises((CheckpointError, ValueError), match="complex128|sparse"):
            save(tmp_path, 1, CheckpointState({"w": tensor}), MESH)
        assert list(tmp_path.iterdir()) == []


def test_views_are_saved_by_value(tmp_path):
    flat = torch.arange(24.0)
    views = {
        "bucket.0": flat[:6].view(2, 3),
        "bucket.1": flat[6:12],
        "same.as.0": flat[:6].view(2, 3),
        "transposed": flat.view(4, 6).t(),
        "strided": flat[::5],
        "expanded": torch.tensor([3.0]).expand(4),
        "negative": torch.randn(4, 6, dtype=torch.complex64).conj().imag,
    }
    if torch.complex64 in DTYPES:  # since safetensors 0.6
        views["conjugate"] = torch.randn(4, 6, dtype=torch.complex64).conj()
    save(tmp_path, 1, CheckpointState(views), MESH)
    target = CheckpointState({name: torch.zeros_like(v.clone().contiguous()) for name, v in views.items()})
    load(tmp_path, target, MESH)
    for name, view in views.items():
        assert torch.equal(target.model_parameters[name], view), name


def test_loading_fills_strided_targets_in_place(tmp_path):
    source = torch.randn(4, 6)
    save(tmp_path, 1, CheckpointState({"w": source}), MESH)
    memory = torch.zeros(6, 8)
    load(tmp_path, CheckpointState({"w": memory[:, 2:6].t()}), MESH)
    assert torch.equal(memory[:, 2:6].t(), source)
    assert not memory[:, :2].any() and not memory[:, 6:].any()


def test_parameters_that_require_gradients_load_in_place(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(3))
    saved = parameter.detach().clone()
    save(tmp_path, 1, CheckpointState({"w": parameter}), MESH)
    with torch.no_grad():
        parameter.zero_()
    load(tmp_path, CheckpointState({"w": parameter}), MESH)
    assert torch.equal(parameter, saved) and parameter.grad is None and parameter.is_leaf


NAMES = ["__metadata__", "", ".", "..", "../../etc", "a/b\\c", "a b", "a[0:2]", "a", "[", "]", "$tuple"]
NAMES += ["ü€𝄞", "\udc80", "\x00\n\"'", "a" * 5000]


def test_tensor_names_may_contain_anything(tmp_path):
    full = {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}
    save(tmp_path, 1, CheckpointState(full), MESH)
    target = CheckpointState({name: torch.zeros(2) for name in NAMES})
    load(tmp_path, target, MESH)
    for i, name in enumerate(NAMES):
        assert torch.equal(target.model_parameters[name], torch.full((2,), float(i))), name
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_keys_of_different_chunks_differ():
    whole = [
        "a",
        "a[0:2]",
        "a[0:2][0:2]",
        "a[0:4]",
        "a[0:2][0:4]",
        "a\\n",
        "a\n",
        "",
        "[]",
        "__metadata__",
        "__metadata__[]",
    ]
    keys = [chunk_key(name, (0,), (length,), (4,)) for name in whole for length in (2, 4)]
    assert len(set(keys)) == len(keys)
    assert "__metadata__" not in keys
    assert chunk_key("model.norm.weight", (0,), (4,), (4,)) == "model.norm.weight"


def test_scalars_come_back_with_their_types(tmp_path):
    scalars = {
        "step": 7, "big": 2**70, "negative": -3, "flag": True, "none": None, "text": "ü\udc80\x00", "float": 0.1,
        "tiny": 5e-324, "minus_zero": -0.0, "inf": math.inf, "minus_inf": -math.inf, "nested": {"a": [1, (2, "x"), {}]},
        "keys": {1: "int", ("t",): 2, "$tuple": 3}, "$float": "not a float", "python": random.getstate(),
        "torch": torch.get_rng_state(), "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    }  # fmt: skip
    save(tmp_path, 1, small_state(**scalars), MESH)
    target = small_state(old="goes away")
    load(tmp_path, target, MESH)
    assert target.scalars.keys() == scalars.keys()
    for key, value in scalars.items():
        got = target.scalars[key]
        assert type(got) is type(value), key
        if isinstance(value, torch.Tensor):
            assert same_bits(got, value), key
        else:
            assert got == value and repr(got) == repr(value), key
    assert math.isnan(decode(encode(math.nan, "x")))
    random.setstate(target.scalars["python"])


@pytest.mark.parametrize(
    "value, error", [(object(), TypeError), ({1, 2}, TypeError), (b"x", TypeError), (torch.zeros(1 << 19), ValueError)]
)
def test_scalars_that_json_cannot_hold_are_refused_by_name(tmp_path, value, error):
    with pytest.raises(error, match=r"scalars\.data\[1\]"):
        save(tmp_path, 1, small_state(data=[0, value]), MESH)
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------- what lies in the directory


def test_every_file_is_json_or_safetensors_and_none_is_a_pickle(tmp_path):
    path = save(tmp_path, 3, small_state(data=(1, 2)), MESH, config={"model": {"layers": 2}})
    assert path.name == "step-00000003"
    assert sorted(os.listdir(path)) == ["metadata.json", "rank-00000-00000.safetensors"]
    keys = {f"{kind}.{name}.weight" for kind in ("model", "optimizer.exp_avg") for name in "ab"}
    for file in path.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        else:
            with safe_open(file, framework="pt") as tensors:
                assert set(tensors.keys()) == keys
        with pytest.raises(ValueError):  # no pickle opcode stream, and no zip of one
            list(pickletools.genops(file.read_bytes()))
        assert not file.read_bytes().startswith(b"PK")
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((path / "metadata.json").stat().st_mode)


def test_metadata_says_what_is_there_without_a_model(tmp_path):
    save(tmp_path, 12, small_state(position=5), MESH, config={"seed": 1, "rates": (0.1, math.inf)})
    metadata = read_metadata(latest(tmp_path))
    assert isinstance(metadata, CheckpointMetadata)
    assert (metadata.step, metadata.scalars) == (12, {"position": 5})
    assert metadata.config == {"seed": 1, "rates": (0.1, math.inf)}
    assert metadata.mesh == {"world": 1, "tp": 1, "cp": 1, "pp": 1, "dp": 1}
    record = metadata.tensors["optimizer.exp_avg.a.weight"]
    assert (record.shape, record.dtype, record.layout) == ((3, 4), torch.float32, [])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_large_states_are_spread_over_several_files_and_slices_are_read(tmp_path):
    full = {f"w{i}": torch.randn(10, 10) for i in range(7)}
    tensors = CheckpointState(full).tensors(MESH)
    description = {"step": 1, "mesh": {}, "scalars": {}, "config": None, "layouts": {}}
    writer = SafetensorsWriter(tmp_path, rank=3, description=description, max_file_bytes=1000)
    dcp.save(tensors, storage_writer=writer, planner=SavePlanner(), no_dist=True)
    assert [file.name for file in files_of(tmp_path)] == [f"rank-00003-{i:05d}.safetensors" for i in range(4)]
    target = CheckpointState({name: torch.zeros(10, 10) for name in full})
    reader = SafetensorsReader(read_metadata(tmp_path))
    dcp.load(target.tensors(MESH), storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    assert all(torch.equal(target.model_parameters[name], tensor) for name, tensor in full.items())


# -------------------------------------------------------------------------------------------------- master weights


def bfloat16_state(seed, with_master):
    master = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    parameter = master.bfloat16()
    optimizer = {"master": {"w": master}} if with_master else {}
    return CheckpointState({"w": parameter}, optimizer), master


def test_a_parameter_is_stored_once_as_its_master(tmp_path):
    state, master = bfloat16_state(0, with_master=True)
    path = save(tmp_path, 1, state, MESH)
    metadata = read_metadata(path)
    assert list(metadata.tensors) == ["model.w"] and metadata.tensors["model.w"].dtype == torch.float32

    again, _ = bfloat16_state(1, with_master=True)
    load(path, again, MESH)
    assert torch.equal(again.optimizer_state["master"]["w"], master)
    assert torch.equal(again.model_parameters["w"], master.bfloat16())

    float32 = CheckpointState({"w": torch.zeros(64)}, {})
    load(path, float32, MESH)
    assert torch.equal(float32.model_parameters["w"], master)

    no_master, _ = bfloat16_state(1, with_master=False)
    load(path, no_master, MESH)
    assert torch.equal(no_master.model_parameters["w"], master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checkpoint_without_master_fills_the_master(tmp_path, dtype):
    weight = torch.randn(64).to(dtype)
    save(tmp_path, 1, CheckpointState({"w": weight}, {}), MESH)
    state, _ = bfloat16_state(1, with_master=True)
    load(tmp_path, state, MESH)
    assert torch.equal(state.optimizer_state["master"]["w"], weight.float())
    assert torch.equal(state.model_parameters["w"], weight.bfloat16())


def test_a_master_that_is_not_the_parameter_is_noticed(tmp_path):
    state, _ = bfloat16_state(0, with_master=True)
    state.model_parameters["w"][3] += 1
    with pytest.raises(ValueError, match="'w' is not its master rounded"):
        save(tmp_path, 1, state, MESH)


# ----------------------------------------------------------------------------------------- does not fit the model


def refused_unchanged(path, state, error, match, **options):
    """`load` raises, and no tensor and no scalar of the state changed."""
    tensors = dict(state.model_parameters)
    for kind, of_kind in (state.optimizer_state or {}).items():
        tensors.update({f"{kind} {name}": tensor for name, tensor in of_kind.items()})
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    scalars = dict(state.scalars)
    with pytest.raises(error, match=match) as caught:
        load(path, state, MESH, **options)
    assert all(same_bits(tensors[name], tensor) for name, tensor in before.items())
    assert state.scalars == scalars
    return str(caught.value)


def test_other_names_and_shapes_are_one_error_with_the_first_differences(tmp_path):
    save(tmp_path, 1, small_state(names=[f"old.{i}" for i in range(9)] + ["both"]), MESH)
    state = small_state(5.0, names=["new.0", "new.1", "both"], here=1)
    state.model_parameters["both"] = torch.zeros(4, 3)
    state.optimizer_state["exp_avg"]["both"] = torch.zeros(4, 3)
    message = refused_unchanged(tmp_path, state, ValueError, "not a checkpoint of this model")
    assert "missing in the checkpoint: model.new.0" in message
    assert "not in the model: model.old.0" in message and "... and 13 more not in the model" in message
    assert "model.both: shape (3, 4) in the checkpoint, (4, 3) in the model" in message
    assert len(message.splitlines()) < 20


def test_optimizer_state_must_match_unless_none_is_asked_for(tmp_path):
    save(tmp_path, 1, small_state(), MESH)
    plain = CheckpointState(small_state(0).model_parameters, {})
    refused_unchanged(tmp_path, plain, ValueError, "not in the model: optimizer")
    sgd = CheckpointState(small_state(0).model_parameters, {"momentum": small_state(0).model_parameters})
    refused_unchanged(tmp_path, sgd, ValueError, "missing in the checkpoint: optimizer.momentum.a.weight")
    model_only = CheckpointState(small_state(0).model_parameters)
    load(tmp_path, model_only, MESH)
    assert model_only.model_parameters["a.weight"].eq(1).all()


def test_integers_do_not_become_floats(tmp_path):
    save(tmp_path, 1, CheckpointState({"w": torch.arange(3)}), MESH)
    state = CheckpointState({"w": torch.zeros(3)})
    refused_unchanged(tmp_path, state, ValueError, "w: int64 in the checkpoint, float32 in the model")


def test_optimizer_state_that_belongs_to_no_parameter_or_has_another_shape_is_refused(tmp_path):
    parameters = {"w": torch.zeros(3)}
    for optimizer, match in [
        ({"exp_avg": {"v": torch.zeros(3)}}, "'v' is not among model_parameters"),
        ({"exp_avg": {"w": torch.zeros(4)}}, r"optimizer.exp_avg.w: this rank's tensor has shape \(4,\)"),
        ({"exp.avg": {"w": torch.zeros(3)}}, "kind 'exp.avg' must be a name without dots"),
    ]:
        with pytest.raises(ValueError, match=match):
            save(tmp_path, 1, CheckpointState(parameters, optimizer), MESH)


# ------------------------------------------------------------------------------------------------- damaged on disk


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path, 1, small_state(3.0, at=1), MESH)


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("verify", ["hash", "size"])
@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_data_file_is_named(saved, keep, verify):
    (file,) = files_of(saved)
    file.write_bytes(file.read_bytes()[:keep])
    refused_unchanged(saved, small_state(), CheckpointError, f"{file.name} has .* bytes", verify=verify)


@pytest.mark.parametrize("position", [0, 9, -1, -70])
def test_a_flipped_bit_in_a_data_file_is_named(saved, position):
    (file,) = files_of(saved)
    flip(file, position)
    refused_unchanged(saved, small_state(), CheckpointError, f"{file.name} is damaged: its SHA-256")


def test_a_flipped_bit_in_a_data_files_header_is_named_even_when_only_sizes_are_verified(saved):
    (file,) = files_of(saved)
    flip(file, 0)
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged"):
        load(saved, small_state(), MESH, verify="size")


def test_a_missing_data_file_is_named(saved):
    (file,) = files_of(saved)
    file.unlink()
    refused_unchanged(saved, small_state(), CheckpointError, f"{file.name} is missing")


def test_every_flipped_bit_in_the_metadata_is_noticed(saved):
    file = saved / "metadata.json"
    original = file.read_bytes()
    for position in range(0, len(original), 13):
        flip(file, position)
        if json_equal(file.read_bytes(), original):  # white space
            continue
        with pytest.raises((CheckpointError, ValueError), match="metadata.json"):
            load(saved, small_state(), MESH)
        file.write_bytes(original)


def json_equal(a, b):
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


def rewrite(path, change):
    """Change the metadata with a right SHA-256, as another program would write it."""
    from pyfast.parallel.checkpoint.metadata import _content_hash

    document = json.loads((path / "metadata.json").read_text())
    change(document)
    document["sha256"] = _content_hash(document["content"])
    (path / "metadata.json").write_text(json.dumps(document))


def first_tensor(document):
    return document["content"]["tensors"]["model.a.weight"]


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda d: d.update(version=2), "format version 2; this version of pyfast reads version 1"),
        (lambda d: d.update(format="other"), "not the metadata of a pyfast checkpoint"),
        (lambda d: d["content"].pop("tensors"), "damaged: KeyError"),
        (lambda d: first_tensor(d).update(dtype="nn"), "unknown dtype 'nn'"),
        (lambda d: first_tensor(d)["chunks"].clear(), "do not cover"),
        (lambda d: first_tensor(d)["chunks"][0].update(file="x"), "not listed"),
        (lambda d: first_tensor(d).update(dtype="int32"), "int32 in the checkpoint, float32"),
        (lambda d: d["content"]["files"].update({"../x": {"size": 1, "sha256": ""}}), "leads out of the checkpoint"),
    ],
)
def test_foreign_metadata_is_refused(saved, change, match):
    rewrite(saved, change)
    refused_unchanged(saved, small_state(), (CheckpointError, ValueError), match)


def test_a_data_file_of_another_checkpoint_is_refused(saved, tmp_path):
    other = save(tmp_path / "other", 1, small_state(4.0, at=1), MESH)
    (mine,), (theirs,) = files_of(saved), files_of(other)
    mine.write_bytes(theirs.read_bytes())
    refused_unchanged(saved, small_state(), CheckpointError, mine.name)


def test_text_that_is_not_a_checkpoint_is_refused(saved):
    for text in ("", "[]", "{}", "not json", '{"format": "pyfast-checkpoint"}'):
        (saved / "metadata.json").write_text(text)
        refused_unchanged(saved, small_state(), CheckpointError, "metadata.json")


# ------------------------------------------------------------------------------------ directories and old checkpoints


def test_latest_takes_the_highest_complete_step(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "absent") is None
    for step in (9, 10, 100000000, 2):
        save(tmp_path, step, small_state(float(step)), MESH)
    (tmp_path / "step-00000500").mkdir()
    (tmp_path / "step-999999999").write_text("a file")
    (tmp_path / ".step-99999999.partial").mkdir()
    assert latest(tmp_path) == tmp_path / "step-100000000"
    state = small_state(0)
    assert load(tmp_path, state, MESH).step == 100000000
    assert load(tmp_path / "step-00000009", state, MESH).step == 9
    assert state.model_parameters["a.weight"].eq(9).all()


def test_loading_from_a_directory_without_checkpoints_names_it(tmp_path):
    (tmp_path / "step-00000500").mkdir()
    for path in (tmp_path, tmp_path / "absent", tmp_path / "step-00000500"):
        refused_unchanged(path, small_state(), FileNotFoundError, f"{path}.* complete checkpoint")


def test_a_complete_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 1, small_state(1.0), MESH)
    with pytest.raises(FileExistsError, match="step-00000001 exists already"):
        save(tmp_path, 1, small_state(2.0), MESH)
    state = small_state(0)
    load(tmp_path, state, MESH)
    assert state.model_parameters["a.weight"].eq(1).all()
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_keep_last_keeps_the_new_one_and_those_just_before_it(tmp_path):
    def steps():
        return sorted(int(name[5:]) for name in os.listdir(tmp_path))

    for step in (1, 2, 3, 8):
        save(tmp_path, step, small_state(), MESH)
    save(tmp_path, 4, small_state(), MESH, keep_last=2)
    assert steps() == [3, 4, 8]  # 8 is later: of a run that was rolled back, not ours to remove
    save(tmp_path, 9, small_state(), MESH, keep_last=1)
    assert steps() == [9]


def test_a_failed_save_removes_no_old_checkpoint(tmp_path):
    save(tmp_path, 1, small_state(), MESH)
    with pytest.raises((CheckpointError, ValueError)):
        save(tmp_path, 2, CheckpointState({"w": torch.zeros(2, dtype=torch.complex128)}), MESH, keep_last=1)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_directory_that_cannot_be_made_or_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((CheckpointError, FileExistsError), match="file"):
            save(directory, 1, small_state(), MESH)


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": 1.5}, {"step": -1}, {"step": 1.0}, {"step": True}])
def test_arguments_out_of_range_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        save(tmp_path, **{"step": 1, "state": small_state(), "mesh": MESH, **options})
    with pytest.raises(ValueError, match="verify"):
        load(tmp_path, small_state(), MESH, verify="crc")
