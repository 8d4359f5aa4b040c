"""Round trip of every causal type: tp=2 exports, transformers loads; every tensor bit-equal, names as on disk.

python benchmarks/exports.py [TYPE ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import lindos
from lindos.comm.ranks import pool
from lindos.comm.world import World
from lindos.hf import models
from lindos.hf.twin import twin, types


def exported(world: World, model_type: str, folder: str) -> bool:
    """Every rank splits the twin and exports it."""
    torch.set_num_threads(1)
    models.quiet()
    booster = lindos.Booster(lindos.HybridParallel(tp=world.size, unproven=True), allow=("whole",))
    booster.boost(twin(model_type, seed=1, dtype=torch.float32))
    booster.export(folder)
    return True


def names_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found


def compared(model_type: str, folder: Path, plain: Path) -> str:
    """Empty where the round trip gives the same bits and names."""
    model = twin(model_type, seed=1, dtype=torch.float32)
    model.save_pretrained(plain)
    missing = names_in(plain) ^ names_in(folder)
    if missing:
        return f"other names than transformers writes: {sorted(missing)[:4]}"
    again = type(model).from_pretrained(folder, dtype=torch.float32)
    theirs = again.state_dict()
    for name, value in model.state_dict().items():
        if name not in theirs or not torch.equal(value, theirs[name]):
            return f"{name} is not bit-equal"
    return ""


def main() -> None:
    models.quiet()
    ranks, found = pool(), dict[str, Any]()
    for model_type in sys.argv[1:] or types():
        with tempfile.TemporaryDirectory() as place:
            try:
                ranks.run(exported, 2, model_type, f"{place}/tp")
                why = compared(model_type, Path(place) / "tp", Path(place) / "plain")
                found[model_type] = f"differs: {why}" if why else "equal"
            except Exception as error:
                found[model_type] = f"refused: {str(error).strip().splitlines()[-1][:200]}"
        print(f"{model_type:28} {found[model_type]}", flush=True)
    print(json.dumps(Counter(text.split(":")[0] for text in found.values())))


if __name__ == "__main__":
    main()
