"""What is said of a run: the sample, the layout, the settings."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from pyfast.train.config import from_dict, resolve
from pyfast.train.display import Display, EndInfo, Sample
from pyfast.train.report import draw_layout, first_tokens, printable, sample_text
from pyfast.train.tokenizer import ByteTokenizer
from pyfast.train.trainer import Trainer

END = ByteTokenizer.end_token


def trained(tmp_path: Path, steps: int, **train: int) -> tuple[Trainer, object]:
    (tmp_path / "text.txt").write_text("Die Küche ist grün. " * 50)
    config = from_dict(
        {
            "model": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2},
            "data": {"paths": str(tmp_path / "text.txt")},
            "parallel": {"tensor": 1},
            "train": {"steps": steps, "sequence_length": 64, "global_batch": 4, **train},
            "optimizer": {"learning_rate": 0.02, "warmup_steps": 2},
            "checkpoint": {"directory": None},
            "log": {"directory": str(tmp_path / "run")},
        }
    )
    trainer = Trainer(config)
    return trainer, trainer.fit()


def test_a_sample_starts_with_the_data_and_is_the_model_s_own_from_there(tmp_path):
    trainer, result = trained(tmp_path, 60)
    sample = sample_text(trainer, result, tokens=20)
    assert sample.prompt == "Die Küche ist g"  # 16 bytes
    assert sample.written and sample.written[0] == "r"
    assert sample == sample_text(trainer, result, tokens=20)


def test_while_it_would_be_noise_there_is_no_sample(tmp_path):
    said = sample_text(*trained(tmp_path, 2))
    assert said.startswith("too early for a sample: the mean loss is 5.") and "above 3.33" in said


def dataset(*documents: bytes) -> SimpleNamespace:
    ids = [[*document, END] for document in documents]
    offsets = np.cumsum([0] + [len(one) for one in ids])
    return SimpleNamespace(sources=[SimpleNamespace(ids=np.array(sum(ids, []), dtype="<u2"), offsets=offsets)])


@pytest.mark.parametrize(
    "documents, expected",
    [
        ([b"abcdefgh", b"x"], b"abcd"),
        ([b"ab", b"xyz"], b"ab"),
        ([b"", b"xyz"], b"xyz"),
        (["abcé".encode()], b"abc"),
        (["\N{GRINNING FACE}x".encode()], "\N{GRINNING FACE}".encode()),
        ([b"\xff\xff\xff\xff\xff"], b"\xff\xff\xff\xff"),  # no text at all: better than no prompt
        ([b""], b""),
    ],
)
def test_the_prompt_is_the_start_of_the_first_document_in_whole_characters(documents, expected):
    assert bytes(first_tokens(dataset(*documents), ByteTokenizer(), 4)) == expected


def test_nothing_that_a_terminal_obeys_is_shown():
    assert printable("a\x1b[31m\r\x07\x00\u202e\tb\n") == "a\ufffd[31m\ufffd\ufffd\ufffd\ufffd\tb\n"


@pytest.mark.parametrize(
    "sample, expected",
    [(Sample("def [f", "oo(x) [bold]"), "[def [f]oo(x) [bold]"), ("too early for a sample: x", "too early")],
)
def test_the_prompt_is_marked(sample, expected):
    file = io.StringIO()
    Display(Console(file=file, width=100)).end(EndInfo("done", {}, sample, []))
    assert expected in file.getvalue() and ("a sample of" in file.getvalue()) == isinstance(sample, Sample)


def layout(ranks: int, order: str) -> list[str]:
    values = {"parallel": {"tensor": 2, "order": order}, "train": {"global_batch": 24}}
    model = SimpleNamespace(heads=6, kv_heads=2, ffn_width=512, vocab=257)
    return draw_layout(resolve(from_dict(values), ranks), model)


def test_few_ranks_are_drawn_one_by_one():
    lines = layout(8, "tp-cp-pp-dp")
    assert len(lines) == 8
    assert lines[3] == (
        "rank 3 (tp 1 dp 1): heads 3-5, kv heads 1, ffn 256-511, vocabulary 129-256, 6 of 24 sequences a step"
    )


@pytest.mark.parametrize("order, apart", [("tp-cp-pp-dp", (1, 2)), ("dp-tp-cp-pp", (12, 1))])
def test_many_ranks_are_summed_up_in_a_line_a_dimension(order, apart):
    assert sorted(layout(24, order)) == [
        f"data parallel 12, ranks {apart[1]} apart: 2 of 24 sequences a step each",
        f"tensor parallel 2, ranks {apart[0]} apart: 3 of 6 heads, 1 of 2 kv heads, 256 of 512 ffn, "
        "128-129 of 257 vocabulary each",
    ]
