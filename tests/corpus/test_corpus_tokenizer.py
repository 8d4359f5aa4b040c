import json
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from lindos.core.errors import DataError, InputError
from lindos.corpus import Tokenizer, check_vocabulary, load, save, train
from lindos.corpus.pieces import cuts_are_exact, pieces
from lindos.corpus.tokenizer import _sampled

CODE = st.text(st.sampled_from("ab1 \n\r\t.,;'sé\u00a0\u2003中😀_"), max_size=200)


def test_every_text_comes_back(tokenizer):
    for text in ("", "Zürich\r\n\t中文 😀\x00 <|endof|>", "  spaces   and\n\n\nlines  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_of_text_is_token_zero_and_bytes_follow(tokenizer):
    assert tokenizer.end_of_text_id == 0
    assert tokenizer.vocabulary_size == 320
    assert tokenizer.encode("a<|endoftext|>b")[1] == 0
    assert tokenizer.decode([0]) == ""
    assert tokenizer.decode([0], keep_special=True) == "<|endoftext|>"
    assert max(tokenizer.encode("\x00\x01")) <= 256


def test_training_twice_gives_the_same_tokenizer_in_another_process_too(tokenizer, texts):
    assert train(iter(texts), 320).fingerprint == tokenizer.fingerprint
    assert train([("source", text) for text in texts], 320).fingerprint == tokenizer.fingerprint
    assert train(texts[1:], 320).fingerprint != tokenizer.fingerprint
    program = f"from lindos.corpus.tokenizer import train; print(train({texts!r}, 320).fingerprint)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == tokenizer.fingerprint


def test_training_refuses_what_cannot_work(texts):
    with pytest.raises(InputError, match=r"at least 257.*got 256"):
        train(texts, 256)
    with pytest.raises(DataError, match="needs text"):
        train([], 300)
    with pytest.raises(DataError, match="needs text"):
        train([""], 300)


def test_training_on_too_little_text_warns_and_is_smaller():
    with pytest.warns(UserWarning, match=r"for \d+ of the 1000 tokens"):
        tokenizer = train(["abababab"], 1000)
    assert 257 <= tokenizer.vocabulary_size < 1000


def test_sampling_takes_evenly_spaced_pieces_within_the_limit():
    lines = [f"document {number:04d}" for number in range(1000)]
    sample = _sampled(lines, 1000 * 13 // 3)
    assert sample == lines[::4]
    assert _sampled(lines, None) == lines
    assert _sampled(["x" * 1_000_000], 1000)  # a line without end is cut, not taken whole
    assert sum(map(len, _sampled(["x" * 1_000_000], 1000))) <= 1000


def test_one_large_document_is_sampled_from_all_over():
    text = "".join(f"line {number}\n" for number in range(10_000))
    sample = _sampled([text], 10_000)
    assert sum(map(len, sample)) <= 10_000
    assert sample[0].startswith("line 0\n")
    assert "line 9" in sample[-1]


@given(CODE, st.integers(1, 20))
@settings(deadline=None)
def test_pieces_join_to_the_text(text, characters):
    assert "".join(pieces(text, characters)) == text
    assert all(pieces(text, characters))


def test_encoding_in_pieces_gives_the_ids_of_the_whole(tokenizer):
    assert cuts_are_exact(tokenizer.backend)

    @given(CODE, st.integers(1, 20))
    @settings(deadline=None, max_examples=200)
    def check(text, characters):
        parts = [token for part in tokenizer.encode_batch(list(pieces(text, characters))) for token in part]
        assert parts == tokenizer.encode(text)

    check()


def test_tokenizers_of_another_make_are_encoded_whole(texts):
    other = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert not cuts_are_exact(other)
    other = train(texts, 300).backend
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not cuts_are_exact(other)
    other = train(texts, 300).backend
    other.add_tokens([tokenizers.AddedToken("<x>", lstrip=True)])
    assert not cuts_are_exact(other)


def test_a_saved_tokenizer_loads_the_same(tokenizer, tmp_path):
    save(tokenizer, tmp_path / "t")
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.json"):
        again = load(path)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.end_of_text == "<|endoftext|>"


def test_transformers_loads_a_saved_tokenizer(tokenizer, tmp_path, texts):
    from transformers import AutoTokenizer

    save(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    assert loaded(texts[0])["input_ids"] == tokenizer.encode(texts[0])
    assert loaded.decode(tokenizer.encode(texts[0])) == texts[0]
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (0, 0, 0)
    assert len(loaded) == tokenizer.vocabulary_size

    loaded.chat_template = "{{ messages }}"
    loaded.save_pretrained(tmp_path / "theirs")
    theirs = load(tmp_path / "theirs")
    assert theirs.encode(texts[0]) == tokenizer.encode(texts[0])
    assert theirs.end_of_text_id == 0
    save(theirs, tmp_path / "ours")
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").chat_template == "{{ messages }}"


def test_loading_switches_off_truncation_padding_and_added_marks(tokenizer, tmp_path, texts):
    save(tokenizer, tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=9)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode(texts[0]) == tokenizer.encode(texts[0])
    assert load(tmp_path).encode_batch(texts[:2]) == [tokenizer.encode(text) for text in texts[:2]]


def test_a_folder_without_tokenizer_is_named_with_what_it_holds(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"must hold tokenizer\.json, got .*: a folder with config\.json"):
        load(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load(tmp_path / "nowhere")


def test_a_damaged_tokenizer_is_named(tokenizer, tmp_path):
    save(tokenizer, tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text()[:1000])
    with pytest.raises(DataError, match=r"got .*tokenizer\.json"):
        load(tmp_path)


def test_the_end_of_text_must_be_known(tokenizer, tmp_path):
    save(tokenizer, tmp_path)
    with pytest.raises(DataError, match=r"got '<\|endoftxt\|>', unknown to .*did you mean '<\|endoftext\|>'"):
        load(tmp_path, end_of_text="<|endoftxt|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert load(tmp_path).end_of_text_id == tokenizer.backend.token_to_id("a")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json must be a JSON object"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").unlink()
    assert load(tmp_path).end_of_text == "<|endoftext|>"  # by its usual name
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="must say which token ends a text"):
        load(tmp_path)


def test_the_vocabulary_of_a_model_must_cover_the_tokenizer(tokenizer):
    check_vocabulary(tokenizer, 320)
    check_vocabulary(tokenizer, 50_000)
    with pytest.raises(DataError, match=r"a model of 319 tokens and a tokenizer of 320 \(highest id 319\)"):
        check_vocabulary(tokenizer, 319)


def test_ids_with_holes_count_to_the_highest():
    sparse = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 99}, unk_token="a")))
    assert sparse.vocabulary_size == 100
    with pytest.raises(DataError, match="highest id 99"):
        check_vocabulary(sparse, 2)
