"""`prepare`: the same bytes for any number of processes, prompts masked, nothing left after an error."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import pyfast
from pyfast.train import prepare as prepare_module
from pyfast.train.documents import read_documents
from pyfast.train.prepare import main, prepare, tokenize
from pyfast.train.token_file import open_token_file, verify_token_file
from pyfast.train.tokenizer import ByteTokenizer, FileTokenizer

QUIET = Console(quiet=True)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(pyfast.__file__).parents[1])}


@pytest.fixture
def mix(tmp_path):
    """Enough pieces for several tasks: a long file, many short ones, records."""
    folder = tmp_path / "mix"
    folder.mkdir()
    (folder / "long.txt").write_text("a line with an é in it\n" * 400_000)
    for i in range(600):
        (folder / f"{i:03}.txt").write_text(f"file {i}\n")
    (folder / "z.jsonl").write_text("".join(json.dumps({"text": f"record {i}"}) + "\n" for i in range(1000)))
    return folder


def test_any_number_of_processes_writes_the_same_bytes(mix, tmp_path):
    summaries = [prepare([mix], tmp_path / f"p{n}", processes=n, console=QUIET) for n in (1, 2, 3)]
    one = (tmp_path / "p1").read_bytes()
    assert one == (tmp_path / "p2").read_bytes() == (tmp_path / "p3").read_bytes()
    assert [summary.processes for summary in summaries] == [1, 2, 3]
    expected = b"".join(
        b"".join(text for text, _ in document.parts) + b"\0" * document.ends for document in read_documents([mix])
    )
    tokens = open_token_file(tmp_path / "p1").tokens
    assert np.where(tokens.ids == 256, 0, tokens.ids).astype(np.uint8).tobytes() == expected
    assert summaries[0].documents == tokens.offsets.size - 1 == 1601
    assert summaries[0].tokens == len(expected) and summaries[0].file_bytes == len(one)
    verify_token_file(tmp_path / "p2")


def test_a_tokenizer_json_travels_to_the_processes(tmp_path, mix, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a line with an record file"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (mix / "long.txt").write_text("a </s> line\n" * 1000)
    monkeypatch.setattr(prepare_module, "PIECE_BYTES", 4096)  # several tasks of little text
    for n in (1, 2):
        assert prepare([mix], tmp_path / f"p{n}", str(tmp_path), processes=n, console=QUIET).processes == n
    assert (tmp_path / "p1").read_bytes() == (tmp_path / "p2").read_bytes()
    file = open_token_file(tmp_path / "p2")
    ends = FileTokenizer(tmp_path).end_token
    assert np.flatnonzero(file.tokens.ids == ends).tolist() == (file.tokens.offsets[1:] - 1).tolist()


def test_prompts_are_masked(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "ab", "completion": "cd"}\n{"text": "ef"}\n')
    prepare([tmp_path / "t.jsonl"], tmp_path / "masked", mask_prompt=True, console=QUIET)
    tokens = open_token_file(tmp_path / "masked").tokens
    assert tokens.ids.tolist() == [97, 98, 99, 100, 256, 101, 102, 256]
    assert tokens.mask.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert tokens.labels == 5
    prepare([tmp_path / "t.jsonl"], tmp_path / "plain", console=QUIET)
    assert open_token_file(tmp_path / "plain").tokens.mask is None


def test_the_end_of_a_chat_that_ends_with_a_question_is_not_learnt(tmp_path):
    messages = [{"role": role, "content": role[0]} for role in ("assistant", "user")]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": messages}))
    block = tokenize(read_documents([tmp_path / "t.jsonl"], mask_prompt=True), ByteTokenizer(), mask=True)
    assert ByteTokenizer().decode(block.ids[block.mask == 1]) == "a\n" and block.mask[-1] == 0


def test_masking_without_prompts_is_an_error(tmp_path):
    (tmp_path / "t.txt").write_text("no prompt here")
    with pytest.raises(ValueError, match="no document has a prompt"):
        prepare([tmp_path / "t.txt"], tmp_path / "out", mask_prompt=True, console=QUIET)
    assert os.listdir(tmp_path) == ["t.txt"]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_in_the_text_is_one_valueerror_and_leaves_nothing(mix, tmp_path, processes):
    with open(mix / "z.jsonl", "a") as file:
        file.write("{oops\n")
    with pytest.raises(ValueError, match=r"z\.jsonl:1001 is not valid JSON"):
        prepare([mix], tmp_path / "out", processes=processes, console=QUIET)
    assert os.listdir(tmp_path) == ["mix"]


def test_arguments_are_checked_before_anything_is_written(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("text")
    prepare([text], tmp_path / "done", console=QUIET)
    for paths, output, options, message in (
        ([text], tmp_path / "out", {"processes": 0}, "processes is 0"),
        ([text], tmp_path / "done", {}, "exists"),
        ([text], text, {"overwrite": True}, "one of the inputs"),
        ([tmp_path], tmp_path / "done", {"overwrite": True}, "one of the inputs"),
        ([tmp_path / "done"], tmp_path / "out", {}, "prepared token file, not text"),
        ([tmp_path / "none"], tmp_path / "out", {}, "does not exist"),
        ([text], tmp_path / "out", {"tokenizer": str(tmp_path / "none")}, "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(paths, output, console=QUIET, **options)
    assert sorted(os.listdir(tmp_path)) == ["done", "t.txt"] and text.read_text() == "text"


def test_only_empty_records_are_an_error(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="no tokens"):
        prepare([tmp_path / "t.jsonl"], tmp_path / "out", console=QUIET)


def test_the_summary_says_what_was_done(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_text("hello")
    (tmp_path / "t" / "b.bin").write_bytes(b"\0")
    screen = io.StringIO()
    summary = prepare([tmp_path / "t"], tmp_path / "out", console=Console(file=screen, width=120))
    assert summary.listing.binary == 1 and summary.tokens == 6 and summary.tokens_per_second > 0
    for part in ("byte, 257 ids", "1 not text", "6 (5 of them labels)", "tokens/s"):
        assert part in screen.getvalue()


def test_the_command_line(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    arguments = [str(tmp_path / "t.jsonl"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--mask_prompt", "--processes", "1"]) == 0
    assert open_token_file(tmp_path / "out").tokens.mask.tolist() == [0, 1, 1]
    capsys.readouterr()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("pyfast prepare: output") and "exists" in error and "Traceback" not in error
    assert main([*arguments, "--overwrite"]) == 0
    assert open_token_file(tmp_path / "out").tokens.mask is None
    with pytest.raises(SystemExit) as exit:
        main([str(tmp_path)])
    assert exit.value.code == 2 and "--output" in capsys.readouterr().err


def test_an_interrupt_leaves_nothing(tmp_path, capsys, monkeypatch):
    (tmp_path / "t.txt").write_text("text")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_run_task", interrupt)
    assert main([str(tmp_path / "t.txt"), "--output", str(tmp_path / "out")]) == 130
    assert "nothing was written" in capsys.readouterr().err and os.listdir(tmp_path) == ["t.txt"]


def test_a_dead_process_is_an_error_not_a_hang(mix, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "_work", os._exit)  # called with a pipe: the process dies at once
    with pytest.raises(RuntimeError, match="ended early"):
        prepare([mix], tmp_path / "out", processes=2, console=QUIET)
    assert os.listdir(tmp_path) == ["mix"]


def test_processes_end_when_the_parent_is_killed(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text("{}\n" * (2 << 20))
    script = tmp_path / "run.py"
    script.write_text(
        "import multiprocessing, sys, time\n"
        "from pyfast.train import prepare\n"
        "from pyfast.train.documents import find_sources, text_pieces\n"
        "from pyfast.train.tokenizer import ByteTokenizer\n"
        "if __name__ == '__main__':\n"
        "    tasks = [[piece] for piece in text_pieces(find_sources(sys.argv[1:]).sources)]\n"
        "    with prepare._blocks(tasks, ByteTokenizer(), False, 2) as blocks:\n"
        "        next(blocks)\n"
        "        print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "        time.sleep(60)\n"
    )
    files = [str(tmp_path / f"{i}.txt") for i in range(8)]
    process = subprocess.Popen(
        [sys.executable, str(script), *files], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"processes {pids} outlive their parent"
        time.sleep(0.05)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
