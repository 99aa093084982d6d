"""Tokenizers: ids to text and back, end tokens, fingerprints; files are compared with the library itself."""

from __future__ import annotations

import builtins
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyfast.train.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, token_dtype

TEXT = "the cat sat on the mat, the dog ate the hat. " * 20


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """A small BPE tokenizer with special tokens, and the truncation and padding that published files often carry."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<stop>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
    assert tokenizer.decode(ids) == text


def test_byte_ids_cover_every_byte_and_the_end():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.vocab_size == 257 and tokenizer.end_token == 256
    assert tokenizer.encode(bytes(range(256))).tolist() == list(range(256))
    assert tokenizer.encode("").size == 0


def test_decode_shows_cut_characters_and_leaves_out_end_tokens():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("aé€")
    assert tokenizer.decode([*ids[:2], 256]) == "a\ufffd"
    assert tokenizer.decode([*ids[:3], 256, *ids[3:], 256]) == "aé€"
    assert tokenizer.decode(torch.tensor([104, 105])) == "hi"
    with pytest.raises(ValueError, match="257"):
        tokenizer.decode([257])


def test_dtype_boundary():
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32
    for size in (0, 2**32 + 1):
        with pytest.raises(ValueError, match="vocab_size"):
            token_dtype(size)


def test_file_equals_the_library(tokenizer_json):
    import tokenizers

    oracle = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    oracle.no_truncation()
    oracle.no_padding()
    tokenizer = load_tokenizer(str(tokenizer_json))
    ids = tokenizer.encode(TEXT)
    assert ids.tolist() == oracle.encode(TEXT).ids
    assert len(ids) > 8 and ids.dtype == np.uint16
    assert tokenizer.encode(TEXT.encode()).tolist() == ids.tolist()
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.vocab_size == oracle.get_vocab_size()
    assert load_tokenizer(str(tokenizer_json.parent)).fingerprint == tokenizer.fingerprint


def test_text_cannot_smuggle_in_an_end_token(tokenizer_json):
    tokenizer = load_tokenizer(str(tokenizer_json))
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        ids = copy.encode("a</s>b")
        assert copy.end_token not in ids
        assert copy.decode(ids) == "a</s>b"


def test_end_token_comes_from_the_config_or_the_caller(tokenizer_json, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_json.read_bytes())
    known = FileTokenizer(path)
    assert known.end_token == 2  # "</s>" is a name everybody uses
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    assert FileTokenizer(path).end_token == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>", "lstrip": False}}))
    configured = FileTokenizer(path)
    assert configured.end_token == 1
    assert configured.fingerprint != known.fingerprint
    assert FileTokenizer(path, end_token="</s>").fingerprint == known.fingerprint
    assert FileTokenizer(path, end_token=0).end_token == 0
    for wrong in ("nowhere", 300):
        with pytest.raises(ValueError, match="not in the tokenizer's vocabulary"):
            FileTokenizer(path, end_token=wrong)


def test_no_end_token_is_an_error(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(ValueError, match="no end-of-document token.*end_token"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), end_token="b").end_token == 1


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), (b"{}", "not a tokenizer.json")])
def test_bad_files(tmp_path, content, message):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(path))


def test_bad_specs():
    with pytest.raises(ValueError, match="tokenizer is ''"):
        load_tokenizer("")
    with pytest.raises(ValueError, match="always 256"):
        load_tokenizer("byte", end_token=3)


def test_missing_package_says_how_to_install(monkeypatch, tmp_path):
    real = builtins.__import__

    def without_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(ImportError, match=r"pip install 'pyfast\[tokenizers\]'"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer("byte").vocab_size == 257
