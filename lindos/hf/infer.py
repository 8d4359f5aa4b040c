"""Rules by structure: what each module of a model is, told from its children, for models with and without a plan."""

from __future__ import annotations

from torch import nn

from lindos.core.errors import LayoutError
from lindos.core.rules import Rule, Rules
from lindos.hf import blocks, mixers, models
from lindos.hf.blocks import Block, Found, Left
from lindos.parallel.tensor.heads import Heads

# Parts of a name that lead to what text does not pass through: towers for images and sound, and what joins them.
TOWERS = (
    "vision_tower", "vision_model", "visual", "vision_encoder", "audio_tower", "audio_model", "audio_encoder",
    "image_encoder", "embed_vision", "embed_audio", "multi_modal_projector", "embed_tokens_extend", "speech_encoder",
    "image_embed", "audio_embed", "vision_embedder",
)  # fmt: skip


def infer(model: nn.Module, parts: int) -> Rules:
    """Rules of every block that is known by structure, for tp = `parts`; towers for images and sound stay whole.

    Args:
        model: on any device, meta too; only names, shapes and attributes are read.
        parts: tp.

    Raises:
        LayoutError: tp cannot cut the heads of a block; says which sizes can.
    """
    modules = dict(model.named_modules())
    found = Found()
    for name, module in modules.items():
        if any(part in TOWERS for part in name.split(".")):
            continue
        _block(found, name, module, modules, parts)
    _vocabulary(found, model, modules)
    return Rules(tuple(found.rules.values()), found.homes, found.left)


def _block(found: Found, name: str, module: nn.Module, modules: dict[str, nn.Module], parts: int) -> None:
    """The first maker that knows this block gives its rules."""
    if type(module).__name__ in blocks.ENTANGLED:
        found.left[name] = blocks.ENTANGLED[type(module).__name__]
        return
    if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
        found.left[name] = "slow_but_exact reads its weights in slices"
        return
    if getattr(getattr(module, "config", None), "use_prompt", False) and "Attention" in type(module).__name__:
        found.left[name] = "prompts come with all heads"
        return
    for make in (*mixers.MAKERS, *blocks.MAKERS):
        block = Block(name, module, modules, parts)
        try:
            if not make(block):
                continue
            if any(rule.pattern in found.rules for rule in block.rules):
                return
            for home in block.homes.values():
                Heads(home.query, home.key_value, parts)  # or says which tp can cut them
        except Left as reason:
            found.left[name] = str(reason)
            return
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from None
        found.add(block)
        return


def _vocabulary(found: Found, model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """The input table and the output head, where they are plain ones."""
    table, head = models.input_table(model), models.output_head(model)
    weight, out = _weight(table), _weight(head)
    tied = weight is not None and weight is out
    cut_head = isinstance(head, nn.Linear) and (isinstance(table, nn.Embedding) or not tied)
    owner = next((module for module in modules.values() if head in list(module.children())), None)
    if type(owner).__name__ in blocks.ENTANGLED:
        found.left["vocabulary"] = blocks.ENTANGLED[type(owner).__name__]
        cut_head = False
    for name, module in modules.items():  # encoder and decoder may each have a table of the same weight
        own = module._parameters.get("weight")
        if isinstance(module, nn.Embedding) and own is weight and weight is not None and (cut_head or not tied):
            found.rules.setdefault(name, Rule(name, "vocabulary_embedding", source="inferred"))
            for leaf, child in module.named_children():  # a norm inside sees the rows of this rank's ids only
                if any(True for _ in child.parameters()):
                    found.rules.setdefault(f"{name}.{leaf}", Rule(f"{name}.{leaf}", "activation_parameter"))
        if cut_head and module is head:
            found.rules.setdefault(name, Rule(name, "vocabulary_head", source="inferred"))


def _weight(module: nn.Module | None) -> nn.Parameter | None:
    return None if module is None else module._parameters.get("weight")
