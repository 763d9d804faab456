"""D03: one chat template mode, stored with the data, carried by the drafter, used for prompts; a mismatch is an error."""

import dataclasses
import json

import pytest
import tiny

from dspine_jax.chat import agreed_template_mode, chat_ids, load_tokenizer
from serve import generate
from train.data import Manifest, write_dataset
from train.loop import run


def test_one_mode_or_none_is_agreed_on_and_two_are_refused():
    assert agreed_template_mode(None, {}) == agreed_template_mode(None, {"a": None}) == "unset"
    assert agreed_template_mode("thinking", {"a": None}) == agreed_template_mode(None, {"a": "thinking", "b": "thinking"}) == "thinking"
    with pytest.raises(ValueError, match="'unset' of a is not 'thinking' of b"):
        agreed_template_mode(None, {"a": "unset", "b": "thinking"})
    with pytest.raises(ValueError, match="'thinking' of --template-mode is not 'unset' of a"):
        agreed_template_mode("thinking", {"a": "unset"})


def test_the_mode_goes_from_the_data_through_the_drafter_into_prompts(tmp_path, capsys):
    target = tiny.write_target(tmp_path / "target")
    tiny.write_tokenizer(target)
    write_dataset(tmp_path / "data", *tiny.rows(13), Manifest(name="a", source="random", template_mode="non-thinking"))
    config = tiny.train_config("dflash", steps=1, workdir=str(tmp_path / "run"), target=str(target))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(tmp_path / "data")))
    for mode in ("thinking", "unset"):
        other = dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, template_mode=mode))
        with pytest.raises(ValueError, match=f"was prepared in template mode 'non-thinking', but '{mode}' is asked for"):
            run(other)
    drafter = run(config)
    assert json.loads((drafter / "config.json").read_text())["template_mode"] == "non-thinking"
    tokenizer = load_tokenizer(target)
    common = ["--target", str(target), "--drafter", str(drafter), "--dtype", "float32"]
    _, prompts, *_ = generate.load(generate.parse_args([*common, "w10 w20"]))
    messages = [{"role": "user", "content": "w10 w20"}]
    assert prompts == [chat_ids(tokenizer, messages, "non-thinking")] != [chat_ids(tokenizer, messages, "unset")]
    assert generate.main([*common, "--template-mode", "thinking", "w10"]) == 2
    assert f"'thinking' of --template-mode is not 'non-thinking' of the drafter {drafter}" in capsys.readouterr().err
