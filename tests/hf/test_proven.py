"""The table of proven rules: what ships is current, what is not in it is refused, what is proven here is remembered."""

import pytest
import torch

import lindos
from lindos.core.errors import RefusedError
from lindos.hf import models, proven
from lindos.hf.infer import infer
from lindos.hf.rules import rules_of
from lindos.hf.twin import twin, types
from lindos.parallel.tensor.heads import Heads
from lindos.parallel.tensor.kind import Tensor


def test_the_shape_of_a_plan_says_how_tp_meets_the_heads():
    assert proven.shape_of({"dp": 1, "tp": 2}, [Heads(4, 2, 2)]) == "tp"
    assert proven.shape_of({"dp": 2, "tp": 4}, [Heads(4, 2, 4)]) == "tp shared"
    assert proven.shape_of({"tp": 2}, [Heads(9, 3, 2)]) == "tp uneven"


def test_the_table_that_ships_covers_the_rules_of_today():
    """A change of inference makes old verdicts void: prove again (lindos prove --all --table)."""
    table, open_ = proven.read(proven.SHIPPED)[proven.minor(models.version())], set()
    for model_type in types():
        try:
            model = twin(model_type, dtype=torch.float32)
        except RefusedError:
            open_.add(model_type)
            continue
        read = Tensor(infer(model, 2)).read(model, 2)
        shape = proven.shape_of({"tp": 2}, read.heads.values())
        if not proven.is_proven(model_type, proven.lines_of(model, read.rules, read.heads), shape):
            open_.add(model_type)
    assert open_ == {name for name in types() if table.get(name, {}).get("reason")}
    assert len(types()) - len(open_) >= 185


def boosted(world, unproven):
    torch.set_num_threads(1)
    model = twin("llama", dtype=torch.float32)
    lindos.Booster(lindos.HybridParallel(tp=2, unproven=unproven)).boost(model)
    return "boosted"


def elsewhere(world, path, unproven):
    proven.SHIPPED = proven.CACHE = path
    try:
        return boosted(world, unproven)
    except RefusedError as error:
        return str(error)
    finally:
        proven.SHIPPED, proven.CACHE = SHIPPED, CACHE


SHIPPED, CACHE = proven.SHIPPED, proven.CACHE


def test_rules_outside_the_table_are_refused_until_proven_or_accepted(ranks, tmp_path, monkeypatch):
    table = tmp_path / "proven.json"
    (said, *_) = ranks.run(elsewhere, 2, table, False)
    assert "not proven for the plan shape 'tp'" in said
    assert "lindos prove --type llama" in said
    assert ranks.run(elsewhere, 2, table, True) == ["boosted"] * 2
    monkeypatch.setattr(proven, "CACHE", table)
    assert lindos.prove(type="llama", tp=2, steps=1, ranks=ranks).verdict == "equal"
    assert ranks.run(elsewhere, 2, table, False) == ["boosted"] * 2


def test_a_block_that_no_proof_has_seen_is_not_covered_by_its_type(tmp_path):
    proven.remember("llama", ["aaaa"], "tp", path=tmp_path / "t.json")
    entry = proven.read(tmp_path / "t.json")[proven.minor(lindos.hf.models.version())]["llama"]
    assert entry == {"lines": ["aaaa"], "shapes": {"tp": "equal"}}


def test_a_difference_anywhere_takes_an_old_verdict_away(tmp_path, monkeypatch):
    monkeypatch.setattr(proven, "CACHE", tmp_path / "cache.json")
    monkeypatch.setattr(proven, "SHIPPED", tmp_path / "shipped.json")
    proven.remember("llama", ["aaaa"], "tp", path=proven.SHIPPED)
    assert proven.is_proven("llama", frozenset(["aaaa"]), "tp")
    proven.remember("llama", ["aaaa"], "tp", "differs")
    assert not proven.is_proven("llama", frozenset(["aaaa"]), "tp")
    assert not proven.is_proven("llama", frozenset(["aaaa", "bbbb"]), "tp shared")


def test_a_difference_is_of_its_own_lines_and_another_proof_does_not_take_it_away(tmp_path, monkeypatch):
    monkeypatch.setattr(proven, "CACHE", tmp_path / "cache.json")
    monkeypatch.setattr(proven, "SHIPPED", tmp_path / "shipped.json")
    proven.remember("llama", ["aaaa", "bbbb"], "tp", "differs")
    proven.remember("llama", ["aaaa", "bbbb", "cccc"], "tp")
    proven.remember("llama", ["dddd"], "tp", "differs")
    assert not proven.is_proven("llama", frozenset(["aaaa", "bbbb"]), "tp")
    assert proven.is_proven("llama", frozenset(["aaaa", "bbbb", "cccc"]), "tp")
    proven.remember("llama", ["aaaa", "bbbb"], "tp")
    assert proven.is_proven("llama", frozenset(["aaaa", "bbbb"]), "tp")


def test_a_field_that_nothing_reads_asks_for_no_proof():
    """Folders of older versions carry such fields: MiniLM's position_embedding_type, for one."""

    def lines(model_type, **fields):
        model = twin(model_type, kind="masked" if model_type == "bert" else None, dtype=torch.float32)
        for name, value in fields.items():
            setattr(model.config, name, value)
        return proven.lines_of(model, rules_of(model, 2), {})

    assert lines("bert", position_embedding_type="absolute") == lines("bert")
    assert lines("bloom", slow_parallel=True) == lines("bloom")
    assert lines("falcon", alibi=True) != lines("falcon", alibi=False)


@pytest.mark.parametrize(("model_type", "kind"), [("t5", "conditional"), ("vit", "image"), ("roberta", "masked")])
def test_a_refusal_names_the_kind_to_prove(model_type, kind, monkeypatch, tmp_path):
    monkeypatch.setattr(proven, "SHIPPED", tmp_path / "none.json")
    monkeypatch.setattr(proven, "CACHE", tmp_path / "none.json")
    model = twin(model_type, kind=kind, dtype=torch.float32)
    with pytest.raises(RefusedError, match=f"lindos prove --type {model_type} --kind {kind} --tp 2"):
        proven.check(model, rules_of(model, 2), {}, {"tp": 2})


class Scaled(torch.nn.Linear):
    """A product with more to it, under the name and shape of a plain one."""

    def forward(self, input):
        return super().forward(input / input.abs().amax(-1, keepdim=True))


def test_a_class_from_elsewhere_is_not_covered_by_a_proof():
    model = twin("llama", dtype=torch.float32)
    down = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = Scaled(down.in_features, down.out_features, bias=False)
    with pytest.raises(RefusedError, match=r"layers\.1\.mlp\.down_proj is a .*Scaled: rules are inferred"):
        proven.check(model, rules_of(model, 2), {}, {"tp": 2})
