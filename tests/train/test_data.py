"""Batches: nothing lost, nothing twice, the same rows in every layout, labels as a naive construction has."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pyfast.train.data import Dataset, load_dataset, load_tokens
from pyfast.train.documents import standard_library_files
from pyfast.train.prepare import prepare
from pyfast.train.row_order import permute, row_at
from pyfast.train.token_file import Tokens, TokenSummary
from pyfast.train.tokenizer import ByteTokenizer

END = 9
PINNED = [6, 1, 5, 4, 7, 0, 9, 3, 2, 8]


def tokens_of(documents, masks=None, dtype="<u2"):
    """Tokens of documents given as lists of ids (end token included)."""
    ids = np.array(sum(documents, []), dtype=dtype)
    ends = np.cumsum([len(document) for document in documents])
    mask = None if masks is None else np.array(sum(masks, []), dtype=np.uint8)
    summary = TokenSummary()
    summary.add(ids, ends, mask)
    offsets = np.concatenate([[0], ends])
    return Tokens(ids, offsets, mask, summary.labels, summary.largest, summary.digest())


def naive_rows(documents, masks, size):
    """Every row as (id, label, position) of each token and the lengths of its pieces: one token at a time."""
    stream = []
    for document, mask in zip(documents, masks, strict=True):
        for i, token in enumerate(document):
            has_label = i + 1 < len(document) and mask[i + 1]
            stream.append((token, document[i + 1] if has_label else -100, i == 0))
    while stream and len(stream) % size != 0:
        stream.append((documents[-1][-1], -100, sum(map(len, documents)) == len(stream)))
    rows = []
    for start in range(0, len(stream), size):
        row, position = [], 0
        for i, (token, label, first) in enumerate(stream[start : start + size]):
            position = 0 if first or i == 0 else position + 1
            row.append((token, label, position))
        rows.append(row)
    return rows


def batch_rows(batch, size):
    triples = list(zip(batch.ids.tolist(), batch.labels.tolist(), batch.positions.tolist(), strict=True))
    return [triples[i : i + size] for i in range(0, len(triples), size)]


documents_of = st.lists(st.lists(st.integers(0, 8), max_size=12).map(lambda ids: [*ids, END]), min_size=1, max_size=12)


@st.composite
def sources_and_oracle(draw):
    """One to three sources, some with masks, and the same as plain lists."""
    sources, documents, masks = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        own = draw(documents_of)
        flags = [[draw(st.integers(0, 1)) for _ in document] for document in own] if draw(st.booleans()) else None
        sources.append(tokens_of(own, flags, draw(st.sampled_from(["<u2", "<u4"]))))
        documents += own
        masks += flags or [[1] * len(document) for document in own]
    return sources, documents, masks


@settings(max_examples=150, deadline=None)
@given(case=sources_and_oracle(), size=st.integers(1, 9), seed=st.integers(0, 5))
def test_an_epoch_is_the_naive_rows_each_once(case, size, seed):
    sources, documents, masks = case
    if sum(source.labels for source in sources) == 0 or sum(map(len, documents)) < size:
        with pytest.raises(ValueError, match="no|none|fewer"):
            Dataset(sources, sequence_length=size, micro_batch=1, global_batch=1)
        return
    dataset = Dataset(sources, sequence_length=size, micro_batch=1, global_batch=1, seed=seed, vocab=END + 1)
    batches = [dataset.batch(step, 0) for step in range(dataset.rows)]
    expected = naive_rows(documents, masks, size)
    if len(expected) > dataset.rows:  # a last row of the last end token alone holds nothing to learn
        assert all(label == -100 for _, label, _ in expected.pop())
    assert sorted(row for batch in batches for row in batch_rows(batch, size)) == sorted(expected)
    assert sum(batch.valid for batch in batches) == dataset.labels
    for batch in batches:
        assert batch.valid == int((batch.labels != -100).sum())
        starts = (batch.positions == 0).nonzero().flatten().tolist()
        assert batch.cu_seqlens.tolist() == [*starts, size]
        assert batch.max_seqlen == int(batch.positions.max()) + 1


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    dp=st.integers(1, 4),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 3),
    step=st.integers(0, 50),
)
def test_every_split_of_a_step_holds_the_same_rows(rows, dp, micro, accumulation, seed, step):
    size, total = 4, dp * micro * accumulation
    source = tokens_of([[i, 0, 0, END] for i in range(100, 100 + rows)])  # the first id of a row names it

    def dataset(micro_batch):
        return Dataset([source], sequence_length=size, micro_batch=micro_batch, global_batch=total, seed=seed)

    def rows_of(dataset, dp_size):
        found = []
        for rank in range(dp_size):
            for index in range(dataset.micro_batches(dp_size)):
                batch = dataset.batch(step, index, rank, dp_size)
                assert batch.ids.numel() == dataset.micro_batch * size
                found += batch.ids[::size].tolist()
        return Counter(found)

    one = dataset(1)
    assert rows_of(dataset(micro), dp) == rows_of(one, 1) == rows_of(dataset(total), 1)
    assert one.valid_tokens(step) == sum(one.batch(step, i).valid for i in range(total))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 30), total=st.integers(1, 7), seed=st.integers(0, 3))
def test_steps_continue_across_epochs_without_loss(rows, total, seed):
    """Whatever the global batch, the concatenated steps are whole epochs one after the other."""
    source = tokens_of([[i, 0, END] for i in range(100, 100 + rows)])
    dataset = Dataset([source], sequence_length=3, micro_batch=1, global_batch=total, seed=seed)
    steps = -(-3 * rows // total)
    seen = [dataset.batch(step, i).ids[0].item() - 100 for step in range(steps) for i in range(total)]
    for epoch in range(3):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert dataset.epoch(steps) == steps * total / rows


def test_resuming_at_any_step_and_changing_dp_continues_the_same_order():
    source = tokens_of([[i, 0, 0, END] for i in range(100, 113)])

    def run(first, last, dp, micro):
        dataset = Dataset(
            [source], sequence_length=4, micro_batch=micro, global_batch=12, seed=1
        )  # made anew: no state
        return [
            sorted(
                id
                for rank in range(dp)
                for index in range(dataset.micro_batches(dp))
                for id in dataset.batch(step, index, rank, dp).ids[::4].tolist()
            )
            for step in range(first, last)
        ]

    straight = run(0, 10, 1, 12)
    for stop in range(10):
        assert run(0, stop, 2, 3) + run(stop, 10, 3, 2) == straight


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_the_order_is_a_permutation(rows, seed, epoch):
    order = permute(np.arange(rows), rows, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(rows))
    some = np.arange(0, rows, 7)
    assert np.array_equal(permute(some, rows, seed, epoch), order[::7])


def test_the_order_is_pinned():
    """A changed order would silently break every resume."""
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == PINNED
    later = [permute(np.array([place]), 10, seed=0, epoch=epoch)[0] for epoch, place in ((1, 0), (2, 5))]
    assert row_at(np.array([0, 10, 25]), rows=10, seed=0).tolist() == [PINNED[0], *later]


@pytest.mark.parametrize("rows", [2, 3, 5, 16, 17])
def test_every_row_is_equally_likely_at_every_place(rows):
    trials = 4000
    counts = np.zeros((rows, rows))
    for seed in range(trials):
        counts[np.arange(rows), permute(np.arange(rows), rows, seed, 0)] += 1
    expected = trials / rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (rows - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_seeds_and_epochs_give_unrelated_orders():
    rows = 5000
    orders = [permute(np.arange(rows), rows, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    orders.append(np.arange(rows))
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
        assert i == 4 or abs(np.diff(one)).min() < 10 < abs(np.diff(one)).mean()


def test_huge_row_counts_need_no_memory():
    rows = 2**45 + 12345
    place = np.array([0, 1, rows - 1])
    order = permute(place, rows, 3, 4)
    assert len(set(order.tolist())) == 3 and 0 <= order.min() and order.max() < rows


def test_one_document_longer_than_many_rows():
    document = [*range(9)] * 11 + [END]
    dataset = Dataset([tokens_of([document])], sequence_length=8, micro_batch=13, global_batch=13)
    batch = dataset.batch(0, 0)
    assert dataset.rows == 13 and batch.valid == 99
    rows = sorted(range(13), key=lambda i: dataset.step_rows(0)[i])
    labels = batch.labels.view(13, 8)[rows].flatten()
    assert labels[:99].tolist() == document[1:] and labels[99:].eq(-100).all()
    assert batch.positions.view(13, 8)[rows[:-1]].equal(torch.arange(8).expand(12, 8))


def test_the_last_row_of_one_end_token_is_left_out():
    """Its label already stands in the row before; alone it would be a step without a label."""
    dataset = Dataset([tokens_of([[1, 2, 3, 4, END]])], sequence_length=4, micro_batch=1, global_batch=1)
    assert dataset.rows == 1
    assert dataset.batch(0, 0).labels.tolist() == [2, 3, 4, END]


def test_dtypes_and_device_move():
    batch = Dataset([tokens_of([[1, 2, END]])], sequence_length=3, micro_batch=2, global_batch=2).batch(0, 0)
    assert (batch.ids.dtype, batch.labels.dtype, batch.positions.dtype) == (torch.int64,) * 3
    assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens.tolist() == [0, 3, 6]
    assert isinstance(batch.valid, int) and batch.valid == 4
    assert batch.ids.is_contiguous() and batch.to("meta").labels.shape == (6,)


def test_ids_of_32_bits_come_through():
    dataset = Dataset(
        [tokens_of([[70_000, 2**32 - 2, 65_536]], dtype="<u4")], sequence_length=3, micro_batch=1, global_batch=1
    )
    assert dataset.batch(0, 0).ids.tolist() == [70_000, 2**32 - 2, 65_536]


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([[1, END]], {"sequence_length": 3}, "2 tokens, fewer than one row of train.sequence_length 3"),
        ([[END]] * 5, {}, "none of the 5 tokens"),
        ([[1, 2, END]], {"vocab": 9}, "model.vocab 9 is too small.*token id 9.*at least 10"),
        ([[1, 2, END]], {"micro_batch": 0}, "train.micro_batch is 0"),
        ([[1, 2, END]], {"global_batch": 1.5}, "train.global_batch is 1.5"),
        ([[1, 2, END]], {"sequence_length": -1}, "train.sequence_length is -1"),
    ],
)
def test_bad_data_sets_are_refused(documents, options, message):
    with pytest.raises(ValueError, match=message):
        Dataset([tokens_of(documents)], **{"sequence_length": 2, "micro_batch": 1, "global_batch": 1} | options)


def test_a_global_batch_that_does_not_divide_names_the_three_numbers():
    dataset = Dataset([tokens_of([[1, 2, END]])], sequence_length=2, micro_batch=4, global_batch=12)
    assert dataset.micro_batches(3) == 1
    for call in (lambda: dataset.micro_batches(2), lambda: dataset.batch(0, 0, 0, 2)):
        with pytest.raises(ValueError, match="global_batch is 12.* 2 data-parallel.*micro_batch 4"):
            call()
    for arguments, name in (((0, 1, 0, 3), "micro_index"), ((0, 0, 3, 3), "dp_rank"), ((-1, 0, 0, 3), "step")):
        with pytest.raises(ValueError, match=name):
            dataset.batch(*arguments)


def test_ids_beyond_the_header_are_caught_in_the_batch():
    good = tokens_of([[1, 2, END]])
    lying = Tokens(good.ids, good.offsets, None, good.labels, 2, good.digest)
    dataset = Dataset([lying], sequence_length=3, micro_batch=1, global_batch=1, vocab=5)
    with pytest.raises(ValueError, match="token id 9, beyond model.vocab 5"):
        dataset.batch(0, 0)


# ---- loading


def test_text_and_its_prepared_file_give_the_same_batches(tmp_path):
    tokenizer = ByteTokenizer()
    (tmp_path / "a.txt").write_text("some text, é\n" * 50)
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"prompt": "q" * i, "completion": "a"}) + "\n" for i in range(20))
    )
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    prepare(paths, tmp_path / "tokens", mask_prompt=True, console=Console(quiet=True))
    sizes = {"sequence_length": 32, "micro_batch": 4, "global_batch": 4}
    text = load_dataset(paths, tokenizer, mask_prompt=True, **sizes)
    prepared = load_dataset([tmp_path / "tokens"], tokenizer, **sizes)
    assert text.fingerprint == prepared.fingerprint
    for step in range(10):
        one, other = text.batch(step, 0), prepared.batch(step, 0)
        assert one.labels.equal(other.labels) and one.ids.equal(other.ids) and one.cu_seqlens.equal(other.cu_seqlens)
    unmasked = load_dataset(paths, tokenizer, **sizes)
    assert unmasked.fingerprint != text.fingerprint and unmasked.labels > text.labels


def test_prepared_and_plain_paths_mix_in_order(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    prepare([tmp_path / "b.txt"], tmp_path / "b.tokens", console=Console(quiet=True))
    sources = load_tokens([tmp_path / "a.txt", tmp_path / "b.tokens", tmp_path / "c.txt"], ByteTokenizer())
    assert [source.ids.tolist() for source in sources] == [[97, 256], [98, 256], [99, 256]]


def test_another_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    prepare([tmp_path / "a.txt"], tmp_path / "tokens", console=Console(quiet=True))
    other = ByteTokenizer()
    other.name, other.fingerprint = "other", "0" * 64
    with pytest.raises(ValueError, match="prepared with the tokenizer 'byte'.*data.tokenizer is 'other'"):
        load_tokens([tmp_path / "tokens"], other)


def test_loading_errors(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "e.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="no document has a prompt"):
        load_tokens([tmp_path / "a.txt"], ByteTokenizer(), mask_prompt=True)
    with pytest.raises(ValueError, match="no text"):
        load_tokens([tmp_path / "e.jsonl"], ByteTokenizer())


def test_the_default_data_is_the_standard_library_and_progress_reaches_its_end():
    calls = []
    dataset = load_dataset(
        None,
        ByteTokenizer(),
        sequence_length=256,
        micro_batch=16,
        global_batch=32,
        vocab=257,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert dataset.tokens > 1 << 20 and dataset.documents == len(standard_library_files())
    assert calls[-1][0] == calls[-1][1] == dataset.tokens - dataset.documents


def test_the_fingerprint_sees_the_data_and_the_row_length():
    sizes = {"sequence_length": 2, "micro_batch": 1, "global_batch": 1}
    one = Dataset([tokens_of([[1, 2, END]])], **sizes).fingerprint
    assert one == Dataset([tokens_of([[1, 2, END]])], **sizes | {"seed": 3}).fingerprint
    changed = [[[1, 3, END]], [[1, END], [END]]]
    assert len({one, *(Dataset([tokens_of(documents)], **sizes).fingerprint for documents in changed)}) == 3
    assert one != Dataset([tokens_of([[1, 2, END]])], **sizes | {"sequence_length": 3}).fingerprint
