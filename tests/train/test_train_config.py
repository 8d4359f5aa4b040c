"""Configuration: layers, names, units, and the arithmetic of steps."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from lindos.core.errors import InputError
from lindos.train import config as sections
from lindos.train.config import Config, Data, Parallel, Train, check, plugin_of, steps_of
from lindos.train.reading import configure, overlaid, written
from lindos.train.recipes import RECIPES, recipe

RECIPE_FILES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def test_later_layers_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\ntokens = 5e3\nseed = 3\n[optim]\nlr = 1\n")
    config = configure([str(file), "--recipe", "llama-demo", "--train.seed", "4", "--optim.betas", "0.8", "0.9"])
    assert (config.train.tokens, config.train.seed, config.optim.lr) == (5000, 4, 1.0)
    assert config.optim.betas == (0.8, 0.9)
    assert config.model == recipe("llama-demo").model


def test_short_flags_and_exponents():
    words = ["--data", "a", "b", "--model", "m", "--plugin", "gemini_auto", "--resume=auto", "--train.tokens", "1e9"]
    config = configure([*words, "--optim.lr", "3e-4", "--data.tokenizer=folder", "--run", "r"])
    assert config.data.path == ("a", "b")
    assert (config.model.path, config.parallel.plugin, config.train.resume) == ("m", "gemini_auto", "auto")
    assert (config.train.tokens, config.optim.lr, config.data.tokenizer, config.run) == (10**9, 3e-4, "folder", "r")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--train.token", "5"], "--train.tokens"),
        (["--trian.tokens", "5"], "--train.tokens"),
        (["--train.micro-batch", "5"], "--train.micro_batches"),
        (["--recipe", "lama-demo"], "llama-demo"),
        (["--pluggin", "ddp"], "--plugin"),
    ],
)
def test_misspelt_flags_name_the_nearest(words, named):
    with pytest.raises(InputError, match=f"did you mean '{named}'"):
        configure(words)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[train]\ntokns = 5", "'train.tokns'.*did you mean 'tokens'"),
        ("[trian]\ntokens = 5", "'trian'.*did you mean 'train'"),
        ("[train]\ntokens = 'many'", "'train.tokens' must be a whole number, got 'many'"),
        ("[train]\ntokens = 1.5", "'train.tokens' must be a whole number"),
        ("[train]\nprecision = 'fp8'", "one of fp32, bf16, fp16"),
        ("[optim]\nbetas = [0.9]", "'optim.betas' must be a list"),
        ("[parallel]\ncompile = 1", "true or false"),
        ("train = 5", "must be a section"),
        ("[train\n", "must be TOML"),
    ],
)
def test_wrong_files_say_what_must_hold(tmp_path, text, named):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=named):
        configure([str(file)])


@pytest.mark.parametrize("words", [["--train.tokens", "many"], ["--parallel.plugin", "gemni"], ["--optim.betas", "1"]])
def test_wrong_values_are_one_message(words):
    with pytest.raises(InputError, match="See --help"):
        configure(words)


def test_what_is_out_of_range_is_named():
    with pytest.raises(InputError, match=r"optim\.warmup_share must be 0 to 1, got 2"):
        configure(["--optim.warmup_share", "2"])
    with pytest.raises(InputError, match=r"from_weights needs model\.path"):
        configure(["--model.from_weights"])


@pytest.mark.parametrize("name", RECIPES)
def test_written_configurations_read_back_equal(tmp_path, name):
    config = replace(recipe(name), run='a "quoted" \\ name')
    file = tmp_path / "config.toml"
    file.write_text(written(config))
    assert configure([str(file)]) == config


@pytest.mark.parametrize("file", RECIPE_FILES, ids=lambda file: file.stem)
def test_recipe_files_parse(file):
    assert configure([str(file)]).run.startswith("run/")


def test_the_demo_file_is_the_demo_recipe():
    assert configure([str(RECIPE_FILES[0].parent / "llama-demo.toml")]) == recipe("llama-demo")


def test_every_field_is_documented_and_has_a_default(capsys):
    with pytest.raises(SystemExit):
        configure(["--help"])
    shown = capsys.readouterr().out
    for section in fields(Config):
        value = getattr(Config(), section.name)
        if is_dataclass(value):
            for field in fields(value):
                assert f"--{section.name}.{field.name}" in shown
    source = Path(sections.__file__).read_text()
    body = source[source.index("class Parallel") : source.index("class Steps")]
    for line, after in zip(body.splitlines(), body.splitlines()[1:]):
        if line.startswith("    ") and " = " in line and ": " in line and "default_factory" not in line:
            assert after.strip().startswith('"""') or line.strip().startswith(("return", "given")), line


def test_steps_are_equal_under_plans_that_share_batch_tokens():
    config = Config(data=Data(sequence=128), train=Train(tokens=10_000, batch_tokens=1024))
    tp = steps_of(replace(config, parallel=Parallel(tp=2)), 2)
    dp = steps_of(config, 2)
    assert (tp.dp, tp.rows, tp.tokens, tp.total) == (1, 8, 1024, 10)
    assert (dp.dp, dp.rows, dp.tokens, dp.total) == (2, 4, 1024, 10)


def test_steps_that_do_not_divide_name_what_does():
    with pytest.raises(InputError, match="Use 768 or 1152"):
        steps_of(Config(data=Data(sequence=128), train=Train(batch_tokens=1000)), 3)
    with pytest.raises(InputError, match="micro_rows must divide the 8 rows"):
        steps_of(Config(train=Train(micro_rows=3)), 1)
    with pytest.raises(InputError, match=r"replaces train\.micro_batches"):
        steps_of(Config(train=Train(micro_rows=2, micro_batches=2)), 1)
    assert steps_of(Config(train=Train(batch_rows=8, micro_rows=2)), 1).micro_batches == 4


def test_overlaid_keeps_the_rest():
    assert overlaid(Config(), {"train": {"seed": 1}}) == Config(train=Train(seed=1))
    check(Config())


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("--plugin ddp --parallel.tp 2", {"name": "DDP", "tp": 2, "zero": 0}),
        ("--plugin zero2", {"name": "LowLevelZero", "zero": 2}),
        (
            "--plugin gemini_auto --parallel.device_budget 1GiB",
            {"placement": "auto", "device_budget": 2**30, "zero": 3},
        ),
        ("--plugin gemini_static --parallel.host_fraction 0.5", {"placement": "static", "host_fraction": 0.5}),
        ("--plugin hybrid --parallel.pp 2 --parallel.recompute full", {"pp": 2, "recompute": "full"}),
        ("--plugin hybrid --parallel.recompute selective", {"recompute": "selective", "activations": "device"}),
        ("--parallel.recompute 2e9 --parallel.activations host", {"recompute": 2 * 10**9, "activations": "host"}),
        ("--parallel.recompute 8GiB", {"recompute": 2**33}),
        ("--parallel.compile", {"compile": True}),
        ("--plugin hybrid --parallel.sequence split_gather,ring", {"sequence": ("split_gather", "ring")}),
    ],
)
def test_the_plugin_that_the_section_describes(words, fields):
    plugin = plugin_of(configure(words.split()).parallel)
    assert {name: getattr(plugin, name) for name in fields} == fields


def test_recompute_in_a_file_is_a_word_or_a_size(tmp_path):
    file = tmp_path / "run.toml"
    for text, value in (('"full"', "full"), ('"1.5 GB"', 15 * 10**8), ("2e9", 2 * 10**9), ("4096", 4096)):
        file.write_text(f'[parallel]\nrecompute = {text}\nactivations = "host"\n')
        plugin = plugin_of(configure([str(file)]).parallel)
        assert (plugin.recompute, plugin.activations) == (value, "host")
    with pytest.raises(InputError, match="did you mean 'selective'"):
        plugin_of(Parallel(recompute="selectiv"))


def test_a_plugin_that_says_its_stage_takes_no_other():
    with pytest.raises(InputError, match="says the ZeRO stage"):
        plugin_of(Parallel(plugin="zero1", zero=2))


def test_every_field_of_a_plugin_has_a_flag():
    plugin = plugin_of(Parallel())
    missing = {f.name for f in fields(plugin)} - {f.name for f in fields(Parallel)}
    assert missing == {"name", "placement", "ep"}  # said by --plugin, or reserved
