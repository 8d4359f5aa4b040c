import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from lindos.core.errors import DataError, InputError
from lindos.corpus import Tokenizer, build, documents, load, read_index, shards, train
from lindos.corpus import publish as publish_module
from lindos.corpus.publish import publish, unpublished
from lindos.corpus.survey import digest_of, survey


def tokens_of(folder, split):
    index = read_index(folder)
    return np.concatenate([np.fromfile(folder / shard.file, index.dtype) for shard in index.splits[split].shards])


def texts_of(folder, split, tokenizer):
    tokens = tokens_of(folder, split)
    ends = np.flatnonzero(tokens == tokenizer.end_of_text_id)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[part != tokenizer.end_of_text_id]) for part in np.split(tokens, ends[:-1] + 1)]


def test_shards_hold_every_document_once_and_in_order(folder, tokenizer, texts, tmp_path):
    calls = []
    index = build(
        folder,
        tokenizer,
        tmp_path / "out",
        validation_fraction=0.2,
        shard_tokens=1000,
        progress=lambda *a: calls.append(a),
    )
    train_texts = texts_of(tmp_path / "out", "train", tokenizer)
    validation_texts = texts_of(tmp_path / "out", "validation", tokenizer)
    assert 0 < len(validation_texts) < 20
    assert sorted(train_texts + validation_texts) == sorted(texts)
    assert train_texts == [text for text in texts if text in set(train_texts)]
    assert index.splits["train"].documents == len(train_texts)
    assert index.splits["validation"].documents == len(validation_texts)
    total = sum(len(text.encode()) for text in texts)
    assert calls[-1] == (total, total)
    assert index.sources["documents"] == 40
    assert index.sources["text_bytes"] == total


def test_the_index_says_what_the_files_hold(folder, tokenizer, tmp_path):
    out = tmp_path / "out"
    index = build(folder, tokenizer, out, validation_fraction=0.2, shard_tokens=1000)
    assert index == read_index(out)
    assert sorted(path.name for path in out.glob("*.bin")) == sorted(
        shard.file for split in index.splits.values() for shard in split.shards
    )
    assert (index.dtype, index.vocabulary_size, index.end_of_text_id) == ("uint16", 320, 0)
    for name, split in index.splits.items():
        assert [shard.file for shard in split.shards] == [f"{name}-{n:05d}.bin" for n in range(len(split.shards))]
        assert all(shard.tokens == 1000 for shard in split.shards[:-1])
        for shard in split.shards:
            data = (out / shard.file).read_bytes()
            assert len(data) == 2 * shard.tokens
            assert hashlib.blake2b(data, digest_size=16).hexdigest() == shard.blake2b
        share = np.bincount(tokens_of(out, name)) / split.tokens
        assert split.unigram_entropy_nats == pytest.approx(-sum(p * np.log(p) for p in share if p), rel=1e-12)
    assert load(out / "tokenizer").fingerprint == tokenizer.fingerprint == index.tokenizer


def test_large_vocabularies_take_four_bytes(folder, tmp_path):
    vocabulary = {"<|endoftext|>": 0, "[UNK]": 1, "the": 70_000}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    index = build(folder, Tokenizer(backend), tmp_path / "out")
    assert index.dtype == "uint32"
    assert tokens_of(tmp_path / "out", "train").max() == 70_000


def test_large_documents_are_encoded_as_whole_ones(tokenizer, texts, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(texts))
    (tmp_path / "b.txt").write_text("Short.")
    monkeypatch.setattr(shards, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 1000)
    calls = []
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    build(paths, tokenizer, tmp_path / "out", progress=lambda *a: calls.append(a))
    assert len(calls) > 15
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    # b is too small to validate, so the last lines of a do
    short = [*tokenizer.encode("Short."), 0]
    begin, end = (tokens_of(tmp_path / "out", name).tolist() for name in ("train", "validation"))
    assert begin[-len(short) :] == short
    begin = begin[: -len(short)]
    assert begin[-1] == end[-1] == 0
    assert begin[:-1] + end[:-1] == tokenizer.encode("".join(texts))


def test_a_document_is_always_on_the_same_side(texts):
    whole, half = ([("", text) for text in part] for part in (texts, texts[::2] * 2))
    sides, again = survey(whole, 0.3).sides, survey(half, 0.3).sides
    assert [sides.of(t, digest_of(t)[0]) for _, t in half] == [again.of(t, digest_of(t)[0]) for _, t in half]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.9])
def test_small_corpora_have_both_splits(texts, tokenizer, tmp_path, count, fraction):
    for number, text in enumerate(texts[:count]):
        (tmp_path / f"{number}.txt").write_text(text)
    paths = sorted(tmp_path.glob("*.txt"))
    index = build(paths, tokenizer, tmp_path / "out", validation_fraction=fraction)
    assert index.splits["train"].tokens > 1
    assert index.splits["validation"].tokens > 1
    parts = [texts_of(tmp_path / "out", name, tokenizer) for name in ("train", "validation")]
    assert sum(len(text) for part in parts for text in part) == sum(map(len, texts[:count]))


def test_one_file_gives_its_last_lines_to_validation(texts, tokenizer, tmp_path):
    text = "".join(texts)
    (tmp_path / "book.txt").write_text(text)
    build(tmp_path / "book.txt", tokenizer, tmp_path / "out", validation_fraction=0.1)
    (begin,), (end,) = (texts_of(tmp_path / "out", name, tokenizer) for name in ("train", "validation"))
    assert begin + end == text
    assert begin.endswith("\n")
    assert 0.05 < len(end) / len(text) < 0.15


def test_copies_of_one_document_do_not_leak_into_validation(texts, tokenizer, tmp_path):
    (tmp_path / "x.jsonl").write_text(f"{json.dumps({'text': texts[0]})}\n" * 5)
    build(tmp_path / "x.jsonl", tokenizer, tmp_path / "out")
    begins, ends = (texts_of(tmp_path / "out", name, tokenizer) for name in ("train", "validation"))
    assert len(begins) == len(ends) == 5
    assert {begin + end for begin, end in zip(begins, ends)} == {texts[0]}


def test_two_characters_suffice_and_one_does_not(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    build(tmp_path / "a.txt", tokenizer, tmp_path / "out")
    (tmp_path / "b.txt").write_text("a")
    with pytest.raises(DataError, match=r"training and for validation, got 1 document\(s\) of one character"):
        build(tmp_path / "b.txt", tokenizer, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_identical_corpus_is_reused_wherever_its_text_lies(folder, tokenizer, tmp_path, monkeypatch):
    index = build(folder, tokenizer, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    shutil.copytree(folder, tmp_path / "moved")
    monkeypatch.setattr(shards, "_encode", None)
    assert build(tmp_path / "moved", tokenizer, tmp_path / "out") == index
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_another_corpus_in_the_way_is_an_error(folder, tokenizer, texts, tmp_path):
    build(folder, tokenizer, tmp_path / "out")
    with pytest.raises(DataError, match="settings differ"):
        build(folder, tokenizer, tmp_path / "out", validation_fraction=0.5)
    with pytest.raises(DataError, match="settings differ"):
        build(folder, train(texts, 300), tmp_path / "out")
    (folder / "new.txt").write_text("new")
    with pytest.raises(DataError, match=r"documents, tokenizer or settings differ\. Delete it"):
        build(folder, tokenizer, tmp_path / "out")


def test_a_foreign_folder_or_file_in_the_way_is_an_error(folder, tokenizer, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("do not lose me")
    with pytest.raises(DataError, match=r"cannot be reused: .*index\.json"):
        build(folder, tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"a folder to make, got .*: a file"):
        build(folder, tokenizer, tmp_path / "file")


def test_a_damaged_corpus_is_not_reused(folder, tokenizer, tmp_path):
    build(folder, tokenizer, tmp_path / "out")
    os.truncate(tmp_path / "out" / "train-00000.bin", 10)
    with pytest.raises(DataError, match=r"cannot be reused: .*train-00000\.bin must hold"):
        build(folder, tokenizer, tmp_path / "out")


def test_an_empty_folder_is_filled_and_missing_parents_are_made(folder, tokenizer, tmp_path):
    (tmp_path / "out").mkdir()
    build(folder, tokenizer, tmp_path / "out")
    build(folder, tokenizer, tmp_path / "a" / "b" / "out")
    assert read_index(tmp_path / "out") == read_index(tmp_path / "a" / "b" / "out")


def test_a_failed_build_leaves_nothing(folder, tokenizer, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder, tokenizer, tmp_path / "place" / "out", progress=stop)
    (folder / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="byte offset 0"):
        build(folder, tokenizer, tmp_path / "place" / "out")
    assert list((tmp_path / "place").iterdir()) == []


def test_a_killed_build_leaves_no_corpus_and_the_next_one_cleans_up(folder, tokenizer, tmp_path):
    place = tmp_path / "place"
    program = (  # runs the one file, since importing the package takes seconds
        "import os, pathlib, runpy\n"
        f"unpublished = runpy.run_path({publish_module.__file__!r})['unpublished']\n"
        f"with unpublished(pathlib.Path({str(place / 'out')!r})) as folder: os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == -9
    (left,) = place.iterdir()
    assert left.name.startswith(".out.building-")
    with unpublished(place / "out") as living:
        for path in (left, living):
            os.utime(path, times=(time.time() - 1000,) * 2)
        build(folder, tokenizer, place / "out")
        assert sorted(place.iterdir()) == sorted([living, place / "out"])


def test_the_second_of_two_builds_reuses_the_first(folder, tokenizer, tmp_path):
    out, inner = tmp_path / "out", []
    outer = build(folder, tokenizer, out, progress=lambda *a: inner or inner.append(build(folder, tokenizer, out)))
    assert outer == inner[0] == read_index(out)
    assert [path.name for path in tmp_path.iterdir() if "building" in path.name] == []


def test_publishing_passes_on_other_errors(tmp_path):
    with unpublished(tmp_path / "out") as folder:
        (folder / "x").write_text("x")
        with pytest.raises(OSError):
            publish(folder, tmp_path / "nowhere" / "out")


def test_documents_that_change_meanwhile_are_noticed(folder, tokenizer, tmp_path, monkeypatch):
    def changed(*args, **options):
        yield from documents(*args, **options)
        (folder / "39.txt").write_text("changed")

    monkeypatch.setattr(shards, "documents", changed)
    with pytest.raises(DataError, match="must not change while they are encoded"):
        build(folder, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"validation_fraction": 0}, {"validation_fraction": 1}, {"shard_tokens": 0}])
def test_settings_out_of_range_are_refused(folder, tokenizer, tmp_path, options):
    with pytest.raises(InputError, match=f"{next(iter(options))} must"):
        build(folder, tokenizer, tmp_path / "out", **options)


def test_the_field_of_json_lines_is_passed_on(texts, tokenizer, tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    index = build(tmp_path / "x.jsonl", tokenizer, tmp_path / "out", field="body")
    assert index.sources["documents"] == 40
    assert index.sources["last"].endswith("x.jsonl:40")
