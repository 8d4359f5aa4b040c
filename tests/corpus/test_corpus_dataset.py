import json
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lindos.core.errors import DataError, InputError
from lindos.corpus import TokenRows, build, read_index


@pytest.fixture
def corpus(folder, tokenizer, tmp_path):
    out = tmp_path / "corpus"
    build(folder, tokenizer, out, validation_fraction=0.2, shard_tokens=700)
    return out


def line_of(corpus, split):
    index = read_index(corpus)
    return np.concatenate([np.fromfile(corpus / s.file, "<u2") for s in index.splits[split].shards]).astype(np.int64)


@pytest.mark.parametrize("sequence", [2, 64, 700, 1501])
def test_training_rows_are_the_tokens_in_order_without_the_tail(corpus, sequence):
    rows = TokenRows(corpus, "train", sequence)
    line = line_of(corpus, "train")
    assert len(rows) == len(line) // sequence
    got = torch.stack([rows[i]["input_ids"] for i in range(len(rows))])
    assert got.dtype == torch.int64
    assert got.flatten().tolist() == line[: len(rows) * sequence].tolist()
    assert all(torch.equal(rows[i]["labels"], rows[i]["input_ids"]) for i in (0, -1))


def test_the_tail_of_validation_is_kept_and_padded(corpus, tokenizer):
    line = line_of(corpus, "validation")
    sequence = 100 if len(line) % 100 > 1 else 101
    rows = TokenRows(corpus, "validation", sequence)
    whole, left = divmod(len(line), sequence)
    assert len(rows) == whole + 1
    last = rows[whole]
    assert last["input_ids"].tolist() == line[-left:].tolist() + [tokenizer.end_of_text_id] * (sequence - left)
    assert last["labels"].tolist() == line[-left:].tolist() + [-100] * (sequence - left)
    assert sum(int((row["labels"] != -100).sum()) for row in rows_of(rows)) == len(line)


def test_a_single_token_left_over_predicts_nothing_and_is_dropped(corpus):
    line = line_of(corpus, "validation")
    rows = TokenRows(corpus, "validation", len(line) - 1)
    assert len(rows) == 1
    assert len(TokenRows(corpus, "validation", len(line) + 1)) == 1


def rows_of(rows):
    return (rows[i] for i in range(len(rows)))


def test_rows_may_be_written_to(corpus):
    rows = TokenRows(corpus, "train", 64)
    row = rows[3]
    row["labels"][:] = -100
    row["input_ids"][0] = 5
    again = rows[3]
    assert again["labels"].min() >= 0
    assert again["labels"].tolist() == again["input_ids"].tolist()


def test_indices_count_from_the_end_and_stop_at_it(corpus):
    rows = TokenRows(corpus, "train", 64)
    assert rows[np.int64(-1)]["input_ids"].tolist() == rows[len(rows) - 1]["input_ids"].tolist()
    for row in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError, match="row must be 0 to"):
            rows[row]
    assert len(list(rows)) == len(rows)


def test_it_is_pickled_without_its_maps(corpus):
    rows = TokenRows(corpus, "train", 64)
    rows[0]
    data = pickle.dumps(rows)
    assert len(data) < 20_000
    assert torch.equal(pickle.loads(data)[5]["input_ids"], rows[5]["input_ids"])


def test_workers_read_the_same_rows(corpus):
    rows = TokenRows(corpus, "train", 64)
    rows[0]
    loader = DataLoader(rows, batch_size=8, num_workers=2, multiprocessing_context="fork")
    got = torch.cat([batch["input_ids"] for batch in loader])
    assert torch.equal(got, torch.stack([row["input_ids"] for row in rows_of(rows)]))


def test_what_the_index_knows_is_passed_on(corpus, tokenizer):
    rows = TokenRows(corpus, "validation", 64)
    index = read_index(corpus)
    assert rows.tokens == index.splits["validation"].tokens == len(line_of(corpus, "validation"))
    assert (rows.vocabulary_size, rows.end_of_text_id) == (320, 0)
    assert rows.fingerprint == index.fingerprint
    assert rows.unigram_entropy == index.splits["validation"].unigram_entropy_nats
    assert 3 < rows.unigram_entropy < np.log(320)
    assert (rows.tokenizer_folder / "tokenizer.json").exists()


def test_a_truncated_shard_is_named_with_its_bytes(corpus):
    file = corpus / "train-00001.bin"
    os.truncate(file, 1398)
    with pytest.raises(DataError, match=r"train-00001\.bin must hold 1400 bytes .*, found 1398 bytes: truncated"):
        TokenRows(corpus, "train", 64)
    TokenRows(corpus, "validation", 64)  # which is whole
    with file.open("ab") as stream:
        stream.write(b"1234")
    with pytest.raises(DataError, match="found 1402 bytes: too long"):
        TokenRows(corpus, "train", 64)
    file.unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin is missing"):
        TokenRows(corpus, "train", 64)


def test_a_flipped_bit_is_found_by_verify(corpus):
    TokenRows(corpus, "train", 64, verify=True)
    file = corpus / "train-00002.bin"
    data = bytearray(file.read_bytes())
    data[77] ^= 1
    file.write_bytes(data)
    TokenRows(corpus, "train", 64)
    with pytest.raises(DataError, match=r"train-00002\.bin must have the hash .*bytes have changed"):
        TokenRows(corpus, "train", 64, verify=True)


def test_an_index_of_another_version_is_refused(corpus):
    content = json.loads((corpus / "index.json").read_text())
    (corpus / "index.json").write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(DataError, match="version 1, got version 2"):
        TokenRows(corpus)


def test_an_absent_index_is_named(corpus, tmp_path):
    (corpus / "index.json").unlink()
    with pytest.raises(DataError, match=r"must hold index\.json, got .*: it has none"):
        TokenRows(corpus)
    with pytest.raises(DataError, match="no such folder"):
        TokenRows(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "{",
        lambda content: "[]",
        lambda content: json.dumps({"version": 1}),
        lambda content: json.dumps({**content, "dtype": "int3"}),
        lambda content: json.dumps({**content, "surprise": 1}),
        lambda content: json.dumps({**content, "splits": {"train": content["splits"]["train"]}}),
        lambda content: json.dumps(
            {**content, "splits": {**content["splits"], "train": {**content["splits"]["train"], "tokens": 5}}}
        ),
    ],
)
def test_a_damaged_index_is_named(corpus, damage):
    file = corpus / "index.json"
    file.write_text(damage(json.loads(file.read_text())))
    with pytest.raises(DataError, match=r"must be readable, got .*index\.json"):
        TokenRows(corpus)


def test_settings_that_cannot_work_are_refused(corpus):
    with pytest.raises(InputError, match="did you mean 'validation'"):
        TokenRows(corpus, "valid")
    with pytest.raises(InputError, match="sequence must be at least 2"):
        TokenRows(corpus, sequence=1)
    tokens = read_index(corpus).splits["train"].tokens
    with pytest.raises(DataError, match=f"got {tokens} tokens .* Use sequence={tokens} or less"):
        TokenRows(corpus, sequence=tokens + 1)
    assert len(TokenRows(corpus, sequence=tokens)) == 1
