from pathlib import Path

import pytest

from lindos.corpus import Tokenizer, train

PROSE = """The sun rose over the harbour, and the boats that had waited all night began to move.
Nobody spoke. A bell rang twice; the second time it rang 1234 times, or so it seemed to them.

    "Where are the others?" she asked, and didn't wait for the answer: it wouldn't have come.
"""


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Forty different documents."""
    return [f"Chapter {number}\n\n{PROSE}{' '.join(PROSE.split()[number:])}\nEnd of {number}\n" for number in range(40)]


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train(texts, 320)


@pytest.fixture
def folder(tmp_path: Path, texts: list[str]) -> Path:
    """A folder with one file a document."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text, "utf-8")
    return folder
