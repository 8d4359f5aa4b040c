"""One type of each kind of block at tp, by inferred rules: the sweep over all types is `lindos prove --all`."""

import pytest

import lindos
from lindos.proof import every

SHARED = {"heads": 4, "kv_heads": 2, "vocabulary": 131}
UNEVEN = {"heads": 6, "kv_heads": 3}


@pytest.mark.parametrize(
    ("model_type", "kind", "tp", "sizes"),
    [
        ("bloom", None, 2, {}),  # q, k, v interleaved by head, alibi
        ("falcon", None, 2, {}),  # one kv head, parallel attention
        ("deepseek_v3", None, 2, {}),  # latents, shared experts
        ("gpt_oss", None, 2, {}),  # sinks, biases of experts
        ("dbrx", None, 2, {}),  # experts side by side in two dims
        ("bitnet", None, 2, {}),  # norms over all heads and over the inner features
        ("apertus", None, 2, {}),  # an activation that learns
        ("longcat_flash", None, 2, {}),  # experts that return their input
        ("mamba2", None, 2, {}),  # state space by heads, one group
        ("qwen3_next", None, 2, {}),  # delta rule, gates in q
        ("zamba2", None, 2, {}),  # shared blocks with adapters
        ("phi3", None, 4, SHARED),  # shared lines of a fused product
        ("olmo2", None, 4, SHARED),  # a norm over shared kv heads
        ("llama", None, 2, UNEVEN),
        ("albert", "masked", 2, {}),
        ("vit", "image", 2, {}),
        ("t5", "conditional", 2, {}),  # relative biases by head
        ("bart", "conditional", 2, {}),  # a bias on the logits
    ],
)
def test_a_kind_of_block_is_equal(ranks, model_type, kind, tp, sizes):
    report = lindos.prove(type=model_type, kind=kind, tp=tp, twin=sizes, steps=2, ranks=ranks)
    assert report.verdict == "equal", report.text()


def test_all_writes_a_table_and_a_page_and_says_why_a_type_is_refused(ranks, tmp_path):
    table, said = tmp_path / "proven.json", []
    lines = every.prove_all(["mistral", "musicgen"], ranks, said.append, table, tp=2, steps=1)
    assert [line.verdict for line in lines] == ["equal", "refused"]
    assert "MusicgenConfig" in lines[1].reason
    assert lines[0].cut > 0.99
    assert "1 equal, 1 refused, 0 differ" in every.summary(lines)
    assert [line.split()[1] for line in said] == ["mistral", "musicgen"]
    page = every.page(table)
    assert "| mistral | 5." in page
    assert "MusicgenConfig" in page
