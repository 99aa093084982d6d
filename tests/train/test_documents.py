"""Listing files, cutting them into pieces, reading records: what goes in comes out, and bad input is named."""

from __future__ import annotations

import json
import os
import re
import sysconfig

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfast.train.documents import (
    PIECE_BYTES,
    Document,
    Source,
    cut_pieces,
    find_sources,
    read_documents,
    read_piece,
    standard_library_files,
)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(paths, **options):
    return [b"".join(text for text, _ in document.parts).decode() for document in read_documents(paths, **options)]


def test_a_mix_of_paths_keeps_the_order_given(tmp_path):
    write(tmp_path / "z.txt", "last name, first path")
    write(tmp_path / "d" / "b.py", "b")
    write(tmp_path / "d" / "a" / "x", "x")
    write(tmp_path / "d" / "c.jsonl", '{"text": "one"}\n\n{"text": ""}\n{"text": "two", "id": 3}')
    assert texts([tmp_path / "z.txt", tmp_path / "d"]) == ["last name, first path", "b", "one", "two", "x"]


def test_directories_pass_over_what_is_not_text_and_count_it(tmp_path):
    write(tmp_path / "text", "héllo")
    write(tmp_path / "nul", "a\0b")
    write(tmp_path / "latin", "h\xe9llo".encode("latin-1"))
    write(tmp_path / "cut", "é".encode()[:1])
    write(tmp_path / "empty", "")
    write(tmp_path / ".hidden", "secret")
    write(tmp_path / ".git" / "config", "secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    listing = find_sources([tmp_path])
    assert [os.path.basename(source.path) for source in listing.sources] == ["text"]
    assert (listing.binary, listing.empty, listing.hidden) == (4, 1, 2)
    assert listing.bytes == 6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "does not exist"),
        ("empty.txt", "", "is empty"),
        ("image.png", b"\x89PNG\0\0", "not UTF-8 text"),
        ("folder/.hidden", "x", "directory without text.*1 hidden"),
    ],
)
def test_bad_paths_are_named(tmp_path, name, content, message):
    if content is not None:
        write(tmp_path / name, content)
    path = tmp_path / name.split("/")[0]
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        find_sources([path])


def test_bad_lists_of_paths(tmp_path):
    with pytest.raises(ValueError, match="data.paths is empty"):
        find_sources([])
    with pytest.raises(ValueError, match="give a list"):
        find_sources("text.txt")


@pytest.mark.parametrize("where", ["file", "directory", "inside"])
def test_unreadable_is_named(tmp_path, where, monkeypatch):
    path = write(tmp_path / "d" / "locked.txt", "x")
    refuse = path if where != "directory" else path.parent
    function = "open" if where != "directory" else "scandir"
    real = open if function == "open" else os.scandir

    def guarded(name, *args, **kwargs):  # tests may run as root, whom no permission stops
        if os.fspath(name) == str(refuse):
            raise PermissionError(13, "Permission denied", str(refuse))
        return real(name, *args, **kwargs)

    monkeypatch.setattr("builtins.open" if function == "open" else "os.scandir", guarded)
    with pytest.raises(ValueError, match=f"{refuse}.*cannot be read: Permission denied"):
        find_sources([path if where == "file" else path.parent])


def test_bad_bytes_after_the_sniffed_beginning_are_named(tmp_path):
    path = write(tmp_path / "big.txt", b"a" * (1 << 20) + b"\xff")
    with pytest.raises(ValueError, match=f"big.txt.*byte {1 << 20}"):
        texts([path])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not valid JSON"),
        ('{"text": 3}', 'string under "text", not int'),
        ('{"body": "a"}', "must be"),
        ('["text"]', "must be"),
        ('{"text": "\\ud800"}', "UTF-8"),
        ('{"prompt": "a", "completion": null}', '"completion", not NoneType'),
        ('{"messages": "hi"}', "not a list"),
        ('{"messages": [{"role": "assistant"}]}', '"content"'),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "nothing to learn"),
        (b'{"text": "\xff"}', "UTF-8"),
    ],
)
def test_malformed_records_name_file_and_line(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "data.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    if b"\xff" in line:  # keep the bad byte beyond the part that decides what the file is
        path.write_bytes(b" " * (1 << 20) + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl:3 .*{re.escape(message)}"):
        texts([path])


def test_line_numbers_are_right_beyond_the_first_piece(tmp_path):
    path = write(tmp_path / "data.jsonl", '{"text": "aaaa"}\n' * 10 + "{\n")
    pieces = list(cut_pieces(Source(str(path), "jsonl", path.stat().st_size), 40))
    assert len(pieces) > 2
    with pytest.raises(ValueError, match="data.jsonl:11 "):
        [read_piece(piece) for piece in pieces]


def test_prompts_are_marked_only_when_asked(tmp_path):
    records = [
        {"prompt": "2+2=", "completion": "4"},
        {"messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye"},
        ]},
        {"text": "plain"},
    ]  # fmt: skip
    path = write(tmp_path / "chat.jsonl", "\n".join(json.dumps(record) for record in records))
    asked = list(read_documents([path], mask_prompt=True))
    assert asked[0] == Document(((b"2+2=", False), (b"4", True)))
    assert asked[1] == Document(
        ((b"<|user|>\n", False), (b"Hi\n", False), (b"<|assistant|>\n", False), (b"Hello\n", True),
         (b"<|user|>\n", False), (b"Bye\n", False))
    )  # fmt: skip
    assert asked[2] == Document(((b"plain", True),))
    plain = list(read_documents([path]))
    assert [[text for text, _ in document.parts] for document in plain] == [[t for t, _ in d.parts] for d in asked]
    assert all(learn for document in plain for _, learn in document.parts)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab \n\té€😀", min_size=1, max_size=300), size=st.integers(1, 50))
def test_pieces_of_text_join_to_the_text(tmp_path_factory, text, size):
    path = write(tmp_path_factory.mktemp("text") / "t", text)
    pieces = list(cut_pieces(Source(str(path), "text", path.stat().st_size), size))
    documents = [document for piece in pieces for document in read_piece(piece)]  # each decodes: no character is cut
    assert b"".join(document.parts[0][0] for document in documents).decode() == text
    assert [document.ends for document in documents] == [False] * (len(documents) - 1) + [True]


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(st.text(max_size=20), min_size=1, max_size=20), size=st.integers(1, 80), final=st.booleans())
def test_pieces_of_jsonl_hold_every_record_once(tmp_path_factory, lines, size, final):
    content = "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines) + "\n" * final
    path = write(tmp_path_factory.mktemp("lines") / "t.jsonl", content)
    pieces = list(cut_pieces(Source(str(path), "jsonl", path.stat().st_size), size))
    documents = [document for piece in pieces for document in read_piece(piece)]
    assert [document.parts[0][0].decode() for document in documents] == [line for line in lines if line]
    assert all(document.ends for document in documents)


def test_text_is_cut_where_a_line_starts(tmp_path):
    path = write(tmp_path / "t", "aaaa\n  indented\nbbbb\ncccc")
    pieces = list(cut_pieces(Source(str(path), "text", path.stat().st_size), 4))
    assert [piece.start for piece in pieces] == [0, 16, 21]


def test_progress_reaches_the_total(tmp_path):
    write(tmp_path / "a", "x" * 10)
    write(tmp_path / "b", "y" * 5)
    calls = []
    list(read_documents([tmp_path], progress=lambda done, total: calls.append((done, total))))
    assert calls == [(10, 15), (15, 15)]


def test_large_files_stream(tmp_path):
    path = write(tmp_path / "big", b"line\n" * (PIECE_BYTES // 5 * 2 + 100))
    documents = list(read_documents([path]))
    assert len(documents) == 3 and max(len(d.parts[0][0]) for d in documents) < PIECE_BYTES + 100


def test_standard_library_is_the_same_each_time_and_text():
    files = standard_library_files(1 << 20)
    assert files == sorted(files) == standard_library_files(1 << 20)
    total = sum(map(os.path.getsize, files))
    assert total - os.path.getsize(files[-1]) < 1 << 20 <= total
    root = sysconfig.get_paths()["stdlib"]
    assert all(file.startswith(root) and "packages" not in file and "/test" not in file for file in files)
    assert len(find_sources(files).sources) == len(files)


def test_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="data.paths"):
        standard_library_files()


def test_a_byte_order_mark_is_not_text(tmp_path):
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbfa text\r\n")
    (document,) = read_documents([marked])
    assert document.parts == ((b"a text\r\n", True),)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path):
    deep = tmp_path / "deep.jsonl"
    deep.write_text('{"text": "fine"}\n' + "[" * 200_000 + "\n")
    with pytest.raises(ValueError, match="deep.jsonl:2"):
        list(read_documents([deep]))
