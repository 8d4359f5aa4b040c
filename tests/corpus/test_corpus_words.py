import pytest

from lindos.corpus import Document, known_words_share, words_of


def test_words_are_runs_of_letters_and_underscores():
    documents = [Document("a", "def __init__(self): x1 = _ + 2"), "don't  __  Über"]
    assert words_of(documents) == {"def", "__init__", "self", "x", "don", "t", "ber"}


@pytest.mark.parametrize(
    ("sample", "share"),
    [("the cat", 1.0), ("the the flurb xyzzy", 0.5), ("THE", 0.0), ("", 0.0), ("123 __ ", 0.0), ("the_cat cat1", 0.5)],
)
def test_the_share_counts_every_word_of_the_sample(sample, share):
    corpus = ["the cat sat", "on the mat"]
    for form in (corpus, iter(corpus), [("x", text) for text in corpus], words_of(corpus), set(words_of(corpus))):
        assert known_words_share(sample, form) == share
    assert known_words_share(sample, "the cat sat on the mat") == share
