"""The public names of DESIGN.md are where they are promised, and reachable from `import pyfast` alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

NAMES = {
    "ops": "attention merge_attention linear_cross_entropy rms_norm rotary swiglu adamw_",
    "nn": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding RMSNorm Attention",
    "parallel": "ParallelConfig ParallelMesh save load",
    "models": "TransformerConfig Transformer from_hugging_face to_hugging_face",
    "train": "TrainConfig Trainer",
}


@pytest.mark.parametrize("package", NAMES)
def test_public_names_are_reached_through_the_package(package, tmp_path):
    program = f"import pyfast\nfor name in {NAMES[package].split()!r}: getattr(pyfast.{package}, name)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_an_unknown_name_is_an_attribute_error():
    import pyfast

    assert "ops" in dir(pyfast)
    with pytest.raises(AttributeError, match="no attribute 'kernal'"):
        _ = pyfast.kernal
