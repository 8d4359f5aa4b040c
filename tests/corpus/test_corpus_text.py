import json
import os

import pytest

from lindos.core.errors import DataError
from lindos.corpus import documents, standard_library


def listed(paths, **options):
    return [(source.rsplit(os.sep, 1)[-1], text) for source, text in documents(paths, **options)]


def test_a_folder_is_walked_in_sorted_order_and_only_for_text(tmp_path):
    for name in ("b.txt", "a/z.py", "a.md", "c/d/e.rst", ".hidden.txt", ".git/x.txt", "__pycache__/x.py", "image.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [text for _, text in listed(tmp_path)] == [
        "text of a/z.py",
        "text of a.md",
        "text of b.txt",
        "text of c/d/e.rst",
        "one",
        "two",
    ]


def test_paths_come_in_the_order_given_whatever_their_suffix(tmp_path):
    (tmp_path / "LICENSE").write_bytes("﻿Große\r\n".encode())
    (tmp_path / "a.txt").write_text("a")
    assert listed([tmp_path / "LICENSE", str(tmp_path / "a.txt")]) == [("LICENSE", "Große\r\n"), ("a.txt", "a")]
    assert listed(str(tmp_path / "a.txt")) == [("a.txt", "a")]


def test_json_lines_give_a_document_a_line(tmp_path):
    file = tmp_path / "x.jsonl"
    lines = [json.dumps({"body": "one"}), "", json.dumps({"body": ""}), json.dumps({"body": "zwei\nüber", "id": 3})]
    file.write_text("\n".join(lines))  # a last line without a line end is whole too
    assert listed(file, field="body") == [("x.jsonl:1", "one"), ("x.jsonl:4", "zwei\nüber")]


def test_a_missing_path_is_named_with_its_nearest_neighbour(tmp_path):
    (tmp_path / "corpus.txt").write_text("a")
    with pytest.raises(DataError, match=r"must exist, got .*corpsu\.txt: did you mean 'corpus\.txt'"):
        listed(tmp_path / "corpsu.txt")
    with pytest.raises(DataError, match=r"missing or empty"):
        listed(tmp_path / "nowhere" / "x.txt")


def test_no_path_at_all_is_an_error():
    with pytest.raises(DataError, match="at least one path"):
        listed([])


@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", "\n \n"), ("a.jsonl", ""), ("a.jsonl", "\n")])
def test_an_empty_file_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"must hold text, got .*{name}: a file without text"):
        listed(tmp_path / name)


def test_a_folder_without_text_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.png").write_text("no")
    with pytest.raises(DataError, match=r"a folder without text in \.txt, \.md"):
        listed(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc\0def", "byte 0x00 at byte offset 3: a binary file"),
        (b"ab\xff\0", "byte 0xff at byte offset 2: a binary file or another encoding"),
        ("é".encode() + b"\xe9 latin", "byte 0xe9 at byte offset 2"),
        ("text".encode("utf-16"), "byte 0xff at byte offset 0 is the mark of UTF-16"),
        (b"text \xe2\x82", "byte 0xe2 at byte offset 5"),
    ],
)
def test_a_binary_file_is_named_with_the_byte(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(DataError, match=f"got .*a.txt: {message}"):
            listed(path)


def test_a_binary_byte_in_json_lines_is_counted_from_the_start_of_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: byte 0xff at byte offset 26"):
        listed(tmp_path)


@pytest.mark.parametrize("last", [b'{"text": "tw', b'{"text": "two"', b"{", '{"text": "€'.encode()[:-1]])
def test_a_cut_last_line_is_named(tmp_path, last):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' + last)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .*(cut after|the end of the file cuts).*Copy the file"):
        listed(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", "line 2, column 2: Expecting property name"),
        ("[1]", "one JSON object, got .*line 2: a list"),
        ('{"txet": "a"}', "under 'text', got .*line 2 without it: did you mean 'txet'"),
        ('{"text": 3}', "'text' must be a string, got .*line 2: a int"),
        ('{"text": "\\ud83d"}', "valid Unicode, got .*line 2"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{line}\n{{"text": "three"}}\n')
    with pytest.raises(DataError, match=message):
        listed(tmp_path)


def test_documents_before_the_wrong_line_are_yielded(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnonsense\n')
    stream = documents(tmp_path)
    assert next(stream).text == "one"
    with pytest.raises(DataError):
        next(stream)


def test_plain_json_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match="must come as JSON Lines"):
        listed(tmp_path / "a.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are of POSIX")
def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a file or a folder"):
        listed(tmp_path / "pipe")


def test_the_standard_library_is_there_sorted_and_readable():
    paths = standard_library()
    assert [path.name for path in paths].count("argparse.py") == 1
    assert not any("site-packages" in path.parts for path in paths)
    assert paths == sorted(paths, key=lambda path: path.parts)
    assert len(paths) > 500
    assert sum(1 for _ in documents(paths)) == len(paths)
